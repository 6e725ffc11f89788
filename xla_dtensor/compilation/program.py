"""One compiled form of a step: an executable, what must hold for it to run, and its effects."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from torch.utils import _pytree as pytree

from xla_dtensor import interrupts, rng
from xla_dtensor.base import epoch
from xla_dtensor.base.cache import Cache
from xla_dtensor.compilation.arguments import Arguments
from xla_dtensor.compilation.history import Call, Split, WithHistory, cotangent
from xla_dtensor.compilation.optimizers import Changed
from xla_dtensor.compilation.trace import Decision
from xla_dtensor.compilation.traced import (
    Built,
    Computed,
    Existing,
    GivenBack,
    Host,
    Leaf,
    Part,
    Source,
    Template,
    Traced,
    View,
)
from xla_dtensor.dispatch._plan import new_tensor
from xla_dtensor.form import Form
from xla_dtensor.storage import Pending, Storage, put
from xla_dtensor.transfer import to_numpy

_value = operator.attrgetter("value")
_grad = operator.attrgetter("grad")


# Sources that are inputs of the program as they are.
_ARRAY_KINDS = ("state", "argument", "grad", "host")


class Prepared:
    """What the checks of a call have computed, and its launch needs.

    Attributes:
        numbers: the values of the program's numbers.
        host: the results of the host's operations.
    """

    __slots__ = ("host", "numbers")

    def __init__(self, numbers: list[float], host: list[Any]) -> None:
        self.numbers, self.host = numbers, host


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
        self._counted = [o.get() for o in counted if o.index is None]
        self._counted = [t for t in self._counted if not t.is_inference()]
        self._counted_arguments = [o.index for o in counted if o.index is not None]
        grads = [o.grad for o in self._leaves if o.grad is not None]
        # Where none of them has a gradient when the step begins, asking is one loop in C.
        self._leaf_tensors: list[Any] | None = None
        if not grads and all(o.index is None for o in self._leaves):
            self._leaf_tensors = [o.get() for o in self._leaves]
        self._no_grads = [None] * len(self._leaves)
        self._grads_share = self._sharing(grads, arguments) if grads else None
        self._jaxpr = traced.closed.jaxpr
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
        donated = [s for s in self._arrays if s.writes and len(s.storages) == 1]
        kept = [s for s in self._arrays if not (s.writes and len(s.storages) == 1)]
        self._donated, self._kept = _Arrays(donated), _Arrays(kept)
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
        traced_results = self._traced.results
        shardings = [self._sharding(form) for form in self._forms]
        self._outputs = list(range(len(self._forms)))
        self._split: Split | None = None
        if history is not None:
            # A tensor that is several results is one of them for autograd.
            firsts = {id(traced_results[i]): i for i in history.outputs}
            self._repeated = [
                (i, firsts[id(r)])
                for i, r in enumerate(traced_results)
                if id(r) in firsts and firsts[id(r)] != i
            ]
            cotangents: list[int | None] = [None] * len(history.cotangents)
            for i, source in enumerate(self._traced.sources):
                if source.kind == "cotangent":
                    cotangents[source.what] = i
            gradients = [g[0] for g in history.gradients if g is not None]
            late = set(gradients)
            self._outputs = [i for i in self._outputs if i not in late]
            self._split = Split(jaxpr, cotangents, gradients, self._outputs)
            self._backward_uses = [i for i in cotangents if i is not None]
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
        donate = 0 if history is None else ()
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
        for decision in self._decisions:
            if decision.compute(self._prepared.numbers) != decision.outcome:
                return f"the step decided {decision.text}, which holds no longer"
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
                if not _same_grad(grad, outside.grad):
                    return _grad_text(leaf, outside.grad)
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
        numbers = [number.read(arguments) for number in self._numbers]
        host = [] if self._host is None else self._host.run(arguments, numbers)
        return Prepared(numbers, host)

    # --- running -----------------------------------------------------------------------------

    def run(self, arguments: Arguments, prepared: Prepared | None = None) -> Any:
        """Execute the program and put its effects in place."""
        prepared = prepared or self._prepared
        history = self._traced.history
        if history is None or not torch.is_grad_enabled():
            return self._results(self._execute(arguments, prepared)[0], arguments)
        kept: dict[str, Any] = {}

        def run() -> list[Any]:
            arrays, kept["residuals"] = self._execute(arguments, prepared, True)
            kept["versions"] = [(s, s.version) for s in self._needed_storages(arguments)]
            kept["results"] = self._flat_results(arrays, arguments)
            return [kept["results"][i] for i in history.outputs]

        def backward(grads: list[Any]) -> list[Any]:
            for storage, version in kept["versions"]:
                if storage.version != version:
                    raise RuntimeError(
                        "one of the variables needed for gradient computation has been modified by "
                        f"an inplace operation: a tensor of shape {list(storage.form.shape)}, "
                        "since the compiled step ran whose result is differentiated"
                    )
            return self._run_backward(kept["residuals"], grads)

        inputs = [outside.of(arguments) for outside in history.inputs]
        differentiable = WithHistory.apply(Call(run, backward), *inputs)
        results = kept["results"]
        for i, result in zip(history.outputs, differentiable, strict=True):
            results[i] = result
        for i, first in self._repeated:
            results[i] = results[first]
        return pytree.tree_unflatten(results, self._traced.result_tree)

    def _needed_storages(self, arguments: Arguments) -> list[Storage]:
        """The memory from outside that the backward pass reads again."""
        assert self._split is not None
        sources = [self._traced.sources[i] for i in self._split.constants]
        return [
            self.storage_of(s, arguments)
            for s in sources
            if s.kind in ("state", "argument", "grad")
        ]

    @interrupts.atomic
    def _execute(
        self, arguments: Arguments, prepared: Prepared, history: bool = False
    ) -> tuple[list[Any], Any]:
        with jax.enable_x64(True):
            inputs = self._gather(arguments, prepared)
            try:
                if _Losses.seen:
                    _refuse_deleted((*inputs[0], *inputs[1]))
                arrays = self.compiled(*inputs)
            except BaseException as error:
                if self._random_operations:
                    rng.give_back(inputs[3][-4:], self._random_operations)
                _check_alive(inputs[0], error)
                raise
            residuals = None
            if self._split is not None:
                count = len(arrays) - self._split.residuals
                arrays, last = arrays[:count], arrays[count:]
                if history:
                    residuals = [*last, *self._constants(inputs)]
        self.launched = True
        try:
            self._put(arrays, arguments)
        except BaseException:
            _Losses.seen = _Losses.seen or any(array.is_deleted() for array in inputs[0])
            raise
        return arrays, residuals

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

    def _put(self, arrays: list[Any], arguments: Arguments) -> None:
        """Assign what the program has computed. Nothing here can fail but a scheduler's step, which
        comes last."""
        place_of, forms = self._place_of, self._forms
        counted = put(self._written_storages, map(arrays.__getitem__, self._written_places))
        for index, storages in self._written_counters:
            put(storages, itertools.repeat(arrays[place_of[index]]))
        for storage, form in self._new_forms:
            storage.reform(form)
        for storage in counted:
            storage.count_write()
        for index, source in self._written_arguments:
            storage = self.storage_of(source, arguments)
            storage.write(arrays[place_of[index]], forms[index])
        if self._counted:
            torch.autograd.graph.increment_version(self._counted)
        for index in self._counted_arguments:
            argument = arguments.tensors[index]
            if not argument.is_inference():
                torch.autograd.graph.increment_version(argument)
        if self._traced.host_writes:
            self._write_host(arguments)
        made: dict[int, Any] = {}
        for outside, template in self._traced.grads:
            leaf = outside.of(arguments)
            if leaf is not None:
                leaf.grad = None if template is None else self._tensor(template, arrays, made)
        for outside, requires_grad in self._traced.switched:
            leaf = outside.of(arguments)
            if leaf is not None:
                leaf.requires_grad_(requires_grad)
        for storage, index in self._traced.left:
            storage.write(arrays[place_of[index]], forms[index])
        for effect in self._traced.effects:
            effect.repeat(lambda value: self._built(value, arrays, arguments, made))
        self._made = made
        for scheduler, step, args, kwargs in self._traced.schedulers.calls:
            step(scheduler, *args, **kwargs)
        if self._traced.left or not self._is_steady():
            # The next call traces again: it finds this state in place of making it, and may come to
            # another program.
            self.stale = "the first call made state that the step now finds in place"
            self._traced.left = []

    def _write_host(self, arguments: Arguments) -> None:
        """Write back to CPU tensors what the host's program has made of them."""
        host = self._prepared.host
        with torch.no_grad():
            for target, source in self._traced.host_writes:
                value = self._traced.host.reader(source)(arguments, host)
                target.read(arguments).copy_(value)

    def _is_steady(self) -> bool:
        return all(
            stepped.is_steady() or not stepped.made_state()
            for stepped in self._traced.hooks.stepped.values()
        )

    def _built(
        self, value: Any, arrays: list[Any], arguments: Arguments, made: dict[int, Any]
    ) -> Any:
        """What the step leaves somewhere in this call."""
        if not isinstance(value, Built):
            return value
        if id(value) not in made:
            parts = [self._result(part, arrays, arguments, made) for part in value.parts]
            made[id(value)] = pytree.tree_unflatten(parts, value.tree)
        return made[id(value)]

    def _results(self, arrays: list[Any], arguments: Arguments) -> Any:
        return pytree.tree_unflatten(
            self._flat_results(arrays, arguments), self._traced.result_tree
        )

    def _flat_results(self, arrays: list[Any], arguments: Arguments) -> list[Any]:
        made, self._made = self._made, {}
        return [self._result(r, arrays, arguments, made) for r in self._traced.results]

    def _result(
        self, result: Any, arrays: list[Any], arguments: Arguments, made: dict[int, Any]
    ) -> Any:
        if isinstance(result, Template):
            return self._tensor(result, arrays, made)
        if isinstance(result, Leaf):
            return self._leaf(result, arrays, made)
        if isinstance(result, Part):
            whole = self._tensor(result.whole, arrays, made)
            return result.cls(whole._storage_, result.form.placed(self._frame), result.steps)
        if isinstance(result, Existing):
            return result.value
        if isinstance(result, Computed):
            return result.node.compute(self._prepared.numbers)
        if isinstance(result, Host):
            if result.source is None:
                return result.tensor.clone()
            read = self._traced.host.reader(result.source)
            return read(arguments, self._prepared.host).clone()
        if isinstance(result, View):
            return result.cls(result.storage, result.form, result.steps)
        assert isinstance(result, GivenBack)
        argument = arguments.tensors[result.index]
        if result.cls is None:
            return argument
        return result.cls(argument._storage_, result.form, result.steps)

    def _leaf(self, leaf: Leaf, arrays: list[Any], made: dict[int, Any]) -> Any:
        tensor = made.get(id(leaf))
        if tensor is None:
            tensor = self._tensor(leaf.whole, arrays, made).requires_grad_()
            if leaf.is_parameter:
                tensor = torch.nn.Parameter(tensor.detach())
            if leaf.grad is not None:
                tensor.grad = self._tensor(leaf.grad, arrays, made)
            made[id(leaf)] = tensor
        return tensor

    def _tensor(self, template: Template, arrays: list[Any], made: dict[int, Any]) -> Any:
        tensor = made.get(id(template))
        if tensor is None:
            form = self._forms[template.index]
            array = arrays[self._place_of[template.index]]
            tensor = made[id(template)] = new_tensor(array, form)
        return tensor

    def _run_backward(self, residuals: list[Any], grads: list[Any]) -> list[Any]:
        """The gradients of the inputs from those of the results."""
        history = self._traced.history
        assert history is not None
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


class _Arrays:
    """Inputs that are the arrays of storages."""

    def __init__(self, sources: list[Source]) -> None:
        self.sources = sources
        self._storages = [s.storages[0] for s in sources]
        # Of arguments and gradients each call has its own; the others tell when they change.
        self._special = [(i, s) for i, s in enumerate(sources) if s.kind != "state"]
        self._fixed = [(i, s.storages[0]) for i, s in enumerate(sources) if s.kind == "state"]
        self._shared = [s for s in sources if len(s.storages) > 1]
        self._forms = [s.form for s in sources]
        self._epoch = -1
        self._placed = False

    def mismatch(self, program: Program, arguments: Arguments) -> str | None:
        """Whether a storage no longer lies as the program was compiled for."""
        moved = epoch.forms.value
        if self._epoch != moved:
            difference = self._differ(self._fixed)
            if difference is not None:
                return difference
            self._epoch = moved
        if self._special:
            now = [(i, program.storage_of(source, arguments)) for i, source in self._special]
            difference = self._differ(now)
            if difference is not None:
                return difference
        for source in self._shared:
            first = source.storages[0].value
            values = map(_value, source.storages)
            if not all(map(operator.is_, values, itertools.repeat(first))):
                return "step counts that were equal"
        return None

    def _differ(self, storages: Iterable[tuple[int, Storage]]) -> str | None:
        for i, storage in storages:
            before = self._forms[i]
            if storage.form is before:
                continue
            if before is None or not _same_kind(storage.form, before):
                return f"captured state: from {before!r} to {storage.form!r}"
            self._forms[i] = storage.form
            self._placed = False
        return None

    def _place(self, program: Program, storages: list[Storage]) -> None:
        """Copy what is on the default device alone to all devices of the program."""
        self._placed = True
        if program.frame is None:
            return
        for i, storage in enumerate(storages):
            if storage.form.frame is None:
                storage.place(program.frame)
                self._forms[i] = storage.form
                for other in self.sources[i].storages[1:]:
                    other.array = storage.array
                    other.reform(storage.form)

    def gather(self, program: Program, arguments: Arguments) -> list[Any]:
        """The arrays of this call."""
        storages = self._storages
        if self._special:
            storages = list(storages)
            for i, source in self._special:
                storages[i] = program.storage_of(source, arguments)
        if not self._placed or self._special:
            self._place(program, storages)
        arrays = list(map(_value, storages))
        if Pending in set(map(type, arrays)):
            arrays = [storage.array for storage in storages]
        return arrays


class _Losses:
    """Whether a launch has ever failed after it had taken over what it was to overwrite. XLA may
    end the process when it is given such an array again, so from then on each is looked at."""

    seen = False


def _check_alive(arrays: list[Any], error: BaseException) -> None:
    """Say it if a launch that failed has used up the arrays that it was to overwrite.

    Raises:
        RuntimeError: it has.
    """
    lost = sum(array.is_deleted() for array in arrays)
    if lost:
        _Losses.seen = True
        raise RuntimeError(
            f"the compiled step failed on the devices after it had taken over the memory of {lost} "
            "tensors that it overwrites; their values are lost: load the last checkpoint"
        ) from error


def _refuse_deleted(arrays: Iterable[Any]) -> None:
    for array in arrays:
        if array.is_deleted():
            raise RuntimeError(
                f"a tensor of shape {list(array.shape)} has lost its value, because a compiled "
                "step failed on the devices while it overwrote it: load the last checkpoint"
            )


def _same_grad(now: Any, before: Any) -> bool:
    if now is None or before is None:
        return now is before
    return now is before or (
        type(now) is type(before)
        and now._form is before._form
        and now._steps == before._steps
        and not now._steps
    )


def _grad_text(leaf: Any, before: Any) -> str:
    def text(grad: Any) -> str:
        return "None" if grad is None else "a tensor"

    if (leaf.grad is None) == (before is None):
        return f"the layout of the .grad of a parameter of shape {list(leaf.shape)}"
    return (
        f"the .grad of a parameter of shape {list(leaf.shape)}: from {text(before)} to "
        f"{text(leaf.grad)}"
    )


def _same_kind(a: Form, b: Form) -> bool:
    """Whether a per-device tensor only moved from one device to all of them, or back."""
    return (
        a.mesh is None
        and b.mesh is None
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.varying == b.varying
        and (a.frame is None or b.frame is None)
    )


def _layouts(inputs: Any) -> tuple[Any, ...]:
    """What a program's text doesn't have of its inputs: their layouts, and those that it doesn't
    use."""
    return tuple(
        (x.shape, x.dtype, getattr(x, "sharding", None)) for x in pytree.tree_leaves(inputs)
    )


def _unique(decisions: list[Decision]) -> list[Decision]:
    return list({decision.text: decision for decision in decisions}.values())
