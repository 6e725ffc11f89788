"""One trace of a step: its jaxpr, and where each input comes from and each output goes."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import operator
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
import torch.utils.checkpoint
from torch.nn.utils import parametrize

from xla_dtensor import _context, interrupts
from xla_dtensor.compilation.arguments import Arguments
from xla_dtensor.compilation.carried import Carried, is_state, tensors_in
from xla_dtensor.compilation.code_names import is_library
from xla_dtensor.compilation.effects import Effect, Surroundings, check_replayable
from xla_dtensor.compilation.garbage import NewObjects
from xla_dtensor.compilation.history import History, is_view_by_torch
from xla_dtensor.compilation.host_ops import HostOperations
from xla_dtensor.compilation.host_random import OWN, MaybeAnotherThread, none_drawn
from xla_dtensor.compilation.norms import CumulativeNorms
from xla_dtensor.compilation.objects import MadeObjects
from xla_dtensor.compilation.optimizers import OptimizerHooks
from xla_dtensor.compilation.schedulers import DeferredSchedulers
from xla_dtensor.compilation.trace import Captured, StepTrace
from xla_dtensor.compilation.watch import Watch, content_of
from xla_dtensor.device_tensor import XLATensor
from xla_dtensor.dispatch import logical_value
from xla_dtensor.errors import DataDependentError
from xla_dtensor.form import Form
from xla_dtensor.per_device import logical
from xla_dtensor.python_numbers import MathOfNumbers, is_number, like_a_number
from xla_dtensor.sharded_tensor import XLAShardedTensor
from xla_dtensor.storage import Step, Storage, ViewStep

Ours = XLAShardedTensor | XLATensor


class Source:
    """Where an input of the program comes from.

    Attributes:
        kind: ``"state"`` (a storage, or several that hold one array), ``"argument"`` (the storage
            of one), ``"grad"`` (of a leaf's gradient), ``"fill"`` (a constant array), ``"number"``,
            ``"rng"``, ``"host"`` (a CPU tensor), ``"cotangent"`` or ``"constant"``.
        what: the storages; the argument's index; the leaf; the captured state;
            the number's index; the host's source; the cotangent's index; the array.
        storages: of ``"state"``: the storages, which are the same in each call.
        form: their form before the step.
        writes: (output, the storages that get it), where the step overwrites them.
    """

    __slots__ = ("form", "kind", "storages", "what", "writes")

    def __init__(
        self, kind: str, what: Any, storages: tuple[Storage, ...] = (), form: Form | None = None
    ) -> None:
        self.kind, self.what, self.storages, self.form = kind, what, storages, form
        self.writes: list[tuple[int, tuple[Storage, ...]]] = []

    def forget(self) -> None:
        """Let go of storages that are others in each call."""
        if self.kind == "argument" or (self.kind == "grad" and not self.what.cleared):
            self.storages = ()
            self.writes = [(index, ()) for index, _ in self.writes]

    def signature(self) -> Any:
        """What tells that two traces' sources are the same."""
        written = [index for index, _ in self.writes]
        if self.kind == "state":
            return self.kind, sorted(map(id, self.storages)), written
        if self.kind == "constant":
            return self.kind
        if self.kind in ("grad", "host"):
            return self.kind, written
        if self.kind == "fill":
            return self.kind, self.what.fill_value, self.what.form
        return self.kind, self.what, written


class Template:
    """A tensor that each call makes anew: output ``index`` in ``form``.

    Attributes:
        is_leaf: whether it requires grad, and has no history.
        is_parameter: whether it is an ``nn.Parameter``.
        grad: of a leaf, the template of its gradient.
        refuses: why it can't be written to, see `Storage.refuses_writes`.
    """

    __slots__ = ("form", "grad", "index", "is_leaf", "is_parameter", "refuses")

    def __init__(self, index: int, form: Form) -> None:
        self.index, self.form = index, form
        self.is_leaf = self.is_parameter = False
        self.grad: Template | None = None
        self.refuses: str | None = None


class Seen:
    """A tensor that shows memory of another one, as in torch: of one that each call makes, of an
    argument, or of one that is there.

    Attributes:
        of: the `Template`, the argument's index, or the tensor.
        detached: whether it is no view to autograd.
    """

    __slots__ = ("_further", "cls", "detached", "form", "of", "requires_grad", "steps")

    def __init__(self, of: Any, further: tuple[Step, ...], detached: bool, view: Any) -> None:
        self.of, self.detached, self.requires_grad = of, detached, view.requires_grad
        self.cls, self.form, self.steps = type(view), view._form, view._steps
        self._further = further

    def made(self, base: Any) -> Any:
        """The view of ``base``."""
        detached = self.detached or (base.requires_grad and not self.requires_grad)
        tensor = base.detach() if detached else base
        if not all(isinstance(step, ViewStep) and step.op is not None for step in self._further):
            frame = base._storage_.form.frame
            base._storage_.introduce(base)
            tensor = self.cls(base._storage_, self.form.placed(frame), self.steps)
            base._storage_.share_writes(base, tensor)
            return tensor
        for step in self._further:
            tensor = step.of(tensor)  # type: ignore[union-attr]
        return torch.ops.aten.alias.default(base) if tensor is base else tensor


class Existing:
    """A result that is the same object in each call."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class GivenBack:
    """A result that is one of the arguments, the one with ``index``."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Gradient:
    """A result that is the gradient which a leaf has after the call."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf


class NumberLeft(Exception):
    """A symbolic number is still there after the step: in an object that it returns, in a cache."""


class Computed:
    """A result, or what the step leaves somewhere, that is a Python number computed from numbers
    that are inputs."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"{self.node.value!r} ({self.node.text})"


class Host:
    """A result that is a CPU tensor which the step made.

    Attributes:
        source: where its value comes from in the host's program; None for a constant.
        tensor: the constant.
    """

    __slots__ = ("source", "tensor")

    def __init__(self, source: Any, tensor: torch.Tensor) -> None:
        self.source, self.tensor = source, tensor


class Built:
    """What the step leaves in an attribute, a list or a dict: parts like results, and how they make
    it up."""

    __slots__ = ("parts", "tree")

    def __init__(self, parts: list[Any], tree: Any) -> None:
        self.parts, self.tree = parts, tree

    def __repr__(self) -> str:
        part = self.parts[0] if len(self.parts) == 1 else None
        if isinstance(part, Template):
            return f"a tensor {list(part.form.shape)}"
        return "what each call makes anew"


def trace(
    function: Callable[..., Any],
    arguments: Arguments,
    dynamic: frozenset[int],
    carried: frozenset[str] = frozenset(),
) -> Traced:
    """One trace of a step, or two: see `host_random`."""
    try:
        return Traced(function, arguments, dynamic, carried)
    except MaybeAnotherThread:
        token = OWN.set(True)
        try:
            return Traced(function, arguments, dynamic, carried)
        finally:
            OWN.reset(token)


class Traced:
    """One trace of a step; making one runs the step's Python and changes nothing.

    Attributes:
        jaxpr: what it computes, from constants.
        sources: where each constant comes from in later calls.
        slots: the sources of captured storages.
        forms: the forms of the outputs.
        results, result_tree: what the step returns.
        grads: (leaf, template of its new gradient or None).
        host_writes: (CPU tensor from outside, where its new value comes from).
        switched: (tensor from outside, the ``requires_grad`` that the step leaves it with).
        left: (storage that the step made and left somewhere unknown, output).
        effects: what its Python changed.
        replaced: places outside of it whose tensors it replaces by others, as messages call them.
        counted: likewise those in which it puts other numbers, strings or ``None``.
        watch: what its Python can read.
        carried: the places that its values are taken from like arguments.
        call: the arguments, with these.
        history: how its results depend on tensors that require grad, or None.
        reads: per mark of the history's where the memory is (a source, templates, a CPU tensor, or
            which argument it is), and through which tensor from outside it was read.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        dynamic: frozenset[int],
        carried: frozenset[str] = frozenset(),
    ) -> None:
        caller = arguments.given
        arguments = caller.without_history()
        self._cut = [
            mine
            for mine, theirs in zip(arguments.tensors, caller.tensors, strict=True)
            if mine is not theirs
        ]
        self.replaced: set[str] = set()
        self.counted: set[str] = set()
        if parametrize._cache_enabled:
            raise DataDependentError(
                "a compiled step inside of torch.nn.utils.parametrize.cached(): the cache would "
                "keep what exists only while the step is traced; enter it inside of the step"
            )
        self._roots: list[tuple[str, Any]] = [
            ("the step", function),
            *arguments.objects,
            *arguments.classes(),
        ]
        self.names_of_carried = carried
        watch = self.look_again()
        self.carried = _each_once(watch.carried)
        call, now = caller.carrying(self.carried), arguments.carrying(self.carried)
        assert call is not None and now is not None  # the watch has looked at each
        self.call, arguments = call, now
        self.dynamic = dynamic | arguments.carried_numbers()
        surroundings = Surroundings(watch)
        self.trace = trace = StepTrace([*_leaves(watch), *arguments.tensors])
        self.schedulers = DeferredSchedulers()
        known = {key: [dict(g) for g in o.param_groups] for key, o in watch.optimizers.items()}
        self.hooks = OptimizerHooks(trace, known, watch.settings, self.schedulers)
        self.host = trace.host = HostOperations(trace, arguments)
        self.history: History | None = None

        def traced() -> list[Any]:
            numbers = self._numbers(trace, arguments)
            args, kwargs = arguments.with_numbers(numbers)
            for place, value in arguments.with_carried_numbers(self.carried, numbers):
                surroundings.plant(place, value)
                self.hooks.carried.add(place.where())
            del numbers
            computing = MathOfNumbers() if self.dynamic else contextlib.nullcontext()
            with self.host, self.schedulers, self.hooks, CumulativeNorms(), computing:
                out = _call(function, args, kwargs)
            if arguments.changed(args, kwargs):
                raise DataDependentError(
                    "the step puts something into a list or dict that it was given as an argument, "
                    "which would happen when it is traced, not in every call; return it instead"
                )
            result = [out]
            del out, args, kwargs
            return self._outputs(surroundings, arguments, watch, result)

        was_compiling = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            with (
                none_drawn(watch.random_sources),
                _nothing_consumed(watch),
                NewObjects() as new,
                _unseen_by_checkpoint(),
                _context.active(trace),
                torch.autograd.set_multithreading_enabled(False),
                jax.enable_x64(True),
            ):
                self._made = MadeObjects(new)
                closed = jax.make_jaxpr(traced)()
                del self._made
                if any(number() is not None for number in trace.python_numbers):
                    raise NumberLeft("the step leaves a number where it isn't seen")
        except BaseException:
            self._abandon(surroundings)
            raise
        finally:
            torch.compiler._is_compiling_flag = was_compiling
            self._undo_trace()
        try:
            free = {id(t): i for i, t in enumerate(arguments.tensors) if id(t) not in watch.tensors}
            for tensor in self._cut:
                outside = trace.outside.get(id(tensor))
                if outside is not None:
                    outside.is_leaf = False  # as it is for the caller
            leaf_of = {
                id(leaf.grad): leaf
                for leaf in trace.outside.values()
                if leaf.grad is not None and id(leaf.grad) not in watch.tensors
            }
            self.outside = [
                o
                for o in trace.outside.values()
                if o.keep(free.get(id(o.get())), leaf_of.get(id(o.get())))
            ]
            # Others, of which the step's Python may have read `requires_grad`.
            used = set(map(id, trace.outside.values()))
            others = [(t, o) for t, o in trace.before.values() if id(o) not in used]
            self.others = [
                o
                for t, o in others
                if o.storage is not None and o.keep(free.get(id(t))) and o.index is None
            ]
            stepped, before = list(self.hooks.stepped.values()), len(self._roots)
            self._roots += [(s.name, s) for s in stepped]  # with the state that the step has made
            for key, optimizer in watch.optimizers.items():
                if "state" in watch.reads and key not in self.hooks.stepped:
                    self._roots.append((f"{type(optimizer).__name__}.state", optimizer.state))
            self.watch = watch if len(self._roots) == before else self.look_again()
            self.frame = trace.frame
            self.jaxpr = closed.jaxpr
            self._collect_inputs(trace, arguments, closed.consts)
        except BaseException:
            self._abandon(surroundings)
            raise

    def look_again(self) -> Watch:
        """What the step's Python can read now."""
        return Watch(self._roots, self.names_of_carried)

    def carries(self, watch: Watch) -> bool:
        """Whether ``watch`` takes the values of the same places as this trace."""
        return {c.where() for c in watch.carried} == {c.where() for c in self.carried}

    @interrupts.atomic
    def _abandon(self, surroundings: Surroundings) -> None:
        self.hooks.undo()
        surroundings.restore()  # nobody keeps a tensor that has no value
        self._end_numbers()

    def _end_numbers(self) -> None:
        """What is left of the numbers of a failed trace: their values, and nothing in caches, from
        which code outside of a step might get one."""
        numbers = self.trace.python_numbers
        if any(number() is not None for number in numbers):
            for cache in filter(_is_users_cache, gc.get_objects()):
                cache.cache_clear()
        for number in [alive for alive in map(operator.call, numbers) if alive is not None]:
            number.node.end()

    @interrupts.atomic
    def _undo_trace(self) -> None:
        self.trace.undo()
        self.host.undo()

    @interrupts.atomic
    def undo(self, error: BaseException | None = None) -> None:
        """Take back what the optimizers made in the trace; what else it has left somewhere has no
        value, because of ``error``."""
        self.hooks.undo()
        for storage, _ in self.left:
            storage.give_up(error or RuntimeError("the step was traced, but not run"))

    def _numbers(self, trace: StepTrace, arguments: Arguments) -> dict[int, Any]:
        names = arguments.names() if self.dynamic else []
        found = {}
        for i in sorted(self.dynamic):
            read = functools.partial(_number_of, i)
            found[i] = like_a_number(trace.number(read, arguments.numbers[i], names[i]))
        return found

    # --- outputs ------------------------------------------------------------------------------

    def _outputs(
        self, surroundings: Surroundings, arguments: Arguments, watch: Watch, result: list[Any]
    ) -> list[Any]:
        """Called at the end of the trace: the arrays that the program returns."""
        trace = self.trace
        self.hooks.check()
        if any(tensor.grad is not None for tensor in self._cut):
            raise DataDependentError(
                "backward() in the compiled step reaches an argument that was computed before it: "
                "it would go on there when the step is traced, and in no later call; compute that "
                "inside of the step, too, or call backward() outside, on the step's result"
            )
        if self.schedulers.calls and watch.reads & SCHEDULE:
            raise DataDependentError(
                f"the step calls {type(self.schedulers.calls[0][0]).__name__}.step(), which a "
                "compiled step puts off until its program has run, and reads "
                f"{sorted(watch.reads & SCHEDULE)}, which would be the value from before: read it "
                "outside of the step"
            )
        for outside in trace.outside.values():
            changed = outside.changed(but_requires_grad=True)
            if changed is not None:
                raise DataDependentError(
                    f"the step changes {changed}: that would happen when it is traced, not in "
                    "every call; do it outside of the compiled step"
                )
        self._arrays: list[Any] = []
        self.forms: list[Form] = []
        flat, self.result_tree = self._made.flatten(result.pop())
        history = History(trace)
        made = Made(self, arguments, watch, history)
        self.results = list(map(made.result, flat))
        self._effects(surroundings, watch, made)
        self.random_operations = trace.random_operations()
        self.grads: list[tuple[Any, Template | None]] = []
        for outside in trace.outside.values():
            leaf = outside.get()
            if leaf is None or not outside.takes_gradient:
                continue
            grad = leaf.grad
            if grad is outside.grad and not outside.cleared:
                continue
            template = None if grad is None else made.gradient(grad)
            self.grads.append((outside, template))
            leaf.grad = outside.grad
        leaf = grad = None
        made.finish()
        self._shown = made.shown
        self.host_writes = self.host.writes()
        self.switched = trace.switched()
        if history.outputs and history.inputs:
            if self.switched:
                raise DataDependentError(
                    "the step leaves a parameter with another requires_grad than it found, and "
                    "returns a result with a history: detach the result, or switch it back"
                )
            history.differentiate(self, set(made.shown))
            self.history = history
        del flat, made, history
        gc.collect()  # what only cycles still hold isn't left behind
        self.captured = sorted(
            (c for c in trace.captured if c.first_use is not None),
            key=lambda c: c.first_use,  # type: ignore[arg-type, return-value]
        )
        self._written: dict[int, int] = {}
        counters: dict[tuple[int, int], int] = {}
        for captured in self.captured:
            storage = captured.storage
            if not captured.written or storage is None:
                continue
            shared = id(captured.array), id(storage.array)
            if trace.is_counter(captured.array) and shared in counters:
                self._written[id(captured)] = counters[shared]
                continue
            index = self.emit(logical(storage.array, storage.form), storage.form.reduced())
            self._written[id(captured)] = counters[shared] = index
        self.left: list[tuple[Storage, int]] = []
        for storage in trace.left_behind():
            if isinstance(storage.array, jax.core.Tracer):
                form = storage.form.reduced()
                self.left.append((storage, self.emit(logical(storage.array, storage.form), form)))
        arrays = self._arrays
        del self._arrays
        return arrays

    def emit(self, array: Any, form: Form) -> int:
        """Make an array an output; its index."""
        self._arrays.append(form.physical(array))
        self.forms.append(form)
        return len(self._arrays) - 1

    def template(self, tensor: Any) -> Template:
        """An output that is the tensor's value; memory of its own."""
        form = (tensor._form if tensor._steps else tensor._storage_.form).reduced()
        return Template(self.emit(logical_value(tensor), form), form)

    def _effects(self, surroundings: Surroundings, watch: Watch, made: Made) -> None:
        """What the step's Python has changed, as what each call makes anew; the changes are
        undone."""
        trace = self.trace
        built: dict[int, tuple[Any, Any]] = {}

        def is_new(value: Any) -> bool:
            return isinstance(value, Ours) and trace.owns(value._storage_)

        def convert(value: Any) -> Any:
            known = built.get(id(value))
            if known is None:
                known = built[id(value)] = value, self._built(value, surroundings, made)
            return known[1]

        self.effects: list[Effect] = surroundings.effects()
        for effect in self.effects:
            if effect.place.container in watch.inside:
                raise DataDependentError(
                    f"the step changes {effect.place.path}, a {type(effect.place.owner).__name__} "
                    "that it finds in another place in every call (it puts another one there): "
                    "either change it, or replace it"
                )
            self._find_replaced(effect)
            check_replayable(effect, is_new)
            effect.convert(convert)
        surroundings.restore()

    def _built(self, value: Any, surroundings: Surroundings, made: Made) -> Any:
        """How later calls make what the step leaves somewhere; the value itself where it is the
        same in each."""
        leaves, tree = self._made.flatten(value, is_leaf=surroundings.holds)
        parts = list(map(made.result, leaves))
        if tree.is_leaf() and isinstance(parts[0], Existing):
            return value
        return Built(parts, tree)

    def _goes_on(self, tensor: torch.Tensor) -> bool:
        """Whether a backward pass of the next call would come to what this one has computed."""
        if not tensor.requires_grad:
            return False
        made = isinstance(tensor, Ours) and self.trace.owns(tensor._storage_)
        return made or not tensor.is_leaf

    def _find_replaced(self, effect: Effect) -> None:
        """Note where a step has put other tensors in place of those that were there, for its next
        call.

        Raises:
            DataDependentError: the next call would go on with their history.
        """
        for key, before in effect.before.items():
            after, name = effect.after[key], effect.place.label(key)
            tensors = tensors_in(before)
            carried = name in self.names_of_carried
            if not (is_state(before) and (carried or effect.place.guarded)):
                continue
            if effect.grows():  # it is another place in every call
                continue
            if not tensors:
                if not carried and is_state(after, symbolic=True):
                    self.counted.add(name)
                continue
            used = [t for t in tensors if isinstance(t, Ours) and self.trace.uses(t._storage_)]
            if used and any(self._goes_on(t) for t in tensors_in(after)):
                raise DataDependentError(
                    f"the step reads {name}, and leaves there a tensor that has a history (or "
                    "requires grad), which its next call would go on with: detach it "
                    f"({name} = new.detach()), or give it as an argument and return the new one"
                )
            if not carried and tensors_in(after):
                self.replaced.add(name)

    # --- inputs -------------------------------------------------------------------------------

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
        found = {id(t._storage_) for t, _ in self.watch.tensors.values() if isinstance(t, Ours)}
        self.free_arguments = tuple(
            i for storage, i in of_arguments.items() if storage not in found
        )
        self.bound_arguments = tuple(
            (i, arguments.tensors[i]._storage_)
            for storage, i in of_arguments.items()
            if storage in found
        )
        self.slots: list[Source] = []
        self.reads: list[tuple[Any, Any]]
        counters: dict[int, list[Captured]] = {}
        for captured in self.captured:
            if captured.storage is None:
                source = Source("fill", captured)
            elif trace.is_counter(captured.array):
                counters.setdefault(id(captured.array), []).append(captured)
                continue
            else:
                storages: tuple[Storage, ...] = (captured.storage,)
                key = id(captured.storage)
                if key in of_arguments and key not in found:
                    source = Source("argument", of_arguments[key], storages, captured.form)
                elif key in grads:
                    source = Source("grad", grads[key], storages, captured.form)
                else:
                    source = Source("state", None, storages, captured.form)
                if id(captured) in self._written:
                    source.writes.append((self._written[id(captured)], storages))
            by_id[id(captured.array)] = source
            self.slots.append(source)
        for group in counters.values():
            alive = [(c, c.storage) for c in group if c.storage is not None]
            storages = tuple(storage for _, storage in alive)
            source = Source("state", None, storages, group[0].form)
            if not alive:
                source = Source("fill", group[0])
            parts: dict[int, list[Storage]] = {}
            for captured, storage in alive:
                if id(captured) in self._written:
                    parts.setdefault(self._written[id(captured)], []).append(storage)
            source.writes = [(index, tuple(members)) for index, members in parts.items()]
            by_id[id(group[0].array)] = source
            self.slots.append(source)
        for _, array, host in trace.host_arrays.values():
            by_id[id(array)] = (
                Source("host", host) if host is not None else Source("constant", array)
            )
        for i, number in enumerate(trace.numbers):
            by_id[id(number.array)] = Source("number", i)
        by_id[id(trace.rng_words)] = Source("rng", None)
        if self.history is not None:
            for i, array in enumerate(self.history.cotangents):
                by_id[id(array)] = Source("cotangent", i)
        self.sources = [by_id.get(id(const)) or Source("constant", const) for const in constants]
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

    # --- for the audit ------------------------------------------------------------------------

    def signature(self) -> dict[str, Any]:
        """What a later trace must have in common with this one, for the program to be the step."""
        return {
            "the operations": str(self.jaxpr),
            "the tensors that it uses": [s.signature() for s in self.sources],
            "the layouts of its results": [form.placed(self.frame) for form in self.forms],
            "what it returns": (
                self.result_tree,
                [
                    (type(r).__name__, getattr(r, "index", None) or repr(getattr(r, "value", None)))
                    for r in self.results
                ],
            ),
            "the gradients that it leaves": [
                (id(outside.get()), None if t is None else (t.index, t.form.placed(self.frame)))
                for outside, t in self.grads
            ],
            "what its Python changes": [e.name() for e in self.effects],
        }


def _each_once(carried: list[Carried]) -> list[Carried]:
    return list({one.where(): one for one in carried}.values())


class Made:
    """How later calls make the tensors that a step gives away: its results, and what it leaves in
    attributes and the like.

    Attributes:
        shown: the memory that the caller gets to see, by id: the templates with it.
    """

    def __init__(
        self, traced: Traced, arguments: Arguments, watch: Watch, history: History
    ) -> None:
        self._traced, self._trace = traced, traced.trace
        self._arguments, self._watch, self._history = arguments, watch, history
        self.shown: dict[int, list[Template]] = {}
        self._wholes: dict[int, Template] = {}
        self._known: dict[int, tuple[Any, Any]] = {}
        self._leaves: list[Any] = []

    def result(self, value: Any) -> Any:
        """How later calls make one of the step's results."""
        for i, tensor in enumerate(self._arguments.tensors):
            if tensor is value:
                return GivenBack(i)
        if is_number(value):
            return Computed(value.node)
        if isinstance(value, Ours):
            return self.tensor(value)
        host = self._traced.host
        if isinstance(value, torch.Tensor) and host.made(value):
            return Host(host.use(value), value)
        return Existing(value)

    def tensor(self, value: Any) -> Any:
        """The same of a tensor on the devices."""
        known = self._known.get(id(value))
        if known is None:
            make = self._made_by_the_step if self._trace.owns(value._storage_) else self._outside
            known = self._known[id(value)] = value, make(value)
        return known[1]

    def gradient(self, grad: Any) -> Template:
        """The same of what a leaf's ``.grad`` is when the step ends."""
        known = self._known.get(id(grad))
        if known is not None and isinstance(known[1], Template):
            return known[1]
        whole = None if grad._steps else self._wholes.get(id(grad._storage_))
        if whole is not None:
            return whole
        form = grad._form.reduced()
        return Template(self._traced.emit(logical_value(grad), form), form)

    def finish(self) -> None:
        """When all are known."""
        self._history.check_leaves(self._leaves)
        for templates in self.shown.values():
            if len(templates) > 1:
                for template in templates:
                    template.refuses = (
                        "results of a compiled step that are one memory under torch, but copies "
                        "here, because they aren't torch's own views of each other (to_local(), a "
                        "torch.autograd.Function that gives back its input): clone() the one that "
                        "you write to"
                    )

    # --- memory of the step's ------------------------------------------------------------------

    def _made_by_the_step(self, value: Any) -> Any:
        storage = value._storage_
        if value.requires_grad and value.is_leaf:
            return self._leaf(value)
        if value.requires_grad:
            root = value._base if value._is_view() else value
            further = _further(value, root)
            if further is None or not is_view_by_torch(value, root):
                root, further = value, ()
            template = self._with_history(root)
            return Seen(template, further, False, value) if root is not value else template
        if not _is_plain(value) and value._steps:
            return self._copy(value)
        # What it is a view of to autograd; or itself.
        root = value._base if value._is_view() else None if value._steps else value
        if root is not None and (root._storage_ is not storage or root._steps):
            root = None
        if root is not None and id(storage) not in self._wholes:
            self._known[id(root)] = root, self._whole(storage)
        whole = self._whole(storage)
        connected = root is not None and self._known.get(id(root), (None, None))[1] is whole
        if connected and root is value:
            return whole
        return Seen(whole, value._steps, not connected, value)

    def _whole(self, storage: Storage) -> Template:
        template = self._wholes.get(id(storage))
        if template is None:
            form = storage.form.reduced()
            index = self._traced.emit(logical(storage.array, storage.form), form)
            template = self._wholes[id(storage)] = Template(index, form)
            self.shown.setdefault(id(storage), []).append(template)
        return template

    def _copy(self, value: Any) -> Template:
        template = self._traced.template(value)
        self.shown.setdefault(id(value._storage_), []).append(template)
        return template

    def _with_history(self, root: Any) -> Template:
        known = self._known.get(id(root))
        if known is not None and isinstance(known[1], Template):
            return known[1]
        own = root._steps or root._is_view()
        template = self._copy(root) if own else self._whole(root._storage_)
        self._known[id(root)] = root, template
        if self._history.takes(root):
            self._history.add(template, root)
        return template

    def _leaf(self, value: Any) -> Template:
        template = self._copy(value)
        template.is_leaf = True
        template.is_parameter = isinstance(value, torch.nn.Parameter)
        self._leaves.append(value)
        if value.grad is not None:
            template.grad = self._traced.template(value.grad)
        return template

    # --- memory from outside -------------------------------------------------------------------

    def _outside(self, value: Any) -> Any:
        if id(value) in self._watch.tensors or (value.requires_grad and value.is_leaf):
            return Existing(value)
        for outside in self._trace.outside.values():
            leaf = outside.get()
            if leaf is not None and outside.takes_gradient and leaf.grad is value:
                return Gradient(outside)
        found = self._base(value)
        if found is None and value.requires_grad:
            # A function of the user's has given back its input, and has a gradient of its own.
            template = self._traced.template(value)
            template.refuses = _REFUSES_COPY
            if self._history.takes(value):
                self._history.add(template, value)
            return template
        of, base = found or (value, value)
        detached = not value.requires_grad and (
            base.requires_grad
            or not (value._is_view() and any(value._base is t for t in (base, base._base)))
        )
        return Seen(of, value._steps[len(base._steps) :], detached, value)

    def _base(self, value: Any) -> tuple[Any, Any] | None:
        """The tensor from outside that shows the same memory, or most of it: what finds it in a
        later call, and itself."""
        candidates = [(i, t) for i, t in enumerate(self._arguments.tensors) if isinstance(t, Ours)]
        kept = (outside.get() for outside in self._trace.outside.values())
        candidates += [(t, t) for t in kept if isinstance(t, Ours)]
        best = None
        for of, tensor in candidates:
            if tensor is value or _further(value, tensor) is None:
                continue
            if value.requires_grad and not (
                tensor.requires_grad and is_view_by_torch(value, tensor)
            ):
                continue
            if best is None or len(tensor._steps) > len(best[1]._steps):
                best = of, tensor
        return best


_REFUSES_COPY = (
    "a result of a compiled step that is a copy of a tensor from outside, where torch has the same "
    "memory (of a torch.autograd.Function that gives back its input): clone() it first"
)


def _further(view: Any, base: Any) -> tuple[Step, ...] | None:
    """The steps from ``base`` to ``view``, or None if it doesn't show more of the same memory."""
    count = len(base._steps)
    if base._storage_ is not view._storage_ or view._steps[:count] != base._steps:
        return None
    return view._steps[count:]


@interrupts.interruptible
def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _is_users_cache(value: Any) -> bool:
    """Whether it is a function under ``functools.cache`` that no library has."""
    return type(value) is _CACHED and not is_library(getattr(value, "__module__", None))


_CACHED = type(functools.cache(lambda: None))


def _number_of(index: int, arguments: Arguments) -> int | float:
    return arguments.numbers[index]


# What a scheduler's step changes.
SCHEDULE = frozenset({"get_last_lr", "_last_lr", "last_epoch", "_step_count"})


def _is_plain(view: Any) -> bool:
    """Whether a view's memory can be a result of the program as it is."""
    form = view._storage_.form
    return not form.unreduced and all(isinstance(step, ViewStep) for step in view._steps)


def _leaves(watch: Watch) -> list[torch.Tensor]:
    """The tensors that the step is known to reach."""
    found = [tensor for tensor, _ in watch.tensors.values()]
    for optimizer in watch.optimizers.values():
        for group in optimizer.param_groups:
            found += group["params"]
    return found


@contextlib.contextmanager
def _unseen_by_checkpoint() -> Iterator[None]:
    """Tensors that the trace saves aren't saved through the hooks of a ``torch.utils.checkpoint``
    around the call: it counts them, and finds less when it calls the step again."""
    autograd = torch._C._autograd
    hooks = autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__ != torch.utils.checkpoint.__name__:
        yield
        return
    autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        autograd._push_saved_tensors_default_hooks(*hooks)


@contextlib.contextmanager
def _nothing_consumed(watch: Watch) -> Iterator[None]:
    """Refuse a step that takes elements from an iterator, or writes to an array of NumPy's: that
    would happen once.

    Raises:
        DataDependentError: it has taken some.
    """
    iterators = watch.consumed
    before = [_iterator_state(iterator) for iterator, _ in iterators]
    yield
    for value, content in watch.arrays:
        if content_of(value) != content:
            raise DataDependentError(
                f"the step writes to a {type(value).__name__} outside of it, on the host: that "
                "would happen when it is traced, not in every call; use a tensor on the device"
            )
    for (iterator, path), state in zip(iterators, before, strict=True):
        if _iterator_state(iterator) != state or (state is UNKNOWN and watch.takes_next):
            raise DataDependentError(
                f"the step takes the next element of {path}, a {type(iterator).__name__}: that "
                "would happen when it is traced, not in every call; take it outside, and pass it "
                "as an argument"
            )


UNKNOWN = object()


def _iterator_state(iterator: Any) -> Any:
    """How far an iterator has come, without moving it."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else frame.f_lasti
    hint = getattr(iterator, "__length_hint__", None)
    if hint is not None:
        return hint()
    yielded = getattr(iterator, "_num_yielded", None)  # a DataLoader's
    if yielded is not None:
        return yielded
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.14 can't copy or pickle them any more
        try:
            parts = iterator.__reduce__()
        except TypeError:
            return UNKNOWN
    if isinstance(parts, str):
        return UNKNOWN
    states = [
        _iterator_state(x) if hasattr(x, "__next__") else repr(x)
        for part in parts[1:]
        if isinstance(part, tuple)
        for x in part
    ]
    return UNKNOWN if UNKNOWN in states else states
