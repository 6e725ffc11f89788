"""Copying and pickling of compiled steps."""

from __future__ import annotations

import copy
import sys
from typing import Any


class Copied:
    """A step that is made of its function and a few settings. Copies have no programs yet."""

    _function: Any
    _asked: tuple[Any, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A step of its own of a copy of the function: that of a method is of a copied object."""
        make: Any = type(self)
        other = make(copy.deepcopy(self._function, memo), *self._asked)
        memo[id(self)] = other
        added = {name: value for name, value in vars(self).items() if name not in vars(other)}
        vars(other).update(copy.deepcopy(added, memo))
        return other

    def __reduce__(self) -> Any:
        """By name, where its module has it (``@xd.compile``), else by the function."""
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for name in getattr(self, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        if found is self:
            return self.__qualname__
        return _remade, (type(self), self._function, *self._asked)


def _remade(cls: Any, *parts: Any) -> Any:
    return cls(*parts)
