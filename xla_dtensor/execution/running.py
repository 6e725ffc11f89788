"""`Running`, the base of all executors: check, compute all results, then write.

In this order a call that fails has written nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import torch

from xla_dtensor.base import executor
from xla_dtensor.base.random import rng
from xla_dtensor.execution import several
from xla_dtensor.execution.interfaces import Call, Plan
from xla_dtensor.execution.on_host import on_host
from xla_dtensor.execution.set_data import check_set_data, refuse_shared, set_data
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.read import read
from xla_dtensor.forms.sharing import launching
from xla_dtensor.forms.views import leave_open
from xla_dtensor.tensors.of_form import is_ours, new_tensor


class Running(executor.Executor):
    """Performs calls by their plans; subclasses say how the arrays are computed (`compute`)."""

    def joins(self, call: Call) -> bool:
        return several.joins(call)

    def compute(self, plan: Plan, call: Call) -> Iterable[Any]:
        """The arrays of a call's results, then of what it writes, or what stands for them."""
        raise NotImplementedError

    def perform(self, plan: Plan, call: Call) -> Any:
        mutated: list[Any] = []
        simple = False
        if plan.mutated:
            mutated = [call.leaves[i] for i in plan.mutated]
            simple = len(mutated) == 1 and not plan.grows  # `Storage.write` checks it
            if not simple:
                _check_writes(plan, mutated)
        if plan.conditions and plan.run is not None:
            self.look(plan.conditions, call)
        # Tensors on the meta device have no arrays.
        arrays = iter(self.compute(plan, call)) if plan.run is not None else itertools.repeat(None)
        results = self.tensors(plan, call, arrays)
        if simple:
            mutated[0]._storage_.write(next(arrays), plan.base_forms[0])
        elif mutated:
            _write(plan, mutated, arrays)
        return plan.structure(results, mutated)

    def tensors(self, plan: Plan, call: Call, arrays: Iterator[Any]) -> list[Any]:
        """The results of a call, as tensors of the first arrays."""
        return [
            None if form is None else new_tensor(next(arrays), form) for form in plan.result_forms
        ]

    def on_host(self, tensor: Any) -> torch.Tensor:
        return on_host(tensor)

    def convert(self, tensor: Any, form: Form, conversion: Callable[[], Any], traced: Any) -> Any:
        computes = conversion()
        with launching(), jax.enable_x64(True):
            return new_tensor(computes.eager(None, [read(tensor)], [])[0], form)


def launched(plan: Plan, call: Call) -> Any:
    """The arrays of the call's results and writes, from a program of its own."""
    leaves: list[Any] = []
    for leaf, form in zip(call.leaves, call.forms):  # noqa: B905  (strict costs time)
        if form.__class__ is not Form:
            leaves.append(leaf)
        elif is_ours(leaf):
            leaves.append(read(leaf) if leaf._steps else leaf._storage_.array)
        else:
            leaves.append(to_numpy(leaf))
    bases = []
    for i in plan.mutated:
        tensor = call.leaves[i]
        bases.append(base_of(tensor, tensor._storage_.array) if tensor._steps else None)
    if not plan.random:
        with jax.enable_x64(True):
            return plan.same.eager(None, leaves, bases)
    state = call.stream.take()
    try:
        with jax.enable_x64(True):
            return plan.same.eager(rng.keyed(state), leaves, bases)
    except BaseException:
        # A call that fails must not advance the generator, as in torch.
        call.stream.give_back(state)
        raise


def base_of(view: Any, array: Any) -> tuple[Any, tuple[int, ...]]:
    """What a write to a view goes into: its storage's array, and where in that the view lies."""
    return array, leave_open(view._steps)[1]


def _check_writes(plan: Plan, mutated: list[Any]) -> None:
    for tensor, grown in zip(mutated, plan.grown, strict=True):
        if grown is None:
            if tensor._storage_.refuses_writes is not None:
                tensor._storage_.check_write()
        else:
            refuse_shared(tensor, plan.name, grown.shape)
            check_set_data(tensor, plan.name)


def _write(plan: Plan, mutated: list[Any], arrays: Iterator[Any]) -> None:
    if not plan.grows:
        # Not strict: for tensors without data `arrays` is an endless iterator of None.
        for tensor, array, form in zip(mutated, arrays, plan.base_forms, strict=False):
            tensor._storage_.write(array, form)
        return
    new = [
        array if grown is None else new_tensor(array, grown)
        for grown, array in zip(plan.grown, arrays, strict=False)
    ]
    for tensor, form, grown, value in zip(mutated, plan.base_forms, plan.grown, new, strict=True):
        if grown is None:
            tensor._storage_.write(value, form)
        else:
            set_data(tensor, value, plan.name)
