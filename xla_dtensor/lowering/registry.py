"""Where lowerings are registered and looked up. See README.md in this folder for the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from xla_dtensor.base.tables.registry import Changes, Registry

F = TypeVar("F", bound=Callable[..., Any])
StaticScalars = bool | Callable[[str, Any], bool]


@dataclass(frozen=True)
class Lowering:
    """How one aten overload becomes JAX code.

    Attributes:
        function: takes the overload's arguments, tensors as JAX arrays, and returns its results.
        random: ``function`` takes a JAX PRNG key before the overload's own arguments.
        static_scalars: ``Scalar`` arguments must be Python numbers (they decide shapes or the
            code path); otherwise they may be traced, so that a new value compiles nothing. Or a
            function of the argument's name and value: whether this one must be. Then what others
            do may be traced where it is a number of a compiled step that changes.
        traced_floats: ``float`` arguments may be traced, too.
        symbolic_floats: only those may that are numbers of a compiled step.
        has_position: the fourth argument (``index``, ``start``) may be traced, where the dim that
            the third one names is whole on each device and, of a range, the step is 1.
    """

    function: Callable[..., Any]
    random: bool = False
    static_scalars: StaticScalars = False
    traced_floats: bool = False
    symbolic_floats: bool = False
    has_position: bool = False


@dataclass(frozen=True, eq=False)  # there is one of each view: keys hash its address
class ViewLowering:
    """How one aten view overload reads from, and writes through to, its base.

    Attributes:
        get: ``get(base, *args, **kwargs)`` is the view's value (a tuple of them for the
            multi-output views ``split``, ``unbind``...).
        put: ``put(base, value, *args, **kwargs)`` is ``base`` with the view's elements replaced by
            ``value``. For multi-output views ``put(base, value, index, *args, **kwargs)``.
        repeats: ``repeats(shape, *args, **kwargs)``: whether an element of a base of ``shape`` may
            be in the view several times. None of views that have each element once.
        greatest: of those that repeat: ``greatest(values, shape, *args, **kwargs)`` has, for each
            element of the base, the greatest of unsigned ``values`` (of the view's shape) in its
            places in the view; 0 if it has none.
    """

    get: Callable[..., Any]
    put: Callable[..., Any]
    repeats: Callable[..., bool] | None = None
    greatest: Callable[..., Any] | None = None


changes = Changes()
"""Whoever keeps something made of a lowering, a meta kernel or a kind listens here."""

_LOWERINGS: Registry[Lowering] = Registry("lowering", changes)
_VIEWS: Registry[ViewLowering] = Registry("lowering as a view", changes)


def lowers(
    *overloads: str,
    random: bool = False,
    static_scalars: StaticScalars = False,
    traced_floats: bool = False,
    symbolic_floats: bool = False,
    has_position: bool = False,
) -> Callable[[F], F]:
    """Register the decorated function as the lowering of ``overloads`` (``"add.Tensor"``,
    ``"mylib::op.default"``; the ``aten`` namespace is implied).

    Raises:
        ValueError: one of them has a lowering already.
    """

    def register(function: F) -> F:
        for name in map(qualified_name, overloads):
            _check_new(name)
            _LOWERINGS.add(
                name,
                Lowering(
                    function, random, static_scalars, traced_floats, symbolic_floats, has_position
                ),
            )
        return function

    return register


def lowers_view(
    *overloads: str,
    put: Callable[..., Any],
    repeats: Callable[..., bool] | None = None,
    greatest: Callable[..., Any] | None = None,
) -> Callable[[F], F]:
    """Register the decorated function as ``get`` of the view ``overloads``, with the rest of their
    `ViewLowering`."""

    def register(function: F) -> F:
        for name in map(qualified_name, overloads):
            _check_new(name)
            _VIEWS.add(name, ViewLowering(function, put, repeats, greatest))
        return function

    return register


def _check_new(name: str) -> None:
    if name in _LOWERINGS or name in _VIEWS:
        raise ValueError(f"{name} already has a lowering")


def qualified_name(overload: str) -> str:
    """``"add.Tensor"`` -> ``"aten::add.Tensor"``; ``"relu"`` -> ``"aten::relu.default"``."""
    if "::" not in overload:
        overload = "aten::" + overload
    return overload if "." in overload.split("::")[1] else overload + ".default"


def is_own(function: Any) -> bool:
    """Whether it is one of the package's own lowerings, whose source is known. ``__module__`` alone
    doesn't say so: ``functools.wraps`` gives a user's function that of the lowering it wraps."""
    module = getattr(function, "__globals__", {}).get("__name__", "")
    return bool(module.startswith("xla_dtensor.lowering."))


def find_lowering(name: str) -> Lowering | None:
    """The lowering of the overload with this qualified name, or None."""
    return _LOWERINGS.get(name)


def views() -> dict[str, ViewLowering]:
    """The view lowerings by the overloads' qualified names."""
    return dict(_VIEWS)


def find_view(name: str) -> ViewLowering | None:
    """The view lowering of the overload with this qualified name, or None."""
    return _VIEWS.get(name)
