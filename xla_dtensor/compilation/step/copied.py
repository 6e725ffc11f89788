"""Copies of compiled steps, and steps pickled: made of the function anew, without programs."""

from __future__ import annotations

import copy
import sys
from typing import Any


def deep_copy(step: Any, memo: dict[int, Any]) -> Any:
    """A step of its own of a copy of the function: that of a method is of a copied object."""
    other = type(step)(copy.deepcopy(step._function, memo), *step._asked)
    memo[id(step)] = other
    added = {name: value for name, value in vars(step).items() if name not in vars(other)}
    vars(other).update(copy.deepcopy(added, memo))
    return other


def reduced(step: Any) -> Any:
    """By name, where its module has it (``@xd.compile``), else by the function."""
    found: Any = sys.modules.get(getattr(step, "__module__", ""))
    for name in getattr(step, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    if found is step:
        return step.__qualname__
    return _remade, (type(step), step._function, *step._asked)


def _remade(cls: Any, *parts: Any) -> Any:
    return cls(*parts)
