"""Where each constant of a trace's jaxpr comes from in later calls."""

from __future__ import annotations

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
        trace = outputs.trace
        by_id: dict[int, Source] = {}
        grads = {
            id(outside.grad._storage_): outside
            for outside in trace.outside.values()
            if outside.grad is not None and outside.takes_gradient
        }
        of_arguments: dict[int, int] = {}
        for i, tensor in enumerate(arguments.tensors):
            if is_ours(tensor):
                of_arguments.setdefault(id(tensor._storage_), i)
        # An argument or a gradient that the step finds elsewhere, too, is what is found there.
        found = {id(t._storage_) for t, _ in watch.reached.tensors.values() if is_ours(t)}
        self.free_arguments = tuple(
            i for storage, i in of_arguments.items() if storage not in found
        )
        self.bound_arguments = tuple(
            (i, arguments.tensors[i]._storage_)
            for storage, i in of_arguments.items()
            if storage in found
        )
        self.met = watch.met(arguments)
        # On the CPU, where reads go by the tensor: one that is in two places is the same in both.
        self.bound_on_host = tuple(
            (i, tensor)
            for i, tensor in enumerate(arguments.tensors)
            if id(tensor) in watch.reached.tensors and not is_ours(tensor)
        )
        self.slots: list[ArraySource] = []
        source: ArraySource
        self.reads: list[tuple[Any, Any]]
        counters: dict[int, list[ExternalStorage]] = {}
        for captured in outputs.captured:
            storage = captured.storage
            if storage is None:
                by_id[id(captured.array)] = FilledSource(captured.form, captured.fill_value)
                continue
            if trace.numbers.is_counter(captured.array):
                counters.setdefault(id(captured.array), []).append(captured)
                continue
            key, source = id(storage), StateSource((storage,), captured.form)
            if key in of_arguments and key not in found:
                source = ArgumentSource(of_arguments[key], storage, captured.form)
            elif key in grads and key not in found:
                source = GradientSource(grads[key], storage, captured.form)
            if id(captured) in outputs.written:
                source.writes.append((outputs.written[id(captured)], (storage,)))
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
                if id(captured) in outputs.written:
                    parts.setdefault(outputs.written[id(captured)], []).append(storage)
            source.writes = [(index, tuple(members)) for index, members in parts.items()]
            by_id[id(group[0].array)] = source
            self.slots.append(source)
        for _, array, host in trace.host_arrays.values():
            by_id[id(array)] = (
                ConstantSource(array) if host is None else HostSource(outputs.host.reader(host))
            )
        for i, number in enumerate(trace.numbers.inputs):
            by_id[id(number.array)] = NumberSource(i, number.integer)
        by_id[id(trace.rng_words)] = GeneratorSource(len(trace.numbers.inputs))
        if outputs.history is not None:
            for i, array in enumerate(outputs.history.cotangents):
                by_id[id(array)] = CotangentSource(i)
        self.sources = [by_id.get(id(const)) or _constant(const, watch) for const in constants]
        found_by = {id(s): source for source in self.slots for s in source.storages}
        of_host = {id(t): i for i, t in enumerate(arguments.tensors)}
        self.reads = []
        for memory, outside in trace.reads:
            where: Any
            if isinstance(memory, int):  # the step's own
                where = outputs.shown[memory]
            elif isinstance(memory, torch.Tensor) and not outputs.host.computes(memory):
                where = of_host.get(id(memory), memory)
            else:
                where = found_by.get(id(memory))
            self.reads.append((where, outside))
        for source in self.slots:
            source.forget()
        outputs.forget_trace()


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
