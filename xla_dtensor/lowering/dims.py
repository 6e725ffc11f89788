"""Dims as lowerings are given them: negative ones, lists of them, and values along one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def wrap_dim(dim: int, ndim: int) -> int:
    """``dim`` as a non-negative index; a 0-d tensor counts as having one dim, as in torch."""
    return dim % max(ndim, 1)


Dims = int | Sequence[int] | None


def axes_of(dim: Dims, ndim: int, *, empty_is_all: bool = True) -> tuple[int, ...]:
    """The reduced axes; ``None``, and by default ``[]``, mean all. A 0-d tensor has the dims 0
    and -1, which reduce nothing."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0 and empty_is_all):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(d % ndim for d in dims) if ndim else ()


def along(values: Any, dim: int, ndim: int) -> Any:
    """The 1-d ``values`` shaped to broadcast along ``dim``."""
    return values.reshape([-1 if d == dim else 1 for d in range(ndim)])
