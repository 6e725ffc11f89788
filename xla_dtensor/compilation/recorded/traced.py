"""One trace of a step: its jaxpr, where each input comes from, and where each output goes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import jax
import torch

from xla_dtensor.base import executor, interrupts, jax_private, torch_private
from xla_dtensor.base.numbers.math_of_numbers import MathOfNumbers
from xla_dtensor.base.numbers.python_numbers import like_a_number
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.asked_ids import AskedIds
from xla_dtensor.compilation.call.buckets import Cuts
from xla_dtensor.compilation.code.garbage import NewObjects
from xla_dtensor.compilation.code.host_random import none_drawn
from xla_dtensor.compilation.code.installed import CodeRecorder, users_code
from xla_dtensor.compilation.code.names import describe
from xla_dtensor.compilation.code.threads import none_started
from xla_dtensor.compilation.objects.carried import each_once
from xla_dtensor.compilation.objects.flatten import MadeObjects
from xla_dtensor.compilation.objects.global_state import active_modes, saving_hooks
from xla_dtensor.compilation.recorded.history import History
from xla_dtensor.compilation.recorded.host_ops import HostOperations
from xla_dtensor.compilation.recorded.output_recipes import OutputRecipes
from xla_dtensor.compilation.recorded.traced_effects import TracedEffects
from xla_dtensor.compilation.recorded.traced_inputs import TracedInputs
from xla_dtensor.compilation.recorded.traced_outputs import TracedOutputs
from xla_dtensor.compilation.trace.checkpoint_saving import unseen_by_checkpoint
from xla_dtensor.compilation.trace.norms import CumulativeNorms
from xla_dtensor.compilation.trace.numbers_of_trace import NumberLeft, end_numbers
from xla_dtensor.compilation.trace.optimizers import OptimizerHooks
from xla_dtensor.compilation.trace.schedulers import DeferredSchedulers
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.compilation.trace.stepped import ReadState
from xla_dtensor.compilation.watch.effects import PlacesBefore, in_context_of_its_own
from xla_dtensor.compilation.watch.iterators import nothing_consumed
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.dispatch.positions import Positions
from xla_dtensor.errors import DataDependentError
from xla_dtensor.tensors.base import grad_of


class Traced:
    """One trace of a step; making one runs the step's Python and changes nothing.

    Attributes:
        jaxpr: what it computes, from constants.
        inputs: where each constant comes from in later calls.
        outputs: what the program returns, and what for: results, gradients, storages.
        effects: what its Python changed.
        trace: what was told while it ran: numbers, decisions, settings.
        host: its operations on CPU tensors.
        hooks, schedulers: what it did with optimizers and schedulers.
        watch: what its Python can read.
        kept: the attributes that are compared though its Python only assigns them (`Watch.keep`).
        outside, others: the tensors from outside that it uses, and those that it has only found.
        asked: the arguments whose ``id`` it has asked for, which are these: (which, object).
        carried: the places that its values are taken from like arguments.
        names_of_carried: their names in messages.
        dynamic: the numbers that are inputs.
        cuts: of a step whose arguments are padded, what of its results is cut back.
        fixed: whether its Python found optimizers' hyperparameters as they were.
        unforeseen: whether it has run code of installed packages that may have changed what the
            trace didn't know of, so that it has to be made again.
    """

    cuts: Cuts | None = None

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        dynamic: frozenset[int],
        carried: frozenset[str],
        positions: Positions | None,
        recorder: CodeRecorder,
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
        if torch_private.parametrizations_are_cached():
            raise DataDependentError(
                "a compiled step inside of torch.nn.utils.parametrize.cached(): the cache would "
                "keep what exists only while the step is traced; enter it inside of the step"
            )
        self._roots: list[tuple[str, Any]] = [
            ("the step", function),
            *arguments.roots(),
            *active_modes(),
            *saving_hooks(),
            *((f"{describe(function)}, which the step runs", function) for function in unmet),
        ]
        self.names_of_carried = carried
        self._executed, self.fixed = recorder.executed(), fixed
        watch = Watch(self._roots, carried, self._executed, expecting=True, fixed=fixed)
        reached, names = watch.reached, watch.names
        reads = names.reads
        caller.check_reads(reads)
        self.carried = each_once(reached.carried)
        call, now = caller.carrying(self.carried), arguments.carrying(self.carried)
        assert call is not None and now is not None  # the walk has read each place
        self._call, arguments = call, now
        self.dynamic = dynamic | arguments.carried_numbers()
        if self.dynamic and names.asks_types:
            raise NumberLeft("the step asks for the type() of numbers")
        watch.remember_caches()
        surroundings = PlacesBefore(watch, arguments)
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
        self.host = trace.host = HostOperations(trace, arguments, call, names.asks_types)
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
            return self._end_of_trace(surroundings, arguments, watch, result)

        was_compiling = torch_private.set_compiling(True)
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
                torch_private.set_compiling(was_compiling)
                self._undo_trace()
            numbered = enumerate(arguments.tensors)
            free = {id(t): i for i, t in numbered if id(t) not in reached.tensors}
            for tensor in self._cut:
                outside = trace.outside.get(id(tensor))
                if outside is not None:
                    outside.is_leaf = False  # to the caller it has a history
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
            # Tensors that the program doesn't use; the step's Python may have read `requires_grad`.
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
            self._roots += [(s.name, s) for s in stepped]  # with state that the step has made
            for key, optimizer in reached.optimizers.items():
                if "state" in names.attributes and key not in self.hooks.stepped:
                    self._roots.append((type(optimizer).__name__, ReadState(optimizer)))
            watch.check()
            self._roots += watch.made_meanwhile()
            self._ran = recorder.ran
            same = len(self._roots) == before and not names.meets_installed
            same = same and (self._ran is None or not users_code(reached.codes - self._ran))
            self.watch = watch if same else self.look_again(watch)
            self.watch.remember_caches()
            objects = call.objects()
            self.asked = [(i, objects[i]) for i in sorted(ids.found)]
            self.frame = trace.frame
            self.jaxpr = jax_private.jaxpr_of(closed)
            self.inputs = TracedInputs(self.outputs, arguments, self.watch, closed.consts)
            self._cut = []
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
        if self._ran is not None:
            known = None  # the earlier walk followed code that hasn't run
        watch = Watch(
            self._roots, names, self._executed, known=known, fixed=self.fixed, ran=self._ran
        )
        watch.keep(self.kept)
        return watch

    def carries(self, watch: Watch) -> bool:
        """Whether ``watch`` takes the values of the same places as this trace."""
        mine, now = ({c.name: c.where() for c in w} for w in (self.carried, watch.reached.carried))
        return mine == now

    @interrupts.atomic
    def _abandon(self, surroundings: PlacesBefore) -> None:
        self.hooks.undo()
        surroundings.restore()  # no tracer stays in an attribute
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
        for storage, _ in self.outputs.left:
            storage.give_up(error or RuntimeError("the step was traced, but not run"))

    def _numbers(self, trace: StepTrace, arguments: Arguments) -> dict[int, Any]:
        names = arguments.names_of_numbers() if self.dynamic else {}
        found = {}
        for i in sorted(self.dynamic):
            read = functools.partial(_number_of, i)
            found[i] = like_a_number(trace.numbers.as_input(read, arguments.numbers[i], names[i]))
        return found

    def _end_of_trace(
        self, surroundings: PlacesBefore, arguments: Arguments, watch: Watch, result: list[Any]
    ) -> list[Any]:
        """Called when the step's Python has run, while the trace still goes on: the arrays that the
        program returns."""
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
        outputs = self.outputs = TracedOutputs(trace, self.host)
        objects = self._made
        flat, outputs.tree = objects.flatten(result.pop())
        history = History(trace)
        made = OutputRecipes(outputs, arguments, watch, history)
        effects = self.effects = TracedEffects(trace, surroundings, self.names_of_carried)
        made.histories([*flat, *effects.left_in_places(objects)])
        outputs.results = list(map(made.result, flat))
        effects.convert(surroundings, watch, objects, made)
        self.hooks.take_numbers()
        outputs.collect_gradients(made, history)
        del flat, made, history, objects, self._made
        gc.collect()  # storages in garbage aren't effects
        outputs.collect_storages()
        return outputs.take_arrays()


@interrupts.interruptible
def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _number_of(index: int, arguments: Arguments) -> int | float:
    return arguments.numbers[index]
