"""What a trace is compiled to, and the order of its inputs and outputs."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xla_dtensor.base import epoch
from xla_dtensor.base.random import rng
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.inputs import Arrays, outputs_in_order
from xla_dtensor.compilation.call.run import Prepared
from xla_dtensor.compilation.call.sources import (
    ArraySource,
    CotangentSource,
    HostSource,
    Source,
    StateSource,
)
from xla_dtensor.compilation.code.garbage import Seldom
from xla_dtensor.compilation.program.gradients import Layout
from xla_dtensor.compilation.program.input_layouts import Pinning, apart, layouts, shardings_of
from xla_dtensor.compilation.recorded.node import OnHost, Read
from xla_dtensor.compilation.recorded.split import Split, reordered
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.compilation.trace.external_tensors import Outside
from xla_dtensor.compilation.trace.numbers import Decision, values_of
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.storage import Storage
from xla_dtensor.runtime import agreement, arrays
from xla_dtensor.runtime.jax_runtime import code_bytes

T = TypeVar("T")

# Sources that are inputs of the program as they are.
# Of these each has an input of the program of its own.
INPUTS = (ArraySource, HostSource)


class Lowered:
    """A trace, lowered and compiled; see `Program`."""

    def __init__(
        self,
        traced: Traced,
        arguments: Arguments,
        executables: Cache[Any, Any] | None,
        compiler_options: dict[str, Any] | None,
    ) -> None:
        self.traced = self._traced = traced
        self.effects = traced.effects
        self.changed_path: str | None = None
        self.changed_paths: frozenset[str] = frozenset()
        self.changed_numbers: frozenset[str] = frozenset()
        self.decided: Decision | None = None
        self.lowering = Pinning()
        self.launched = False
        self._anchor: Callable[[], Storage | None] = lambda: None
        trace = traced.trace
        self.watch = traced.watch
        self._frame = traced.frame
        self._numbers = trace.numbers
        self._decisions = _unique(trace.decisions)
        self._settings = trace.settings
        self._host = traced.host.program if traced.host.program.depends else None
        self._looked_at = traced.host.looked_at
        self._random_operations = traced.random_operations
        self._outside = traced.outside
        self._epoch = epoch.tensors.value
        self.stale: str | None = None
        self._forms = [form.placed(self._frame) for form in traced.forms]
        # Whether a leaf has a .grad when the step begins matters, unless the step was seen to clear
        # it before it looked.
        self._leaves = [o for o in self._outside if o.takes_gradient and not o.cleared]
        # Tensors that the step writes as autograd must see: what it saved is overwritten.
        counted = [o for o in self._outside if o.writes]
        self._counted = [o.get() for o in counted if o.is_fixed]
        self._counted = [t for t in self._counted if not t.is_inference()]
        self._counted_others = [o for o in counted if not o.is_fixed]
        grads = [o.grad for o in self._leaves if o.grad is not None]
        # Where none of them has a gradient when the step begins, asking is one loop in C.
        self._leaf_tensors: list[Any] | None = None
        if not grads and all(o.is_fixed for o in self._leaves):
            leaves = [o.get() for o in self._leaves]
            self._leaf_tensors = (
                leaves if all(isinstance(t, torch.Tensor) for t in leaves) else None
            )
        self._no_grads = [None] * len(self._leaves)
        self._grads_share = self._sharing(grads, arguments) if grads else None
        for outside in self._outside:  # gradients of before aren't kept alive
            needed = outside.grad is not None and not outside.cleared
            outside.grad = Layout(outside.grad) if needed else None
        self._jaxpr = traced.jaxpr
        self._options = compiler_options
        self._plan_inputs(arguments)
        self._compile(executables, compiler_options, arguments)

    def _plan_inputs(self, arguments: Arguments) -> None:
        """The order of the program's inputs: arrays that it overwrites (donated), arrays that it
        keeps, arrays of the host, and one array with all numbers and the generator's state."""
        traced = self._traced
        used: dict[int, Source] = {}
        for source in traced.sources:
            used.setdefault(id(source), source)
        self._arrays = [s for s in used.values() if isinstance(s, ArraySource)]
        # Not the scalars: they are four bytes, and storages that this program doesn't use may have
        # their array, too (step counts of frozen parameters).
        donated = [s for s in self._arrays if s.writes and not _is_scalar(s)]
        kept = [s for s in self._arrays if not s.writes or _is_scalar(s)]
        self._donated, self._kept = (Arrays(some, self._frame) for some in (donated, kept))
        self._hosts = [s for s in used.values() if isinstance(s, HostSource)]
        self._uses_words = any(s.in_words for s in used.values())
        # Written without having been read: not inputs, but their storages get outputs.
        self._writes = [
            (index, source, storages)
            for source in traced.slots
            for index, storages in source.writes
        ]

    def _plan_writes(self) -> None:
        """What goes where after a run: storages that are the same in every call, one array for many
        counters, and storages of arguments and gradients."""
        alone: list[tuple[int, Storage]] = []
        counters: list[tuple[int, tuple[Storage, ...]]] = []
        others: list[tuple[int, ArraySource]] = []
        for index, source, storages in self._writes:
            if not source.is_fixed:
                others.append((index, source))
            elif len(storages) > 1:
                counters.append((index, storages))
            else:
                alone.append((index, storages[0]))
        self._written_places = [self._place_of[index] for index, _ in alone]
        self._written_storages = [storage for _, storage in alone]
        self._written_counters, self._written_arguments = counters, others
        pairs = [(s, self._forms[index]) for index, s in alone]
        pairs += [(s, self._forms[index]) for index, many in counters for s in many]
        self._new_forms = [(s, form) for s, form in pairs if s.form is not form]

    def _plan_reads(self, split: Split) -> None:
        """Whose memory mustn't be written to before the backward pass, and for which results."""
        sources = self._traced.sources
        found = [(*self._traced.reads[mark], through) for mark, through in split.reads.items()]
        found += [(sources[i], None, through) for i, through in split.reads_constants.items()]
        self._reads: list[Read] = []
        # Of arguments, gradients and results, which are others in each call.
        self._reads_found: list[tuple[Any, set[int], Outside | None]] = []
        for what, by, through in found:
            if isinstance(what, list):
                self._reads_found += [(template, through, None) for template in what]
            elif isinstance(what, StateSource):
                tensor = None if by is None else by.get()
                self._reads += [Read(storage, through, tensor) for storage in what.storages]
            elif isinstance(what, torch.Tensor):
                self._reads.append(Read(OnHost(what), through, None))
            elif isinstance(what, int | ArraySource):
                self._reads_found.append((what, through, by))

    def _positions(self) -> dict[int, tuple[int, int]]:
        """Which of the program's inputs a source is, by its ``id``: (group, position)."""
        groups: list[Sequence[Source]] = [self._donated.sources, self._kept.sources, self._hosts]
        return {id(s): (g, i) for g, some in enumerate(groups) for i, s in enumerate(some)}

    def _resolver(self) -> Callable[..., list[Any]]:
        """A function from the program's inputs to the constants of the jaxpr."""
        sources, where = self._traced.sources, self._positions()

        def constants(donated: Any, kept: Any, hosts: Any, words: Any) -> list[Any]:
            inputs = (donated, kept, hosts)

            def given(source: Source) -> Any:
                group, index = where[id(source)]
                return inputs[group][index]

            return [source.value(given, words) for source in sources]

        return constants

    def _compile(
        self,
        executables: Cache[Any, Any] | None,
        options: dict[str, Any] | None,
        arguments: Arguments,
    ) -> None:
        jaxpr, evaluate, history = self._jaxpr, jaxpr_as_fun, self._traced.history
        constants, traced_sources = self._resolver(), self._traced.sources
        self._outputs = outputs_in_order(self._donated.sources, len(self._forms))
        self._split: Split | None = None
        if history is not None:
            cotangents: list[int | None] = [None] * len(history.cotangents)
            for i, source in enumerate(self._traced.sources):
                if isinstance(source, CotangentSource):
                    cotangents[source.index] = i
            gradients = [g[0] for g in history.gradients if g is not None]
            late = set(gradients)
            self._outputs = [i for i in self._outputs if i not in late]
            self._split = Split(jaxpr, cotangents, gradients, self._outputs)
            self._plan_reads(self._split)
            self._used_cotangents = [n for n, i in enumerate(cotangents) if i is not None]
            jaxpr = self._split.forward
            passed = self._split.constants
            self._computed = [i for i in passed if not isinstance(traced_sources[i], INPUTS)]
            self._computing = jax.jit(
                lambda *inputs: [constants(*inputs)[i] for i in self._computed]
            )
            grad_shardings = [self._sharding(self._forms[i]) for i in gradients]
            backward = self._split.backward
            self._make_backward = lambda: jax.jit(
                lambda inputs: evaluate(ClosedJaxpr(backward, []))(*inputs),
                out_shardings=grad_shardings if any(grad_shardings) else None,
            )
            self._backward = self._make_backward()
        else:
            jaxpr = reordered(jaxpr, self._outputs)
        shardings = [self._sharding(self._forms[i]) for i in self._outputs]
        shardings += [None] * (0 if self._split is None else self._split.residuals)
        self._place_of = {output: i for i, output in enumerate(self._outputs)}
        self._plan_writes()

        def step(donated: Any, kept: Any, hosts: Any, words: Any) -> list[Any]:
            found = constants(donated, kept, hosts, words)
            if history is not None:
                found = [0 if value is None else value for value in found]
            return evaluate(ClosedJaxpr(jaxpr, found))()

        are_any = any(s is not None for s in shardings)
        jit_options: dict[str, Any] = {"out_shardings": shardings} if are_any else {}
        # The backward pass may need the old values; but there is none where torch's would raise.
        donate = 0 if history is None or len(history.errors) == len(history.outputs) else ()
        with jax.enable_x64(True):
            prepared = self._prepared = self._prepare(arguments)
            inputs = self._gather(arguments, prepared, take=False)
            if self._frame is not None and any(form.memory for form in self._forms):
                jit_options["in_shardings"] = shardings_of(inputs, self._frame.replicated)
            wanted = map(self._sharding, self._forms)
            self.lowering.loosen(self._jaxpr, self._frame, inputs, wanted)

            def lower() -> Any:
                with self.lowering(), Seldom():
                    # Another function each time, or JAX would give the same text again.
                    function = functools.partial(step)
                    return jax.jit(function, donate_argnums=donate, **jit_options).lower(*inputs)

            lowered = lower()
            if executables is None:
                self.lowered = lowered
                return
            # A trace that came to the same program (the step's Python found state in place that an
            # earlier trace made) costs no compilation. The text doesn't say on which devices.
            devices = None if self._frame is None else tuple(self._frame.device_ids)
            text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            key = text, devices, lowered.in_tree, layouts(inputs)
            compiled = executables.get(key)
            self.digest = text[:16]
            self.newly_compiled = compiled is None
            if compiled is None:
                if self._frame is not None:
                    seed = f" with the seed {rng.default.seed}" if self._random_operations else ""
                    agreement.agree(
                        f"compiles a step of {len(jaxpr.eqns)} operations (digest {self.digest}) "
                        f"on {self._frame}{seed}"
                    )
                compiled = self.lowering.attempt(
                    lambda: lowered.compile(options), lambda: apart(lower()).compile(options)
                )
                executables.put(key, compiled)
            self.compiled = compiled

    def _sharding(self, form: Form) -> Any:
        if form.sharding is not None or self._frame is None:
            return form.sharding
        return self._frame.replicated

    def _sharing(self, grads: list[Any], arguments: Arguments) -> Any:
        """Which gradients are in the same memory, or in that of something else that the step uses;
        None if each has its own."""
        storages = [id(grad._storage_) for grad in grads]
        others = self._own_storages() | {
            id(getattr(t, "_storage_", None)) for t in arguments.tensors
        }
        if len(set(storages)) == len(storages) and not others.intersection(storages):
            return None
        first: dict[int, int] = {}
        return [(first.setdefault(s, i), s in others) for i, s in enumerate(storages)]

    def _own_storages(self) -> set[int]:
        found = getattr(self, "_storage_ids", None)
        if found is None:
            found = self._storage_ids = {
                id(storage)
                for source in self._traced.slots
                if isinstance(source, StateSource)
                for storage in source.storages
            }
        return found

    @property
    def frame(self) -> Any:
        """The devices that the program runs on."""
        return self._frame

    @property
    def jaxpr(self) -> Any:
        """What the step computes."""
        return self._jaxpr

    @functools.cached_property
    def bytes(self) -> int:
        """About how much memory of the host it takes: its code, and what is known of it."""
        known = 2048 * len(self._jaxpr.eqns) + 512 * len(self.watch.reached.found)
        return (code_bytes(self.compiled) or 0) + known

    @property
    def options(self) -> dict[str, Any] | None:
        """For XLA."""
        return self._options

    def input_sources(self) -> dict[str, list[ArraySource]]:
        """Where the program's arrays come from, by what its arguments are called."""
        return {"donated": self._donated.sources, "kept": self._kept.sources}

    # --- the inputs of a call ----------------------------------------------------------------

    def _prepare(self, arguments: Arguments) -> Prepared:
        numbers = values_of(self._numbers, arguments)
        host = [] if self._host is None else self._host.run(arguments, numbers)
        return Prepared(numbers, host)

    def _gather(
        self, arguments: Arguments, prepared: Prepared, take: bool = True
    ) -> tuple[Any, Any, Any, Any]:
        for _, source in self._written_arguments:
            source.storage(arguments).check_write()
        donated = self._donated.gather(arguments)
        kept = self._kept.gather(arguments)
        hosts = [
            to_numpy(self._traced.host.reader(s.host)(arguments, prepared.host))
            for s in self._hosts
        ]
        if take and self._frame is not None:
            arrays.check_same(hosts, "gives a compiled step from the CPU")
        # Last: from here on nothing fails that would leave drawn numbers behind.
        return donated, kept, hosts, self._words(prepared, take)

    def _words(self, prepared: Prepared, take: bool) -> np.ndarray:
        """All numbers and the generator's state as one array: each argument of a program that comes
        from the host costs a transfer to every device."""
        words = np.empty(2 * len(self._numbers) + 4, dtype=np.uint32)
        if not self._uses_words:
            return words[:0]
        for i, (number, value) in enumerate(zip(self._numbers, prepared.numbers, strict=True)):
            dtype = np.int64 if number.integer else np.float64
            words[2 * i : 2 * i + 2].view(dtype)[0] = value
        operations = self._random_operations
        words[-4:] = (rng.default.take(operations) if take else rng.words()) if operations else 0
        return words


def _is_scalar(source: ArraySource) -> bool:
    return math.prod(source.form.array_shape) == 1


def _unique(found: list[Decision]) -> list[Decision]:
    return [*{decision.text: decision for decision in found}.values()]
