"""``torch.amp.GradScaler`` in a compiled step: the devices decide whether the optimizer steps.

torch asks for a value, and where a gradient has overflowed it doesn't call ``optimizer.step()``.
While a step is traced there is no value. So the optimizer steps, and where a gradient has
overflowed all that it has written is as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from xla_dtensor.base import executor, torch_private
from xla_dtensor.base.ours import is_ours
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.base.torch_private.attributes import (
    notes_of_scaler,
    set_notes_of_scaler,
    step_hooks_of,
)
from xla_dtensor.errors import DataDependentError
from xla_dtensor.integration.patching.take_over import take_over


def install() -> None:
    """Take over the part of ``GradScaler.step`` that decides, and what keeps its state."""
    take_over(torch_private.maybe_step_of_scaler, _maybe_step)
    take_over(torch_private.begin_of_scaler, _begin)
    take_over(torch.amp.GradScaler.update, _update)


def _begin(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make its scale: before a step is traced that would, so that it is an input from the first
    call on."""

    def make() -> None:
        with executor.current().making_state():
            original(*args, **kwargs)

    if executor.trace() is not None:
        raise executor.MadeBefore(make)
    make()


def _update(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What it has noted since the last update is forgotten: it puts another dict there, where each
    call of a compiled step is to find the same."""
    scaler = args[0]
    if executor.trace() is None or not scaler.is_enabled():
        original(*args, **kwargs)
        return
    executor.current().depends_on(
        lambda: (
            *(scaler.get_growth_factor(), scaler.get_backoff_factor()),
            scaler.get_growth_interval(),
        ),
        "the factors of a GradScaler",
        lambda found, left: False,
    )
    notes = notes_of_scaler(scaler)
    original(*args, **kwargs)
    notes.clear()
    set_notes_of_scaler(scaler, notes)


def _maybe_step(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _, optimizer, state, *more = args
    found = list(state["found_inf_per_device"].values())
    if executor.trace() is None or not all(map(is_ours, found)):
        return original(*args, **kwargs)
    _check(optimizer, more)
    overflows = sum(found) != 0
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = [(p, p.detach().clone()) for p in parameters if p.grad is not None]
    before = {where: _kept(value) for where, value in _state(optimizer)}
    result = optimizer.step(*more, **kwargs)
    with torch.no_grad():
        for parameter, old in parameters:
            parameter.copy_(torch.where(overflows, old, parameter))
        for where, value in _state(optimizer):
            _undo(optimizer, overflows, where, before.get(where), value)
    return result


def _check(optimizer: Any, closure: list[Any]) -> None:
    """Refuse a step that may do more than write parameters and state, as that isn't undone."""
    name, why = type(optimizer).__name__, ""
    if closure:
        why = "with a closure, which would run in any case"
    elif not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        why = f"of {name}, which isn't one of torch's and may do more than write its state"
    elif step_hooks_of(optimizer):
        why = f"of {name}, around whose steps there are hooks, which would run in any case"
    if why:
        raise DataDependentError(
            f"GradScaler.step() in a compiled step {why}: whether the optimizer steps is known on "
            "the devices alone; call scaler.step() and scaler.update() outside of the compiled step"
        )


def _state(optimizer: Any) -> Iterator[tuple[tuple[int, str], Any]]:
    """What an optimizer keeps: of which parameter, and under which name; the value."""
    for parameter, state in optimizer.state.items():
        for path, value in pytree.tree_flatten_with_path(state)[0]:
            yield (id(parameter), pytree.keystr(path)), value


def _kept(value: Any) -> Any:
    """A value as it is now; of a CPU tensor of one number, a step count, that number."""
    if is_ours(value):
        return value.detach().clone()
    counts = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if counts else value


def _undo(
    optimizer: Any, overflows: torch.Tensor, where: tuple[int, str], before: Any, value: Any
) -> None:
    """Let a part of an optimizer's state be as before where a gradient has overflowed."""
    if is_ours(value):
        if before is None:
            before = _as_made(optimizer, value)
        if not isinstance(before, torch.Tensor):
            before = torch.full_like(value, before)
        value.copy_(torch.where(overflows, before, value))
    elif _kept(value) != before:
        raise DataDependentError(
            f"GradScaler.step() in a compiled step: {type(optimizer).__name__} changes "
            f"state{where[1]}, which is on no device, and whether it steps is known there alone; "
            'keep it in a tensor on "xla", or call scaler.step() and scaler.update() outside of '
            "the compiled step"
        )


def _as_made(optimizer: Any, tensor: Any) -> Any:
    """What state that an optimizer makes in its first step holds where it doesn't step."""
    made = executor.current().made_with(tensor)
    if made is None and not (isinstance(optimizer, torch.optim.SGD) and not _dampens(optimizer)):
        raise DataDependentError(
            f"GradScaler.step() in a compiled step: {type(optimizer).__name__} makes state in its "
            "first step that isn't known where it doesn't step; call scaler.step() and "
            "scaler.update() outside of the compiled step once"
        )
    return 0.0 if made is None else made


def _dampens(optimizer: torch.optim.SGD) -> bool:
    """Whether momentum that begins with zeros isn't torch's, which begins with a gradient."""
    return any(group["dampening"] != 0 for group in optimizer.param_groups)
