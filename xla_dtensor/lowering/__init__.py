"""aten overloads as JAX functions; README.md here has the contract."""

from xla_dtensor.lowering.registry import (
    Lowering,
    ViewLowering,
    changes,
    find_lowering,
    find_view,
    is_own,
    lowers,
    lowers_view,
)

__all__ = [
    "Lowering",
    "ViewLowering",
    "changes",
    "find_lowering",
    "find_view",
    "is_own",
    "lowers",
    "lowers_view",
]
