"""One trace of a step: its jaxpr, and where each input comes from and each output goes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import jax
import torch
from torch.nn.utils import parametrize

from xla_dtensor.base import executor, interrupts
from xla_dtensor.base.numbers.math_of_numbers import MathOfNumbers
from xla_dtensor.base.numbers.python_numbers import like_a_number
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.asked_ids import AskedIds
from xla_dtensor.compilation.call.recipes import Template
from xla_dtensor.compilation.code.garbage import NewObjects
from xla_dtensor.compilation.code.host_random import none_drawn
from xla_dtensor.compilation.code.installed import Recorder
from xla_dtensor.compilation.code.names import describe
from xla_dtensor.compilation.code.threads import none_started
from xla_dtensor.compilation.objects.carried import each_once
from xla_dtensor.compilation.objects.global_state import active_modes, saving_hooks
from xla_dtensor.compilation.objects.remade import MadeObjects
from xla_dtensor.compilation.recorded.history import History
from xla_dtensor.compilation.recorded.host_ops import HostOperations
from xla_dtensor.compilation.recorded.output_recipes import Made
from xla_dtensor.compilation.recorded.traced_effects import TracedEffects
from xla_dtensor.compilation.trace.checkpoint_saving import unseen_by_checkpoint
from xla_dtensor.compilation.trace.norms import CumulativeNorms
from xla_dtensor.compilation.trace.numbers_of_trace import NumberLeft, end_numbers
from xla_dtensor.compilation.trace.optimizers import OptimizerHooks
from xla_dtensor.compilation.trace.schedulers import DeferredSchedulers
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.compilation.trace.stepped import ReadState
from xla_dtensor.compilation.watch.effects import Surroundings, in_context_of_its_own
from xla_dtensor.compilation.watch.iterators import nothing_consumed
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.dispatch.positions import Positions
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.read import logical_value
from xla_dtensor.forms.storage import Storage
from xla_dtensor.tensors.base import grad_of, set_grad_of


class Traced(TracedEffects):
    """One trace of a step; making one runs the step's Python and changes nothing.

    Attributes:
        jaxpr: what it computes, from constants.
        sources: where each constant comes from in later calls.
        slots: the sources of captured storages.
        forms: the forms of the outputs.
        judges, judged: what judges by which output whether what must hold does.
        results, result_tree: what the step returns.
        grads: (leaf, template of its new gradient or None).
        host_writes: (CPU tensor from outside, where its new value comes from).
        switched: (tensor from outside, the ``requires_grad`` that the step leaves it with).
        left: (storage that the step made and left somewhere unknown, output).
        effects: what its Python changed.
        replaced: the names in messages of places outside of it whose tensors it replaces by others.
        counted: likewise those in which it puts other numbers, strings or ``None``.
        kept: the attributes that are compared though its Python only assigns them (`Watch.keep`).
        of_others: the places that another thread has changed during the trace, likewise.
        watch: what its Python can read.
        asked: the arguments whose ``id`` it has asked for, which are these: (which, object).
        carried: the places that its values are taken from like arguments.
        fixed: whether its Python found optimizers' hyperparameters as they were.
        unforeseen: whether it has run code of installed packages that may have changed what the
            trace didn't know of, so that it has to be made again.
        history: how its results depend on tensors that require grad, or None.
        reads: per mark of the history's where the memory is (a source, templates, a CPU tensor, or
            which argument it is), and through which tensor from outside it was read.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        dynamic: frozenset[int],
        carried: frozenset[str],
        positions: Positions | None,
        recorder: Recorder,
        fixed: bool,
        unmet: Sequence[FunctionType],
    ) -> None:
        caller = arguments.given
        arguments = caller.without_history()
        self._cut = [
            mine
            for mine, theirs in zip(arguments.tensors, caller.tensors, strict=True)
            if mine is not theirs
        ]
        self.kept: frozenset[str] = frozenset()
        self.replaced: set[str] = set()
        self.counted: set[str] = set()
        if parametrize._cache_enabled:
            raise DataDependentError(
                "a compiled step inside of torch.nn.utils.parametrize.cached(): the cache would "
                "keep what exists only while the step is traced; enter it inside of the step"
            )
        self._roots: list[tuple[str, Any]] = [
            ("the step", function),
            *arguments.roots(),
            *active_modes(),
            *saving_hooks(),
            *((f"{describe(function)}, which torch calls", function) for function in unmet),
        ]
        self.names_of_carried = carried
        self._executed, self.fixed = recorder.executed(), fixed
        watch = Watch(self._roots, carried, self._executed, expecting=True, fixed=fixed)
        reached, names = watch.reached, watch.names
        reads = names.reads
        caller.check_reads(reads)
        self.carried = each_once(reached.carried)
        call, now = caller.carrying(self.carried), arguments.carrying(self.carried)
        assert call is not None and now is not None  # the watch has looked at each
        self._call, arguments = call, now
        self.dynamic = dynamic | arguments.carried_numbers()
        if self.dynamic and names.asks_types:
            raise NumberLeft("the step asks for the type() of numbers")
        watch.remember_caches()
        surroundings = Surroundings(watch, arguments)
        self.trace = trace = StepTrace([*watch.leaves, *arguments.tensors])
        trace.positions = positions
        self.schedulers = DeferredSchedulers()
        recorder.feeds = watch.feeds_users
        self.hooks = OptimizerHooks(
            trace,
            reached.optimizers.values(),
            reached.settings,
            self.schedulers,
            names.feeds,
            names.feeds_groups,
            surroundings.planted,
        )
        self.host = trace.host = HostOperations(trace, arguments, names.asks_types)
        self.history: History | None = None
        given = set(map(id, arguments.tensors))
        ids = AskedIds(arguments, names.calls("id"))

        def traced() -> list[Any]:
            numbers = self._numbers(trace, arguments)
            args, kwargs = arguments.for_trace(numbers, surroundings.put, reads)
            for place, value in arguments.with_carried_numbers(self.carried, numbers):
                surroundings.plant(place, value)
            del numbers
            computing = MathOfNumbers()
            with self.host, self.schedulers, self.hooks, CumulativeNorms(), computing, ids:
                out = _call(function, args, kwargs)
            if arguments.is_spoilt():
                raise DataDependentError(
                    "the step writes to an array that it was given as an argument, or changes an "
                    "object there that torch's pytree takes apart, which would happen when it is "
                    "traced, not in every call; return it instead"
                )
            result = [out]
            del out, args, kwargs
            return self._outputs(surroundings, arguments, watch, result)

        was_compiling = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            try:
                with (
                    none_drawn(reached.random_sources),
                    nothing_consumed(watch),
                    none_started(trace, reached.shared),
                    NewObjects() as new,
                    unseen_by_checkpoint(),
                    executor.running(trace),
                    torch.autograd.set_multithreading_enabled(False),
                    jax.enable_x64(True),
                    recorder.recording(names.meets_installed, reached.codes),
                ):
                    self._made = MadeObjects(
                        new,
                        surroundings.holds,
                        lambda t: id(t) not in reached.tensors and id(t) not in given,
                        surroundings.memory(),
                    )
                    closed = in_context_of_its_own(jax.make_jaxpr(traced))
                    arguments.end_trace()
                    if any(number() is not None for number in trace.python_numbers):
                        raise NumberLeft("the step leaves a number where it isn't seen")
            finally:
                torch.compiler._is_compiling_flag = was_compiling
                self._undo_trace()
            numbered = enumerate(arguments.tensors)
            free = {id(t): i for i, t in numbered if id(t) not in reached.tensors}
            for tensor in self._cut:
                outside = trace.outside.get(id(tensor))
                if outside is not None:
                    outside.is_leaf = False  # as it is for the caller
            leaf_of = {
                id(leaf.grad): leaf
                for leaf in trace.outside.values()
                if leaf.grad is not None and id(leaf.grad) not in reached.tensors
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
            self._executed = recorder.executed()
            self.unforeseen = recorder.grown and not (
                Watch(self._roots, carried, self._executed, True, fixed=fixed).keys_of_places()
                <= watch.keys_of_places()
            )
            stepped, before = list(self.hooks.stepped.values()), len(self._roots)
            self._roots += [(s.name, s) for s in stepped]  # with the state that the step has made
            for key, optimizer in reached.optimizers.items():
                if "state" in names.attributes and key not in self.hooks.stepped:
                    self._roots.append((type(optimizer).__name__, ReadState(optimizer)))
            watch.check()
            self._roots += watch.made_meanwhile()
            same = len(self._roots) == before and not names.meets_installed
            self.watch = watch if same else self.look_again(watch)
            self.watch.remember_caches()
            objects = call.objects()
            self.asked = [(i, objects[i]) for i in sorted(ids.found)]
            self.frame = trace.frame
            self.jaxpr = closed.jaxpr
            self._collect_inputs(trace, arguments, closed.consts)
        except BaseException:
            self._abandon(surroundings)
            raise

    def take_call(self) -> Arguments:
        """The arguments, with what is carried; once, since a program doesn't keep them alive."""
        call = self._call
        del self._call
        return call

    def look_again(self, known: Watch | None = None) -> Watch:
        """What the step's Python can read now."""
        names = self.names_of_carried
        watch = Watch(self._roots, names, self._executed, known=known, fixed=self.fixed)
        watch.keep(self.kept)
        return watch

    def carries(self, watch: Watch) -> bool:
        """Whether ``watch`` takes the values of the same places as this trace."""
        mine, now = ({c.name: c.where() for c in w} for w in (self.carried, watch.reached.carried))
        return mine == now

    @interrupts.atomic
    def _abandon(self, surroundings: Surroundings) -> None:
        self.hooks.undo()
        surroundings.restore()  # nobody keeps a tensor that has no value
        end_numbers(self.trace.python_numbers)
        self.trace.let_go()

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
        names = arguments.names_of_numbers() if self.dynamic else {}
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
        if any(grad_of(tensor) is not None for tensor in self._cut):
            raise DataDependentError(
                "backward() in the compiled step reaches an argument that was computed before it: "
                "it would go on there when the step is traced, and in no later call; compute that "
                "inside of the step, too, or call backward() outside, on the step's result"
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
        self.effects = surroundings.effects()
        self.of_others = surroundings.others
        made.histories([*flat, *self._left_in_places()])
        self.results = list(map(made.result, flat))
        self._effects(surroundings, watch, made)
        self.hooks.take_numbers()
        self.random_operations = trace.random_operations()
        self.grads: list[tuple[Any, Template | None]] = []
        # A gradient that is a view of a captured tensor adds that to those outside.
        for outside in list(trace.outside.values()):
            leaf = outside.get()
            if leaf is None or not outside.takes_gradient:
                continue
            grad = grad_of(leaf)
            if grad is outside.grad and not outside.cleared:
                continue
            template = None if grad is None else made.gradient(grad)
            self.grads.append((outside, template))
            set_grad_of(leaf, outside.grad)
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
            history.differentiate(self.template, set(made.shown))
            self.history = history
        del flat, made, history, self._made
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
        # A copy of what is captured, as some optimizers keep one of each parameter, has that array.
        used = {id(captured.array) for captured in self.captured}
        for storage in trace.left_behind():
            if isinstance(storage.array, jax.core.Tracer) or id(storage.array) in used:
                form = storage.form.reduced()
                self.left.append((storage, self.emit(logical(storage.array, storage.form), form)))
        self.judges, self.judged = trace.judged(self.emit)
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
        form = tensor._form.reduced()
        return Template(self.emit(logical_value(tensor), form), form)


@interrupts.interruptible
def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _number_of(index: int, arguments: Arguments) -> int | float:
    return arguments.numbers[index]
