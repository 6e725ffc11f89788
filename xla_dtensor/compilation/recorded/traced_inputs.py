"""Where each constant of a trace's jaxpr comes from in later calls."""

from __future__ import annotations

from typing import Any

import jax
import torch

from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.buckets import Cuts
from xla_dtensor.compilation.call.recipes import Template
from xla_dtensor.compilation.call.sources import (
    ArgumentSource,
    ArraySource,
    ConstantSource,
    CotangentSource,
    FilledSource,
    GeneratorSource,
    GradientSource,
    HostSource,
    NumberSource,
    Source,
    StateSource,
)
from xla_dtensor.compilation.recorded.history import History
from xla_dtensor.compilation.recorded.host_ops import HostOperations
from xla_dtensor.compilation.trace.external_storages import Captured
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.storage import Storage
from xla_dtensor.tensors.of_form import Ours


class TracedInputs:
    """The inputs of a trace; see `Traced`."""

    watch: Watch
    host: HostOperations
    history: History | None
    captured: list[Captured]
    _written: dict[int, int]
    _shown: dict[int, list[Template]]
    _cut: list[torch.Tensor]
    # Of a step whose arguments are padded.
    cuts: Cuts | None = None

    def _collect_inputs(self, trace: StepTrace, arguments: Arguments, constants: list[Any]) -> None:
        """Say for each constant of the jaxpr where its value comes from in later calls."""
        by_id: dict[int, Source] = {}
        grads = {
            id(outside.grad._storage_): outside
            for outside in trace.outside.values()
            if outside.grad is not None and outside.takes_gradient
        }
        of_arguments: dict[int, int] = {}
        for i, tensor in enumerate(arguments.tensors):
            if isinstance(tensor, Ours):
                of_arguments.setdefault(id(tensor._storage_), i)
        # An argument that the step finds elsewhere, too, is what is found there.
        tensors = (tensor for tensor, _ in self.watch.reached.tensors.values())
        found = {id(tensor._storage_) for tensor in tensors if isinstance(tensor, Ours)}
        self.free_arguments = tuple(
            i for storage, i in of_arguments.items() if storage not in found
        )
        self.bound_arguments = tuple(
            (i, arguments.tensors[i]._storage_)
            for storage, i in of_arguments.items()
            if storage in found
        )
        self.met = self.watch.met(arguments)
        # On the CPU, where reads go by the tensor: one that is in two places is the same in both.
        self.bound_on_host = tuple(
            (i, tensor)
            for i, tensor in enumerate(arguments.tensors)
            if id(tensor) in self.watch.reached.tensors and not isinstance(tensor, Ours)
        )
        self.slots: list[ArraySource] = []
        source: ArraySource
        self.reads: list[tuple[Any, Any]]
        counters: dict[int, list[Captured]] = {}
        for captured in self.captured:
            storage = captured.storage
            if storage is None:
                by_id[id(captured.array)] = FilledSource(captured.form, captured.fill_value)
                continue
            if trace.is_counter(captured.array):
                counters.setdefault(id(captured.array), []).append(captured)
                continue
            key, source = id(storage), StateSource((storage,), captured.form)
            if key in of_arguments and key not in found:
                source = ArgumentSource(of_arguments[key], storage, captured.form)
            elif key in grads:
                source = GradientSource(grads[key], storage, captured.form)
            if id(captured) in self._written:
                source.writes.append((self._written[id(captured)], (storage,)))
            by_id[id(captured.array)] = source
            self.slots.append(source)
        for group in counters.values():
            alive = [(c, c.storage) for c in group if c.storage is not None]
            if not alive:
                by_id[id(group[0].array)] = FilledSource(group[0].form, group[0].fill_value)
                continue
            source = StateSource(tuple(storage for _, storage in alive), group[0].form)
            parts: dict[int, list[Storage]] = {}
            for captured, storage in alive:
                if id(captured) in self._written:
                    parts.setdefault(self._written[id(captured)], []).append(storage)
            source.writes = [(index, tuple(members)) for index, members in parts.items()]
            by_id[id(group[0].array)] = source
            self.slots.append(source)
        for _, array, host in trace.host_arrays.values():
            by_id[id(array)] = ConstantSource(array) if host is None else HostSource(host)
        for i, number in enumerate(trace.numbers):
            by_id[id(number.array)] = NumberSource(i, number.integer)
        by_id[id(trace.rng_words)] = GeneratorSource(len(trace.numbers))
        if self.history is not None:
            for i, array in enumerate(self.history.cotangents):
                by_id[id(array)] = CotangentSource(i)
        self.sources = [by_id.get(id(const)) or self._constant(const) for const in constants]
        found_by = {id(s): source for source in self.slots for s in source.storages}
        of_host = {id(t): i for i, t in enumerate(arguments.tensors)}
        self.reads = []
        for memory, outside in trace.reads:
            where: Any
            if isinstance(memory, int):  # the step's own
                where = self._shown[memory]
            elif isinstance(memory, torch.Tensor) and not self.host.made(memory):
                where = of_host.get(id(memory), memory)
            else:
                where = found_by.get(id(memory))
            self.reads.append((where, outside))
        for source in self.slots:
            source.forget()
        for captured in self.captured:
            captured.array = None  # no second copy of what the step uses
        self.captured, self._shown, self._cut = [], {}, []
        trace.forget()

    def _constant(self, const: Any) -> Source:
        """A constant that has a name: NumPy's, which lowerings make of what is part of the program
        (shapes, positions), and arrays of JAX's that the step's code finds as it finds numbers
        (for functions written in JAX).

        Raises:
            DataDependentError: nobody knows where the array is from.
        """
        if isinstance(const, jax.Array) and id(const) not in self.watch.reached.jax_arrays:
            raise DataDependentError(
                f"the step computes with an array {const.dtype}{list(const.shape)} that is none of "
                "its tensors, and that its code doesn't name: another thread has made it, or code "
                "that xla_dtensor doesn't follow. It would be a constant: pass it as an argument"
            )
        return ConstantSource(const)
