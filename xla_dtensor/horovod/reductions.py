"""Horovod's reductions (`Average`, `Sum`, ...), and its older argument ``average``."""

from __future__ import annotations

import enum
import warnings


class ReduceOp(enum.IntEnum):
    """How the ranks' values become one."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    def __repr__(self) -> str:
        return f"horovod.{self.name}"


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def reduction(op: int | None, average: bool | None) -> ReduceOp:
    """The reduction that ``op``, or the deprecated ``average``, means.

    Args:
        op: one of `ReduceOp`; None for `Average`, or what ``average`` says.
        average: True for `Average`, False for `Sum`; deprecated.

    Raises:
        ValueError: both are given, or ``op`` is none.
    """
    if op is not None:
        if average is not None:
            raise ValueError(
                f"op={op!r} and average={average}: give op alone; average is deprecated"
            )
        return ReduceOp(op)
    if average is not None:
        warnings.warn(
            "the argument average is deprecated: give op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=4,
        )
        return Average if average else Sum
    return Average
