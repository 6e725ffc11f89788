"""Optimizers inside a compiled step: hyperparameters as inputs, state on the devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from xla_dtensor import _context
from xla_dtensor.compilation.trace import StepTrace
from xla_dtensor.device_tensor import XLATensor
from xla_dtensor.form import device_form
from xla_dtensor.storage import Storage


class OptimizerHooks:
    """While it is entered, every ``optimizer.step()`` reads its hyperparameters as traced numbers.

    A float in ``param_groups`` (``lr``, ``weight_decay``, ``betas``...) is replaced during the call
    by a number that is an input of the program; afterwards the group is as it was.
    """

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: dict[int, tuple[Optimizer, dict[Any, dict[str, Any]]]] = {}

    def __enter__(self) -> OptimizerHooks:
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()
        while self._saved:
            group, original = self._saved.pop()
            group.update(original)

    def undo(self) -> None:
        """Give the optimizers the state that they had before the trace."""
        for optimizer, state in self._states.values():
            optimizer.state.clear()
            optimizer.state.update(state)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        trace = self._trace
        if id(optimizer) not in self._states:
            self._states[id(optimizer)] = (
                optimizer,
                {p: dict(s) for p, s in optimizer.state.items()},
            )
        _move_step_counts(optimizer)
        name = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            changed: dict[str, Any] = {}
            for key, value in group.items():
                where = f"{name}.param_groups[{index}][{key!r}]"
                if type(value) is float:
                    number = trace.number(partial(_hyperparameter, group, key), where)
                    fused = key == "lr" and group.get("fused")
                    changed[key] = _as_tensor(number) if fused else number
                elif type(value) is tuple and value and all(type(v) is float for v in value):
                    changed[key] = tuple(
                        trace.number(partial(_hyperparameter, group, key, i), f"{where}[{i}]")
                        for i in range(len(value))
                    )
            if "capturable" in group:
                changed["capturable"] = True  # the step count is a tensor on the devices
            self._saved.append((group, {key: group[key] for key in changed}))
            group.update(changed)
        trace.in_optimizer += 1

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._trace.in_optimizer -= 1
        for _ in optimizer.param_groups:
            group, original = self._saved.pop()
            group.update(original)


def _hyperparameter(group: dict[str, Any], key: str, index: int | None = None) -> float:
    return group[key] if index is None else group[key][index]


def _move_step_counts(optimizer: Optimizer) -> None:
    """Step counts that eager steps kept on the CPU live on the devices from now on."""
    with _context.active(None), jax.ensure_compile_time_eval():
        for state in optimizer.state.values():
            for key, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.ndim == 0
                    and value.device.type == "cpu"
                ):
                    state[key] = value.to("xla")


def _as_tensor(number: Any) -> XLATensor:
    """A traced number as a 0-d tensor (fused optimizers take the learning rate so)."""
    form = device_form(None, (), dtype=torch.float64)
    with jax.enable_x64(True):
        array = jax.numpy.asarray(number.node.traced, dtype=jax.numpy.float64)
    return XLATensor(Storage(array, form), form)
