"""One compiled form of a step: an executable, what must hold for it to run, and its effects."""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from torch.utils import _pytree as pytree

from xla_dtensor.base import epoch, interrupts, rng
from xla_dtensor.base.cache import Cache
from xla_dtensor.compilation.arguments import Arguments
from xla_dtensor.compilation.effects import Effect
from xla_dtensor.compilation.gradients import Layout, grad_text, same_grad
from xla_dtensor.compilation.history import History
from xla_dtensor.compilation.inputs import Arrays, Losses, check_alive, refuse_deleted
from xla_dtensor.compilation.node import Call, Kept, OnHost, Read, WithHistory, cotangent
from xla_dtensor.compilation.numbers import ARITHMETIC, Changed, Decision, values_of
from xla_dtensor.compilation.outside import Outside
from xla_dtensor.compilation.recipes import (
    Built,
    Computed,
    Existing,
    GivenBack,
    Gradient,
    Host,
    Seen,
    Source,
    Template,
)
from xla_dtensor.compilation.run import Prepared, Run
from xla_dtensor.compilation.split import Split
from xla_dtensor.compilation.traced import Traced
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.storage import Storage, put
from xla_dtensor.tensors.of_form import new_tensor

_grad = operator.attrgetter("grad")

# Sources that are inputs of the program as they are.
_ARRAY_KINDS = ("state", "argument", "grad", "host")


class Program:
    """One traced and compiled form of the step, valid while its guards hold.

    Args:
        executables: those compiled so far; None to lower the program and no more.

    Attributes:
        compiled: the ``jax.stages.Compiled``.
        lowered: the ``jax.stages.Lowered``, without ``executables``.
        newly_compiled: whether XLA had to compile it.
        launched: whether it has ever run.
        stale: why the next call has to trace again whatever it finds, or None.
        why_not: what `mismatch` said last.
    """

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
            self._leaf_tensors = [o.get() for o in self._leaves]
        self._no_grads = [None] * len(self._leaves)
        self._grads_share = self._sharing(grads, arguments) if grads else None
        for outside in self._outside:  # gradients of before aren't kept alive
            needed = outside.grad is not None and not outside.cleared
            outside.grad = Layout(outside.grad) if needed else None
        self._jaxpr = traced.jaxpr
        self._plan_inputs(arguments)
        self._compile(executables, compiler_options, arguments)

    # --- compiling ---------------------------------------------------------------------------

    def _plan_inputs(self, arguments: Arguments) -> None:
        """The order of the program's inputs: arrays that it overwrites (donated), arrays that it
        keeps, arrays of the host, and one array with all numbers and the generator's state."""
        traced = self._traced
        used: dict[int, Source] = {}
        for source in traced.sources:
            used.setdefault(id(source), source)
        self._arrays = [s for s in used.values() if s.kind in ("state", "argument", "grad")]
        # Not the counters: they are four bytes, and others may hold their array.
        donated = [s for s in self._arrays if s.writes and len(s.storages) <= 1]
        kept = [s for s in self._arrays if not (s.writes and len(s.storages) <= 1)]
        self._donated, self._kept = Arrays(donated), Arrays(kept)
        self._hosts = [s for s in used.values() if s.kind == "host"]
        self._uses_words = any(s.kind in ("number", "rng") for s in used.values())
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
        others: list[tuple[int, Source]] = []
        for index, source, storages in self._writes:
            if source.kind != "state":
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
            elif isinstance(what, Source) and what.kind == "state":
                tensor = None if by is None else by.get()
                self._reads += [Read(storage, through, tensor) for storage in what.storages]
            elif isinstance(what, torch.Tensor):
                self._reads.append(Read(OnHost(what), through, None))
            elif isinstance(what, int) or (
                isinstance(what, Source) and what.kind in ("argument", "grad")
            ):
                self._reads_found.append((what, through, by))

    def _resolver(self) -> Callable[..., list[Any]]:
        """A function from the program's inputs to the constants of the jaxpr."""
        sources, count = self._traced.sources, len(self._numbers)
        where: dict[int, tuple[int, int]] = {}
        for group, members in enumerate((self._donated.sources, self._kept.sources, self._hosts)):
            where |= {id(source): (group, i) for i, source in enumerate(members)}
        integers = [number.integer for number in self._numbers]

        def number(words: Any, i: int) -> Any:
            dtype = jnp.int64 if integers[i] else jnp.float64
            return jax.lax.bitcast_convert_type(words[2 * i : 2 * i + 2], dtype)

        def constants(donated: Any, kept: Any, hosts: Any, words: Any) -> list[Any]:
            inputs = (donated, kept, hosts)
            found = []
            for source in sources:
                if source.kind == "constant":
                    found.append(source.what)
                elif source.kind == "fill":
                    form, value = source.what.form, source.what.fill_value
                    found.append(jnp.full(form.array_shape, value, form.jax_dtype))
                elif source.kind == "number":
                    found.append(number(words, source.what))
                elif source.kind == "rng":
                    found.append(words[2 * count : 2 * count + 4])
                elif source.kind == "cotangent":
                    found.append(None)
                else:
                    group, index = where[id(source)]
                    found.append(inputs[group][index])
            return found

        return constants

    def _compile(
        self,
        executables: Cache[Any, Any] | None,
        options: dict[str, Any] | None,
        arguments: Arguments,
    ) -> None:
        jaxpr, evaluate, history = self._jaxpr, jaxpr_as_fun, self._traced.history
        constants, traced_sources = self._resolver(), self._traced.sources
        shardings = [self._sharding(form) for form in self._forms]
        self._outputs = list(range(len(self._forms)))
        self._split: Split | None = None
        if history is not None:
            cotangents: list[int | None] = [None] * len(history.cotangents)
            for i, source in enumerate(self._traced.sources):
                if source.kind == "cotangent":
                    cotangents[source.what] = i
            gradients = [g[0] for g in history.gradients if g is not None]
            late = set(gradients)
            self._outputs = [i for i in self._outputs if i not in late]
            self._split = Split(jaxpr, cotangents, gradients, self._outputs)
            self._plan_reads(self._split)
            self._used_cotangents = [n for n, i in enumerate(cotangents) if i is not None]
            jaxpr = self._split.forward
            shardings = [shardings[i] for i in self._outputs]
            shardings += [None] * self._split.residuals
            passed = self._split.constants
            self._computed = [i for i in passed if traced_sources[i].kind not in _ARRAY_KINDS]
            self._computing = jax.jit(
                lambda *inputs: [constants(*inputs)[i] for i in self._computed]
            )
            grad_shardings = [self._sharding(self._forms[i]) for i in gradients]
            backward = self._split.backward
            self._backward = jax.jit(
                lambda inputs: evaluate(ClosedJaxpr(backward, []))(*inputs),
                out_shardings=grad_shardings if any(grad_shardings) else None,
            )
        self._place_of = {output: i for i, output in enumerate(self._outputs)}
        self._plan_writes()

        def step(donated: Any, kept: Any, hosts: Any, words: Any) -> list[Any]:
            found = constants(donated, kept, hosts, words)
            if history is not None:
                found = [0 if value is None else value for value in found]
            return evaluate(ClosedJaxpr(jaxpr, found))()

        jit_options: dict[str, Any] = {}
        if any(s is not None for s in shardings):
            jit_options["out_shardings"] = shardings
        # The backward pass may need the old values; but there is none where torch's would raise.
        donate = 0 if history is None or len(history.errors) == len(history.outputs) else ()
        with jax.enable_x64(True):
            jitted = jax.jit(step, donate_argnums=donate, **jit_options)
            prepared = self._prepared = self._prepare(arguments)
            inputs = self._gather(arguments, prepared, take=False)
            lowered = jitted.lower(*inputs)
            if executables is None:
                self.lowered = lowered
                return
            # A trace that came to the same program (the step's Python found state in place that an
            # earlier trace made) costs no compilation. The text doesn't say on which devices.
            devices = None if self._frame is None else tuple(self._frame.device_ids)
            text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            key = text, devices, lowered.in_tree, _layouts(inputs)
            compiled = executables.get(key)
            self.newly_compiled = compiled is None
            if compiled is None:
                compiled = executables.put(key, lowered.compile(options))
            self.compiled = compiled

    def _sharding(self, form: Form) -> Any:
        if form.sharding is not None or self._frame is None:
            return form.sharding
        return self._frame.replicated

    # --- checking ----------------------------------------------------------------------------

    def mismatch(self, arguments: Arguments) -> str | None:
        """Why this program can't run now, or None."""
        self.changed_path = None
        if self.stale is not None:
            return self.stale
        if not self.watch.untouched():
            difference = self._look_closer()
            if difference is not None:
                return difference
        if self._epoch != epoch.tensors.value:
            for outside in (*self._outside, *self._traced.others):
                changed = outside.changed()
                if changed is not None:
                    return changed
            self._epoch = epoch.tensors.value
        difference = self._grads_differ(arguments)
        if difference is not None:
            return difference
        for index, storage in self._traced.bound_arguments:
            if arguments.tensors[index]._storage_ is not storage:
                return "an argument, which was a tensor that the step uses anyway"
        if self._traced.free_arguments:
            own = self._own_storages()
            for index in self._traced.free_arguments:
                if id(arguments.tensors[index]._storage_) in own:
                    return "an argument, which is a tensor that the step uses anyway"
        difference = self._donated.mismatch(self, arguments)
        difference = difference or self._kept.mismatch(self, arguments)
        if difference is not None:
            return difference
        for read, (value, text) in self._settings.items():
            if read() != value:
                return f"{text}: from {value!r} to {read()!r}"
        try:
            self._prepared = self._prepare(arguments)
        except Changed as changed:
            return str(changed)
        numbers = self._prepared.numbers
        try:
            for decision in self._decisions:
                if decision.compute(numbers) != decision.outcome:
                    return f"the step decided {decision.text}, which holds no longer"
        except ARITHMETIC as error:
            return f"the step decided {decision.text}: {error}"
        for look, was, text in self._looked_at:
            if look(arguments, self._prepared.host) != was:
                return f"{text}, which is part of the program"
        return None

    def _look_closer(self) -> str | None:
        """Compare by value what the step can read; None if nothing has changed."""
        now = self._traced.look_again()
        if not self._traced.carries(now):
            return "whether there is something that the step keeps from one call to the next"
        differences = self.watch.differences(now)
        if not differences:
            places = {place.container for place in now.places}
            changed = [effect.place for effect in self.effects]
            changed += [carried.place for carried in self._traced.carried]
            if any(place.container not in places for place in changed):
                return "something that the step changes, which is another object now"
            self.watch = now
            return None
        before, after = differences[0]
        self.changed_path = (after or before).path  # type: ignore[union-attr]
        return (
            f"{self.changed_path}: from {before.text() if before else 'nothing'} to "
            f"{after.text() if after else 'nothing'}"
        )

    def _grads_differ(self, arguments: Arguments) -> str | None:
        leaves = self._leaf_tensors
        if leaves is not None:
            # torch asks each for a __torch_function__, which takes as long as reading .grad.
            with torch._C.DisableTorchFunctionSubclass():
                none = all(map(operator.is_, map(_grad, leaves), self._no_grads))
            if none:
                return None  # none had a gradient, and none has
        grads = []
        for outside in self._leaves:
            leaf = outside.of(arguments)
            if leaf is not None:
                grad = leaf.grad
                if not same_grad(grad, outside.grad):
                    return grad_text(leaf, outside.grad)
                if grad is not None:
                    grads.append(grad)
        if grads and self._sharing(grads, arguments) != self._grads_share:
            return "which memory the gradients are in"
        return None

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
                if source.kind == "state"
                for storage in source.storages
            }
        return found

    def storage_of(self, source: Source, arguments: Arguments) -> Storage:
        """The storage of an input in this call."""
        if source.kind == "argument":
            return arguments.tensors[source.what]._storage_
        if source.kind == "grad":
            leaf = source.what.of(arguments)
            if leaf is not None and leaf.grad is not None:
                return leaf.grad._storage_
        return source.storages[0]

    def _prepare(self, arguments: Arguments) -> Prepared:
        numbers = values_of(self._numbers, arguments)
        host = [] if self._host is None else self._host.run(arguments, numbers)
        return Prepared(numbers, host)

    # --- running -----------------------------------------------------------------------------

    @interrupts.atomic
    def run(self, arguments: Arguments, prepared: Prepared | None = None) -> Any:
        """Execute the program and put its effects in place.

        Raises:
            BaseException: it couldn't be launched, and nothing has happened; or something has
                failed in writing back, and everything else that the step does has happened.
        """
        run = Run(arguments, prepared or self._prepared)
        history = self._traced.history
        if history is None or not torch.is_grad_enabled():
            self._execute(run)
        else:
            try:
                self._run_with_history(history, run)
            except BaseException as error:
                if run.arrays is None:
                    raise
                run.error = run.error or error
        self._finish(run)
        if run.error is not None:
            raise run.error
        results = [self._result(result, run) for result in self._traced.results]
        return pytree.tree_unflatten(results, self._traced.result_tree)

    def _run_with_history(self, history: History, run: Run) -> None:
        """Execute the program as a node of the caller's history."""

        def execute(call: Call) -> list[Any]:
            residuals = self._execute(run, history=True)
            results = [self._tensor(template, run) for template in history.outputs]
            call.kept = Kept(residuals, [*self._reads, *self._other_reads(run)])
            return results

        inputs = [outside.of(run.arguments) for outside in history.inputs]
        # The node keeps none of what this call has: its own results among that would be a cycle.
        found = WithHistory.apply(Call(execute, self._run_backward), *inputs)
        made = zip(history.outputs, found, strict=True)
        run.made.update((id(template), result) for template, result in made)

    def _other_reads(self, run: Run) -> Iterator[Read]:
        for what, through, by in self._reads_found:
            if isinstance(what, Template):
                storage = self._tensor(what, run)._storage_
            elif isinstance(what, int):
                storage = OnHost(run.arguments.tensors[what])
            else:
                storage = self.storage_of(what, run.arguments)
            yield Read(storage, through, None if by is None else by.of(run.arguments))

    def _execute(self, run: Run, history: bool = False) -> list[Any]:
        """Launch, and write to what was there before; the backward pass's residuals."""
        with jax.enable_x64(True):
            inputs = self._gather(run.arguments, run.prepared)
            try:
                if Losses.seen:
                    refuse_deleted((*inputs[0], *inputs[1]))
                arrays = self.compiled(*inputs)
            except BaseException as error:
                if self._random_operations:
                    rng.give_back(inputs[3][-4:], self._random_operations)
                check_alive(inputs[0], error)
                raise
            residuals = []
            if self._split is not None:
                count = len(arrays) - self._split.residuals
                arrays, residuals = arrays[:count], arrays[count:]
                if history:
                    residuals = [*residuals, *self._constants(inputs)]
        self.launched = True
        run.arrays = arrays
        self._put(run)
        if run.error is not None:
            left = [storage.value for storage in self._written_storages]
            Losses.seen = Losses.seen or any(array.is_deleted() for array in left)
        return residuals

    def _constants(self, inputs: Any) -> list[Any]:
        """The inputs that the backward pass needs, too: the very arrays, not copies."""
        assert self._split is not None
        computed = iter(self._computing(*inputs) if self._computed else ())
        groups = self._donated.sources, self._kept.sources, self._hosts
        where = {id(s): (g, i) for g, members in enumerate(groups) for i, s in enumerate(members)}
        found = []
        for index in self._split.constants:
            source = self._traced.sources[index]
            if source.kind in _ARRAY_KINDS:
                group, position = where[id(source)]
                found.append(inputs[group][position])
            else:
                found.append(next(computed))
        return found

    def _put(self, run: Run) -> None:
        """Assign what the program has computed to what was there. None of this is expected to fail;
        if one thing does, the rest is done all the same: half a step would be worse."""
        for piece in (
            *(self._put_states, self._put_arguments, self._put_gradients, self._put_left),
            *(self._put_host, self._count_writes),
        ):
            run.insist(piece)

    def _put_states(self, run: Run) -> None:
        arrays, place_of = run.arrays, self._place_of
        counted = put(self._written_storages, map(arrays.__getitem__, self._written_places))
        for index, storages in self._written_counters:
            put(storages, itertools.repeat(arrays[place_of[index]]))
        for storage, form in self._new_forms:
            storage.reform(form)
        for storage in counted:
            storage.count_write()

    def _put_arguments(self, run: Run) -> None:
        for index, source in self._written_arguments:
            storage = self.storage_of(source, run.arguments)
            storage.write(run.arrays[self._place_of[index]], self._forms[index])

    def _count_writes(self, run: Run) -> None:
        """Tell autograd."""
        if self._counted:
            torch.autograd.graph.increment_version(self._counted)
        for outside in self._counted_others:
            tensor = outside.of(run.arguments)
            if tensor is not None and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

    def _put_gradients(self, run: Run) -> None:
        for outside, template in self._traced.grads:
            leaf = outside.of(run.arguments)
            if leaf is not None:
                leaf.grad = None if template is None else self._tensor(template, run)
        for outside, requires_grad in self._traced.switched:
            leaf = outside.of(run.arguments)
            if leaf is not None:
                leaf.requires_grad_(requires_grad)

    def _put_left(self, run: Run) -> None:
        for storage, index in self._traced.left:
            storage.write(run.arrays[self._place_of[index]], self._forms[index])

    def _finish(self, run: Run) -> None:
        """What else the step's Python has done. The schedulers' steps come last: they are the
        user's code, and may fail."""
        for effect in self._traced.effects:
            run.insist(functools.partial(self._repeat, effect))
        if self._traced.left or not self._is_steady():
            # The next call traces again: it finds this state in place of making it, and may come to
            # another program.
            self.stale = "the first call made state that the step now finds in place"
            self._traced.left = []
        for scheduler, step, args, kwargs in self._traced.schedulers.calls:
            if run.error is None:
                run.succeeds(functools.partial(_step_scheduler, step, scheduler, args, kwargs))

    def _put_host(self, run: Run) -> None:
        """Write back to CPU tensors what the host's program has made of them."""
        with torch.no_grad():
            for target, source in self._traced.host_writes:
                value = self._traced.host.reader(source)(run.arguments, run.prepared.host)
                target.read(run.arguments).copy_(value)

    def _is_steady(self) -> bool:
        return all(
            stepped.is_steady() or not stepped.made_state()
            for stepped in self._traced.hooks.stepped.values()
        )

    def _built(self, value: Any, run: Run) -> Any:
        """What the step leaves somewhere in this call."""
        if not isinstance(value, Built):
            return value
        if id(value) not in run.made:
            parts = [self._result(part, run) for part in value.parts]
            run.made[id(value)] = pytree.tree_unflatten(parts, value.tree)
        return run.made[id(value)]

    def _repeat(self, effect: Effect, run: Run) -> None:
        effect.repeat(lambda value: self._built(value, run))

    def _result(self, result: Any, run: Run) -> Any:
        arguments = run.arguments
        if isinstance(result, Template):
            return self._tensor(result, run)
        if isinstance(result, Seen):
            seen = run.made.get(id(result))
            if seen is None:
                base = result.of
                if isinstance(base, Template):
                    base = self._tensor(base, run)
                elif isinstance(base, int):
                    base = arguments.tensors[base]
                seen = run.made[id(result)] = result.made(base)
            return seen
        if isinstance(result, Existing):
            return result.value
        if isinstance(result, Gradient):
            return result.leaf.of(arguments).grad
        if isinstance(result, Computed):
            return result.node.compute(run.prepared.numbers)
        if isinstance(result, Host):
            if result.source is None:
                return result.tensor.clone()
            read = self._traced.host.reader(result.source)
            return read(arguments, run.prepared.host).clone()
        assert isinstance(result, GivenBack)
        return arguments.tensors[result.index]

    def _tensor(self, template: Template, run: Run) -> Any:
        tensor = run.made.get(id(template))
        if tensor is None:
            form = self._forms[template.index]
            array = run.arrays[self._place_of[template.index]]
            tensor = run.made[id(template)] = new_tensor(array, form)
            tensor._storage_.refuses_writes = template.refuses
            if template.is_leaf:
                tensor.requires_grad_()
                if template.is_parameter:
                    tensor = run.made[id(template)] = torch.nn.Parameter(tensor.detach())
                if template.grad is not None:
                    tensor.grad = self._tensor(template.grad, run)
        return tensor

    def _run_backward(self, kept: Kept, grads: list[Any]) -> list[Any]:
        """The gradients of the inputs from those of the results."""
        history, residuals = self._traced.history, kept.residuals
        assert history is not None
        for i, message in history.errors.items():
            if grads[i] is not None:
                raise RuntimeError(message)
        kept.check(grads)
        with jax.enable_x64(True):
            forms = [form.placed(self._frame) for form in history.cotangent_forms]
            arrays = [cotangent(grads[n], forms[n]) for n in self._used_cotangents]
            for array in residuals:
                if isinstance(array, jax.Array) and array.is_deleted():
                    raise RuntimeError(
                        "a tensor that the backward pass of a compiled step needs has been "
                        "overwritten by another compiled step since; call backward() before the "
                        "parameters are updated"
                    )
            results = iter(self._backward([*residuals, *arrays]))
        found: list[Any] = []
        for i, gradient in enumerate(history.gradients):
            array = None if gradient is None else next(results)
            # A result that nobody has used gives no gradient, not one of zeros.
            used = any(
                grad is not None and i in reached
                for grad, reached in zip(grads, history.reached, strict=True)
            )
            if gradient is None or not used:
                found.append(None)
                continue
            found.append(new_tensor(array, gradient[1].placed(self._frame)))
        return found

    # --- inputs ------------------------------------------------------------------------------

    def _gather(
        self, arguments: Arguments, prepared: Prepared, take: bool = True
    ) -> tuple[Any, Any, Any, Any]:
        for _, source in self._written_arguments:
            self.storage_of(source, arguments).check_write()
        donated = self._donated.gather(self, arguments)
        kept = self._kept.gather(self, arguments)
        hosts = [
            to_numpy(self._traced.host.reader(s.what)(arguments, prepared.host))
            for s in self._hosts
        ]
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
        words[-4:] = (rng.take(operations) if take else rng.words()) if operations else 0
        return words

    @property
    def frame(self) -> Any:
        """The devices that the program runs on."""
        return self._frame

    # --- how long it lives, see `Programs` ---------------------------------------------------

    def anchored(self, other: Program) -> bool:
        """Be held by memory that this program uses and ``other`` doesn't; whether there is any."""
        if self._anchor() is not None:
            return True
        others = other._own_storages()
        storages = [s for source in self._traced.slots for s in source.storages]
        # The last: what an optimizer has made goes before the model does.
        anchor = next((s for s in reversed(storages) if id(s) not in others), None)
        if anchor is None:
            return False
        anchor.holds = [*getattr(anchor, "holds", ()), self]
        self._anchor = weakref.ref(anchor)
        return True

    def release(self) -> None:
        """Be held by no memory any more."""
        anchor = self._anchor()
        if anchor is not None:
            anchor.holds = [program for program in anchor.holds if program is not self]


def _step_scheduler(step: Any, scheduler: Any, args: Any, kwargs: Any, run: Run) -> None:
    step(scheduler, *args, **kwargs)


def _layouts(inputs: Any) -> tuple[Any, ...]:
    """What a program's text doesn't have of its inputs: their layouts, and those that it doesn't
    use."""
    return tuple(
        (x.shape, x.dtype, getattr(x, "sharding", None)) for x in pytree.tree_leaves(inputs)
    )


def _unique(decisions: list[Decision]) -> list[Decision]:
    return list({decision.text: decision for decision in decisions}.values())
