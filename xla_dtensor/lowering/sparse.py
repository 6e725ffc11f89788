"""Conversions to sparse layouts, which XLA doesn't have: they raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.lowering.meta import meta_of
from xla_dtensor.lowering.registry import lowers

_CONVERSIONS = (
    "_to_sparse",
    "_to_sparse.sparse_dim",
    "_to_sparse_bsc",
    "_to_sparse_bsr",
    "_to_sparse_csc",
    "_to_sparse_csr",
)


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **options: Any) -> Any:
        raise UnsupportedOpError(
            f"aten::{name}: XLA has dense arrays only; keep the tensor dense (multiply by a mask), "
            "or move it to the CPU with .full_tensor().cpu() and make that sparse"
        )

    return refuse


for _name in _CONVERSIONS:
    lowers(_name)(_refusal(_name))
    meta_of(_name)(_refusal(_name))
