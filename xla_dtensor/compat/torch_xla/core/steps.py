"""Where a step ends: ``mark_step``, ``sync`` and what runs then."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.compilation import CompiledStep
from xla_dtensor.compilation import compile as compile_step
from xla_dtensor.execution import lazy
from xla_dtensor.runtime import memory


class _State:
    told = False
    closures: list[tuple[Callable[..., Any], tuple[Any, ...]]]

    def __init__(self) -> None:
        self.closures = []


_state = _State()


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """Launch the operations that have been written down, and run the step closures. Nothing needs
    it: a value that is read is computed. In a compiled step it does nothing.

    Args:
        wait: until the devices are done.
        reset_scope: torch_xla's; no effect.

    Example::

        import warnings
        import torch
        import xla_dtensor.compat.torch_xla as torch_xla

        x = torch.ones(3, device="xla") + 1
        with warnings.catch_warnings(action="ignore"):
            torch_xla.sync()
        assert x.tolist() == [2, 2, 2]
    """
    if not _state.told:
        _state.told = True
        warnings.warn(
            "mark_step() and torch_xla.sync() aren't needed: operations run when a value is read. "
            "What makes a step one program is xla_dtensor.compile, or torch_xla.compile, around it",
            stacklevel=2,
        )
    _launch()
    if wait and executor.current().has_values:
        memory.synchronize()


def _launch() -> None:
    if not executor.current().has_values:
        return
    lazy.flush()
    closures, _state.closures = _state.closures, []
    for closure, args in closures:
        closure(*args)


def add_step_closure(
    closure: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False
) -> None:
    """Have something called at the next `sync`.

    Args:
        closure: the function.
        args: its arguments.
        run_async: torch_xla's; it runs in the calling thread in any case.

    Raises:
        SpmdError: in a compiled step, whose tensors have no values.
    """
    executor.current().not_in_step(
        "add_step_closure in a compiled step: its tensors have no values yet; return them, and "
        "look at them where the step is called",
        SpmdError,
    )
    _state.closures.append((closure, args))


@contextlib.contextmanager
def step() -> Iterator[None]:
    """A block that ends with a `sync`."""
    _launch()
    try:
        yield
    finally:
        _launch()


def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    num_different_graphs_allowed: int | None = None,
) -> Any:
    """A function as one XLA program: ``xla_dtensor.compile``.

    Args:
        f: the function; without it the result is a decorator, or a ``with`` block that ends with a
            `sync` and runs as eager code does.
        full_graph: raise where the function can't be one program; else its Python runs in every
            call then, with a warning.
        name: for error messages.
        num_different_graphs_allowed: how many programs a call may have led to; the next one raises.

    Returns:
        the compiled function.

    Raises:
        SpmdError: (when called) there are more programs than allowed. It is a RuntimeError.

    Example::

        import torch
        import xla_dtensor.compat.torch_xla as torch_xla

        @torch_xla.compile
        def double(x):
            return x * 2

        assert double(torch.ones(3, device="xla")).tolist() == [2, 2, 2]
    """
    if f is None:
        return _Compiling(full_graph, name, num_different_graphs_allowed)
    compiled = compile_step(f, watch="trace" if full_graph else "auto")
    if num_different_graphs_allowed is None:
        return compiled
    called = name or str(getattr(f, "__name__", "a step"))
    return _counted(compiled, called, num_different_graphs_allowed)


def _counted(compiled: CompiledStep, name: str, allowed: int) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        if compiled.compilations > allowed:
            reasons = "; ".join(compiled.recompilations)
            raise SpmdError(
                f"{name}: {compiled.compilations} programs have been compiled, and "
                f"num_different_graphs_allowed is {allowed}: {reasons}"
            )
        return result

    return call


class _Compiling(contextlib.AbstractContextManager[None]):
    """``compile`` without a function."""

    def __init__(self, *options: Any) -> None:
        self._options = options

    def __call__(self, f: Callable[..., Any]) -> Any:
        return compile(f, *self._options)

    def __enter__(self) -> None:
        _launch()

    def __exit__(self, *_: object) -> None:
        _launch()


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """``optimizer.step()``; gradients of global tensors need no reduction.

    Args:
        optimizer: any.
        barrier: `sync` after it.
        optimizer_args: for its ``step``.
        groups, pin_layout: torch_xla's; no effect.

    Returns:
        what ``step`` returns.
    """
    result = optimizer.step(**(optimizer_args or {}))
    if barrier:
        sync()
    return result
