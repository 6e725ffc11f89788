"""Shapes, dtypes and strides of results that torch has no meta kernel for.

A plan learns what a call returns by running the overload on meta tensors. A few overloads have no
meta kernel in torch (``geqrf``, ``linalg_lstsq``): for them a function registered here says it.
It takes the overload's arguments, tensors as *meta tensors*, and returns meta tensors, as many as
the schema's returns, with the strides that CPU torch gives. It checks its arguments where the
lowering would compute nonsense, and raises torch's own errors:

    @meta_of("geqrf")
    def geqrf(a):
        return torch.empty_like(a), a.new_empty((*a.shape[:-2], min(a.shape[-2:])))

Register the functional overload alone: in-place and ``out=`` overloads use it too. A registered
function comes before torch's meta kernel, so it also corrects one that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from xla_dtensor.base.tables.registry import Registry
from xla_dtensor.lowering.registry import changes, qualified_name

F = TypeVar("F", bound=Callable[..., Any])

_SHAPES: Registry[Callable[..., Any]] = Registry("meta kernel here", changes)


def meta_of(*overloads: str) -> Callable[[F], F]:
    """Register the decorated function as the meta kernel of ``overloads`` (``"geqrf"``,
    ``"mode.default"``; the ``aten`` namespace is implied).

    Raises:
        ValueError: one of them is registered already.
    """

    def register(function: F) -> F:
        for name in map(qualified_name, overloads):
            _SHAPES.add(name, function)
        return function

    return register


def shapes_of(overload: str) -> Callable[..., Any] | None:
    """The meta kernel of the overload with this name, if it is registered here."""
    return _SHAPES.get(qualified_name(overload))
