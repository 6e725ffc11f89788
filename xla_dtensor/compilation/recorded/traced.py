"""One trace of a step: its jaxpr, where each input comes from, and where each output goes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import jax
import torch

from xla_dtensor.base import executor, interrupts, jax_private, torch_private
from xla_dtensor.base.numbers.math_of_numbers import MathOfNumbers
from xla_dtensor.base.numbers.python_numbers import like_a_number
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.buckets import Cuts
from xla_dtensor.compilation.call.sources import ArraySource
from xla_dtensor.compilation.code.garbage import NewObjects
from xla_dtensor.compilation.code.host_random import none_drawn
from xla_dtensor.compilation.code.installed import users_code
from xla_dtensor.compilation.code.threads import none_started
from xla_dtensor.compilation.objects.places import Entries
from xla_dtensor.compilation.recorded.history import History
from xla_dtensor.compilation.recorded.host_ops import HostOperations
from xla_dtensor.compilation.recorded.output_recipes import OutputRecipes
from xla_dtensor.compilation.recorded.start import Start
from xla_dtensor.compilation.recorded.taken_back import TakenBack
from xla_dtensor.compilation.recorded.traced_effects import TracedEffects
from xla_dtensor.compilation.recorded.traced_inputs import TracedInputs, storages_found
from xla_dtensor.compilation.recorded.traced_outputs import TracedOutputs
from xla_dtensor.compilation.trace.checkpoint_saving import unseen_by_checkpoint
from xla_dtensor.compilation.trace.norms import cumulative_norms
from xla_dtensor.compilation.trace.numbers_of_trace import NumberLeft, end_numbers
from xla_dtensor.compilation.trace.optimizers import OptimizerHooks
from xla_dtensor.compilation.trace.schedulers import DeferredSchedulers
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.compilation.trace.stepped import ReadState
from xla_dtensor.compilation.watch.effects import in_context_of_its_own
from xla_dtensor.compilation.watch.iterators import nothing_consumed
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.dispatch.positions import Positions
from xla_dtensor.errors import DataDependentError
from xla_dtensor.tensors.base import grad_of
from xla_dtensor.tensors.of_form import is_ours


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
        items: the items of tensors that are inputs beside floats; None if none can be.
        cuts: of a step whose arguments are padded, what of its results is cut back.
        fixed: whether its Python found optimizers' hyperparameters as they were.
        frame: the devices that the program runs on.
        anchor: the same, if something that it takes lies there and can lie nowhere else: then it
            doesn't matter where tensors with one value are (`Form.anywhere`).
        is_misplaced: whether it took tensors along to devices that aren't those.
        unforeseen: if it has run code of installed packages that may have changed what the trace
            didn't know of, so that it has to be made again: what is known now.
        taken_back: what is as before if no program of it runs; None once one has.
    """

    cuts: Cuts | None = None
    taken_back: TakenBack | None
    unforeseen: Watch | None = None
    is_misplaced = False

    def __init__(self, start: Start, positions: Positions | None) -> None:
        self.names_of_carried, self.fixed = start.names_of_carried, start.fixed
        self.dynamic, self.carried = start.dynamic, start.carried
        self.items = start.items
        self.kept: frozenset[str] = frozenset()
        self._roots, self._executed, self._call = start.roots, start.executed, start.call
        self.taken_back = start.taken_back
        self._begin(start, positions)
        try:
            closed = self._run(start)
            self._keep_tensors(start)
            if self._is_unforeseen(start):
                return  # nobody asks for more of it
            start.taken_back.check()
            self._look_at_what_ran(start)
            self.frame = self.trace.frame
            self.jaxpr = jax_private.jaxpr_of(closed)
            self.inputs = TracedInputs(self.outputs, start.arguments, self.watch, closed.consts)
            forms = [s.form for s in self.inputs.sources if isinstance(s, ArraySource)]
            held = any(f.frame is self.frame and f.anywhere() is None for f in forms)
            self.anchor = self.frame if held else None
            self.is_misplaced = self.trace.took_along and self.anchor is not start.frame
        except BaseException:
            self._abandon(start)
            raise

    def _begin(self, start: Start, positions: Positions | None) -> None:
        """Make what is told while the step's Python runs."""
        watch, arguments = start.watch, start.arguments
        reached, names = watch.reached, watch.names
        self.trace = trace = StepTrace(start.leaves)
        trace.positions = positions
        trace.items.types_matter = names.asks_types
        given = {id(t._storage_) for t in filter(is_ours, arguments.tensors)}
        trace.not_fetched |= given - storages_found(watch)
        self.schedulers = DeferredSchedulers()
        start.recorder.feeds = watch.feeds_users
        self.hooks = OptimizerHooks(
            trace,
            reached.optimizers.values(),
            reached.settings,
            self.schedulers,
            names.feeds,
            names.feeds_groups,
            start.surroundings.planted,
        )
        self.host = trace.host = HostOperations(trace, arguments, start.call, start.items)

    def _run(self, start: Start) -> Any:
        """Run the step's Python on tracers: its jaxpr, with the arrays that it has closed over."""
        watch, trace = start.watch, self.trace

        def traced() -> list[Any]:
            result = [self._call_python(start)]
            return self._end_of_trace(start, result)

        was_compiling = torch_private.set_compiling(True)
        try:
            if start.frame is not None:
                trace.take_along(start.leaves, start.frame)
            with (
                none_drawn(watch.reached.random_sources),
                nothing_consumed(watch),
                none_started(trace, watch.reached.shared),
                NewObjects() as new,
                unseen_by_checkpoint(),
                executor.running(trace),
                torch.autograd.set_multithreading_enabled(False),
                jax.enable_x64(True),
                start.recorder.recording(watch.names.meets_installed, watch.reached.codes),
            ):
                self._made = start.made_objects(new)
                closed = in_context_of_its_own(jax.make_jaxpr(traced))
                start.arguments.end_trace()
                if any(number() is not None for number in trace.python_numbers):
                    trace.items.refuse_left(trace.python_numbers)
                    raise NumberLeft("the step leaves a number where it isn't seen")
            return closed
        finally:
            torch_private.set_compiling(was_compiling)
            self._undo_trace()

    def _call_python(self, start: Start) -> Any:
        """What the step's Python returns, given tensors and numbers of the trace."""
        arguments, surroundings = start.arguments, start.surroundings
        numbers = self._numbers(arguments)
        args, kwargs = arguments.for_trace(numbers, surroundings.put, start.watch.names.reads)
        for place, value in arguments.with_carried_numbers(self.carried, numbers):
            surroundings.plant(place, value)
        del numbers
        computing = MathOfNumbers(self.trace.items.prints.append)
        with self.host, self.schedulers, self.hooks, cumulative_norms(), computing, start.ids:
            try:
                out = _call(start.function, args, kwargs)
            except RuntimeError as error:
                # TorchScript's interpreter raises one of its own, and drops what this one said.
                if self.trace.refused is not None and "TorchScript" in str(error):
                    raise self.trace.refused from error
                raise
        if self.trace.refused is not None:  # and the step's Python goes on, as if it had failed
            raise self.trace.refused
        if arguments.is_spoilt():
            raise DataDependentError(
                "the step writes to an array that it was given as an argument, or changes an "
                "object there that torch's pytree takes apart, which would happen when it is "
                "traced, not in every call; return it instead"
            )
        return out

    def _keep_tensors(self, start: Start) -> None:
        """Of the tensors from outside those whose state is compared before each call."""
        trace, tensors = self.trace, start.arguments.tensors
        free = {id(t): i for i, t in enumerate(tensors) if not start.finds(t)}
        for tensor in start.cut:
            outside = trace.outside.get(id(tensor))
            if outside is not None:
                outside.is_leaf = False  # as it is for the caller
        leaf_of = {
            id(leaf.grad): leaf
            for leaf in trace.outside.values()
            if leaf.grad is not None and not start.finds(leaf.grad)
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

    def _is_unforeseen(self, start: Start) -> bool:
        """Whether code of packages has run that leads to what the walk before it didn't know."""
        recorder, known = start.recorder, start.watch
        self._executed, self._ran = recorder.executed(), recorder.ran
        if not recorder.grown:
            return False
        names = self.names_of_carried
        wide = Watch(self._roots, names, self._executed, True, known=known, fixed=self.fixed)
        if not wide.keys_of_places() <= known.keys_of_places():
            self.unforeseen = wide
        return self.unforeseen is not None

    def _look_at_what_ran(self, start: Start) -> None:
        """What the step's Python can read, now that it is known which code has run, and what state
        its optimizers have made."""
        watch, roots = start.watch, self._roots
        reached, names = watch.reached, watch.names
        before = len(roots)
        roots += [(stepped.name, stepped) for stepped in self.hooks.stepped.values()]
        for key, optimizer in reached.optimizers.items():
            if "state" in names.attributes and key not in self.hooks.stepped:
                roots.append((type(optimizer).__name__, ReadState(optimizer)))
        watch.check()
        roots += watch.made_meanwhile()
        same = len(roots) == before and not names.meets_installed
        same = same and (self._ran is None or not users_code(reached.codes - self._ran))
        same = same and not self.effects.append()
        with start.taken_back.parts_as_before():
            self.watch = watch if same else self.look_again(watch)
        self.watch.remember_caches()
        self.effects.settle(self.watch)
        objects = start.call.objects()
        self.asked = [(i, objects[i]) for i in sorted(start.ids.found)]

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
        mine, now = self._carried_by(watch)
        return mine == now

    def read_of_schedulers(self) -> set[str]:
        """The names of what the step reads of schedulers that it steps: others in each call."""
        stepped = {id(vars(scheduler)) for scheduler, *_ in self.schedulers.calls}
        return {
            place.label(key)
            for place in self.watch.reached.places
            if isinstance(place, Entries) and id(place.owner) in stepped
            for key in place.keys
            if key in ("_last_lr", "last_epoch")
        }

    def moved(self, watch: Watch) -> frozenset[str]:
        """The names of places that ``watch`` takes values from, too, in other lists or dicts."""
        mine, now = self._carried_by(watch)
        return frozenset(name for name in mine.keys() & now.keys() if mine[name] != now[name])

    def _carried_by(self, watch: Watch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where this trace takes values from, and where ``watch`` does, by name."""
        now = {c.name: c.where() for c in watch.reached.carried}
        return {c.name: c.where() for c in self.carried}, now

    def print_now(self) -> None:
        """Print what the step's Python has printed: the trace needn't be made again."""
        self.trace.items.prints.show()

    @interrupts.atomic
    def _abandon(self, start: Start) -> None:
        self.trace.items.prints.fail()
        self.hooks.undo()
        start.surroundings.restore()  # no tracer stays in an attribute
        start.taken_back.restore(start.watch.names)
        end_numbers(self.trace.python_numbers)
        self.trace.let_go()

    @interrupts.atomic
    def _undo_trace(self) -> None:
        self.trace.undo()
        self.host.undo()

    @interrupts.atomic
    def undo(self, error: BaseException | None = None) -> None:
        """Take back what the trace has made; what of it is left somewhere has no value, because of
        ``error``."""
        self.hooks.undo()
        if self.taken_back is not None:
            known = self.unforeseen or self.watch
            self.taken_back.restore(known.names)
            self.taken_back.forget(known, self._has_made)
            self.taken_back = None  # it keeps arguments alive
        for storage, _ in self.outputs.left:
            storage.give_up(error or RuntimeError("the step was traced, but not run"))

    def _has_made(self, tensor: torch.Tensor) -> bool:
        return is_ours(tensor) and self.trace.owns(tensor._storage_)

    def _numbers(self, arguments: Arguments) -> dict[int, Any]:
        names = arguments.names_of_numbers() if self.dynamic else {}
        found = {}
        for i in sorted(self.dynamic):
            read = functools.partial(_number_of, i)
            found[i] = like_a_number(
                self.trace.numbers.as_input(read, arguments.numbers[i], names[i])
            )
        return found

    def _check_outside(self, start: Start) -> set[int]:
        """Refuse what the step has done to tensors from outside, and each call can't; the ids of
        memory that it has given to those with which it does nothing else. (The next call finds it
        there, and is traced again.)"""
        outside = self.trace.outside
        grads = [o.grad for o in outside.values() if o.grad is not None]
        others = set(map(id, (*start.arguments.tensors, *grads)))  # not the same in each call
        moved: set[int] = set()
        for key, each in list(outside.items()):
            tensor = each.get()
            if id(tensor) not in others:
                each.move_back(self.trace.owns)
            if each.only_moved and not each.moved_back:
                del outside[key]
                moved.add(id(tensor._storage_))
                continue
            changed = each.changed(but_requires_grad=True)
            if changed is not None:
                raise DataDependentError(
                    f"the step changes {changed}: that would happen when it is traced, not in "
                    "every call; do it outside of the compiled step"
                )
        return moved

    def _end_of_trace(self, start: Start, result: list[Any]) -> list[Any]:
        """Called when the step's Python has run, while the trace still goes on: the arrays that the
        program returns."""
        trace, surroundings, watch = self.trace, start.surroundings, start.watch
        self.hooks.check()
        if any(grad_of(tensor) is not None for tensor in start.cut):
            raise DataDependentError(
                "backward() in the compiled step reaches an argument that was computed before it: "
                "it would go on there when the step is traced, and in no later call; compute that "
                "inside of the step, too, or call backward() outside, on the step's result"
            )
        moved = self._check_outside(start)
        trace.note_left()
        outputs = self.outputs = TracedOutputs(trace, self.host)
        objects = self._made
        flat, outputs.tree = objects.flatten(result.pop())
        if not moved.isdisjoint(id(tensor._storage_) for tensor in filter(is_ours, flat)):
            raise DataDependentError(
                "the step returns memory that it has given to a tensor from outside (.data =): "
                "they would share it in the call that is traced, and in no later one; return a "
                "clone() of it"
            )
        history = History(trace)
        made = OutputRecipes(outputs, start.arguments, watch, history)
        effects = self.effects = TracedEffects(trace, surroundings, self.names_of_carried)
        made.histories([*flat, *effects.left_in_places(objects)])
        outputs.results = list(map(made.result, flat))
        effects.convert(surroundings, watch, objects, made)
        self.schedulers.convert(made.value)
        outputs.to_check = list(map(made.pending, trace.items.to_check))
        outputs.printed = [
            (show, list(map(made.printed, values))) for show, values in trace.items.printed
        ]
        outputs.gives_items = made.gives_items
        self.hooks.take_numbers()
        outputs.collect_gradients(made, history, self.hooks.memory_made())
        del flat, made, history, objects, self._made
        gc.collect()  # storages in garbage aren't effects
        outputs.collect_storages()
        return outputs.take_arrays()


@interrupts.interruptible
def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _number_of(index: int, arguments: Arguments) -> int | float:
    return arguments.numbers[index]
