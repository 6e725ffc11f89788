"""For each constant of a trace's jaxpr the source of its value in later calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import torch

from xla_dtensor.compilation.call.arguments import Arguments
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
from xla_dtensor.compilation.recorded.traced_outputs import TracedOutputs
from xla_dtensor.compilation.trace.external_storages import ExternalStorage
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.storage import Storage
from xla_dtensor.tensors.of_form import is_ours


class TracedInputs:
    """The inputs of a trace: for each constant of its jaxpr where the value comes from in later
    calls, and what must hold of arguments for that to be so.

    Args:
        outputs: of the trace. What they know of the trace alone is forgotten.
        arguments: with which the step was traced.
        watch: what its Python can read.
        constants: the arrays that the jaxpr has closed over.

    Attributes:
        sources: of the constants.
        slots: the sources that are storages, also of those that are only written.
        reads: per mark of the history's where the memory is (a source, templates, a CPU tensor, or
            which argument it is), and through which tensor from outside it was read.
        free_arguments: the arguments with memory of their own.
        bound_arguments: those that share memory with what the step finds elsewhere, and which.
        bound_on_host: likewise CPU tensors that it finds elsewhere.
        met: the arguments that it finds elsewhere as objects.
    """

    def __init__(
        self, outputs: TracedOutputs, arguments: Arguments, watch: Watch, constants: list[Any]
    ) -> None:
        self._sort_arguments(arguments, watch)
        self.slots: list[ArraySource] = []
        by_id = {
            id(array): source
            for array, source in (
                *self._of_storages(outputs, arguments, watch),
                *_of_other_values(outputs),
            )
        }
        self.sources = [by_id.get(id(const)) or _constant(const, watch) for const in constants]
        self.reads = list(self._read_memory(outputs, arguments))
        for source in self.slots:
            source.forget()
        outputs.forget_trace()

    def _sort_arguments(self, arguments: Arguments, watch: Watch) -> None:
        """Which arguments are what the step finds elsewhere, too: they are what is found there."""
        of_arguments: dict[int, int] = {}
        for i, tensor in enumerate(arguments.tensors):
            if is_ours(tensor):
                of_arguments.setdefault(id(tensor._storage_), i)
        found = storages_found(watch)
        self.free_arguments = tuple(
            i for storage, i in of_arguments.items() if storage not in found
        )
        self.bound_arguments = tuple(
            (i, arguments.tensors[i]._storage_)
            for storage, i in of_arguments.items()
            if storage in found
        )
        self.met = watch.met(arguments)
        # CPU tensors are read through the tensor object: one that is an argument and also
        # reached by name must be the same object in both.
        self.bound_on_host = tuple(
            (i, tensor)
            for i, tensor in enumerate(arguments.tensors)
            if id(tensor) in watch.reached.tensors and not is_ours(tensor)
        )

    def _of_storages(
        self, outputs: TracedOutputs, arguments: Arguments, watch: Watch
    ) -> Iterator[tuple[Any, Source]]:
        """The arrays of storages from outside, with their sources."""
        trace, written = outputs.trace, outputs.written
        of_arguments = {id(arguments.tensors[i]._storage_): i for i in self.free_arguments}
        found = storages_found(watch)
        grads = {
            id(outside.grad._storage_): outside
            for outside in trace.outside.values()
            if outside.grad is not None and outside.takes_gradient
        }
        counters: dict[int, list[ExternalStorage]] = {}
        for captured in outputs.captured:
            storage = captured.storage
            if storage is None:
                yield captured.array, FilledSource(captured.form, captured.fill_value)
                continue
            if trace.numbers.is_counter(captured.array):
                counters.setdefault(id(captured.array), []).append(captured)
                continue
            source: ArraySource
            key = id(storage)
            if key in of_arguments:
                source = ArgumentSource(of_arguments[key], storage, captured.form)
            elif key in grads and key not in found:
                source = GradientSource(grads[key], storage, captured.form)
            else:
                source = StateSource((storage,), captured.form)
            if id(captured) in written:
                source.writes.append((written[id(captured)], (storage,)))
            self.slots.append(source)
            yield captured.array, source
        for group in counters.values():
            yield group[0].array, self._of_counters(group, written)

    def _of_counters(self, group: list[ExternalStorage], written: dict[int, int]) -> Source:
        """The source of step counts that are one array."""
        alive = [(c, c.storage) for c in group if c.storage is not None]
        if not alive:
            return FilledSource(group[0].form, group[0].fill_value)
        source = StateSource(tuple(storage for _, storage in alive), group[0].form)
        parts: dict[int, list[Storage]] = {}
        for captured, storage in alive:
            if id(captured) in written:
                parts.setdefault(written[id(captured)], []).append(storage)
        source.writes = [(index, tuple(members)) for index, members in parts.items()]
        self.slots.append(source)
        return source

    def _read_memory(
        self, outputs: TracedOutputs, arguments: Arguments
    ) -> Iterator[tuple[Any, Any]]:
        """What `reads` has: per mark the memory, and the tensor that it was read through."""
        by_storage = {id(s): source for source in self.slots for s in source.storages}
        of_host = {id(t): i for i, t in enumerate(arguments.tensors)}
        for memory, outside in outputs.trace.reads:
            if isinstance(memory, int):  # the step's own
                yield outputs.shown[memory], outside
            elif isinstance(memory, torch.Tensor) and not outputs.host.computes(memory):
                yield of_host.get(id(memory), memory), outside
            else:
                yield by_storage.get(id(memory)), outside


def storages_found(watch: Watch) -> set[int]:
    """The ids of the storages that the step finds elsewhere than among its arguments."""
    return {id(t._storage_) for t, _ in watch.reached.tensors.values() if is_ours(t)}


def _of_other_values(outputs: TracedOutputs) -> Iterator[tuple[Any, Source]]:
    """Arrays that are no storage's, with their sources: CPU tensors, numbers, the generator's
    state, cotangents."""
    trace, numbers = outputs.trace, outputs.trace.numbers.inputs
    for _, array, host in trace.host_arrays.values():
        yield (
            array,
            ConstantSource(array) if host is None else HostSource(outputs.host.reader(host)),
        )
    for i, number in enumerate(numbers):
        yield number.array, NumberSource(i, number.integer)
    yield trace.rng_words, GeneratorSource(len(numbers))
    if outputs.history is not None:
        for i, array in enumerate(outputs.history.cotangents):
            yield array, CotangentSource(i)


def _constant(const: Any, watch: Watch) -> Source:
    """A constant that has a name: NumPy's, which lowerings make of what is part of the program
    (shapes, positions), and arrays of JAX's that the step's code finds as it finds numbers
    (for functions written in JAX).

    Raises:
        DataDependentError: nobody knows where the array is from.
    """
    if isinstance(const, jax.Array) and id(const) not in watch.reached.jax_arrays:
        raise DataDependentError(
            f"the step computes with an array {const.dtype}{list(const.shape)} that is none of "
            "its tensors, and that its code doesn't name: another thread has made it, or code "
            "that xla_dtensor doesn't follow. It would be a constant: pass it as an argument"
        )
    return ConstantSource(const)
