"""aten overloads as JAX functions; README.md here has the contract."""

from xla_dtensor.lowering.registry import (
    Lowering,
    ViewLowering,
    find_lowering,
    find_view,
    lowers,
    lowers_view,
    on_change,
)

__all__ = [
    "Lowering",
    "ViewLowering",
    "find_lowering",
    "find_view",
    "lowers",
    "lowers_view",
    "on_change",
]
