"""Symbolic numbers without a value: torch can compute with them, but asking for it raises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base.numbers.traced_number import NumberNode
from xla_dtensor.errors import UnsupportedOpError


def symbolic_number(traced: Any) -> Any:
    """A traced scalar inside an executable that is being built, as a number for torch code.

    It has no present value, so comparing it raises.
    """

    def refuse() -> None:
        raise UnsupportedOpError(
            "torch's decomposition of this operation decides by the value of a number argument; "
            "it needs a lowering with static_scalars=True (xla_dtensor/lowering/README.md)"
        )

    return valueless_number(traced, "number", refuse)


def valueless_number(traced: Any, text: str, refuse: Callable[[], None]) -> Any:
    """A traced scalar as a number that can only be computed with.

    Args:
        refuse: raises; called when something depends on its value.
    """

    def compute(inputs: list[float]) -> float:
        refuse()
        return math.nan

    if getattr(getattr(traced, "dtype", None), "kind", "f") in "iu":
        node = NumberNode(0, traced, compute, text, lambda *what: refuse(), known=False)
        return torch.SymInt(node)
    node = NumberNode(math.nan, traced, compute, text, lambda *what: refuse(), known=False)
    return torch.SymFloat(node)


def absent_number(refuse: Callable[[], None]) -> Any:
    """A number that can't even be computed with: ``refuse`` raises."""

    absent: Any = lambda *what: refuse()
    return torch.SymFloat(NumberNode(math.nan, None, absent, "number", absent, False, absent))
