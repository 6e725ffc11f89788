"""Guards: whether everything that a program was compiled for still holds in this call."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xla_dtensor.base import epoch
from xla_dtensor.compilation.call.argument_names import lying
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.retraces import changed_numbers
from xla_dtensor.compilation.call.run import Prepared
from xla_dtensor.compilation.program.gradients import Gradients
from xla_dtensor.compilation.program.inputs import Inputs
from xla_dtensor.compilation.recorded.host_program import HostChanged
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.compilation.recorded.traced_inputs import TracedInputs
from xla_dtensor.compilation.trace.external_tensors import ExternalTensor
from xla_dtensor.compilation.trace.numbers import ARITHMETIC, Decision, NumberChanged
from xla_dtensor.errors import DataDependentError
from xla_dtensor.mesh import Frame


@dataclass(frozen=True)
class Mismatch:
    """Why a program can't run in a call.

    Attributes:
        why: in words.
        decided: the decision of the step's Python that no longer holds, if that is it.
        paths: the names in messages of everything of Python's that has changed.
        path: the first of them, or the cache that has forgotten something.
        numbers: the names of the numbers among them.
        items: the items that have changed, and can be inputs (`Looked.is_item`), by their lines.
        moved: the names of the places that values are taken from, and that are in other lists or
            dicts now.
    """

    why: str
    decided: Decision | None = None
    path: str | None = None
    paths: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    items: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()


class Guards:
    """What is compared before each call of a program, in an order in which each may rely on those
    before it.

    Args:
        traced: the trace that the program is compiled from.
        inputs: of the program.
        arguments: of the call that was traced.

    Attributes:
        watch: what the step's Python can read, as it was when the program last fitted.
        stale: why the next call has to trace again whatever it finds, or None.
        prepared: what the checks of the last call have computed.
    """

    def __init__(self, traced: Traced, inputs: Inputs, arguments: Arguments) -> None:
        self._traced, self._inputs = traced, inputs
        self.watch = traced.watch
        self.stale: str | None = None
        self._epoch = epoch.tensors.value
        trace = traced.trace
        self._decisions = [*{d.text: d for d in trace.numbers.decisions}.values()]
        self._decided_by = ""  # repr of the numbers for which all were last seen to hold
        self._looked_at = traced.host.looked_at
        gradients = Gradients(traced.outside, arguments, inputs.storages, traced.anchor)
        known = traced.inputs
        given = known.bound_arguments or known.bound_on_host or known.free_arguments
        # Only hooks that are there: a user may empty their dict; one that is added moves the epoch.
        hooked = [o for o in (*traced.outside, *traced.others) if o.hooks and o.is_fixed]
        moved = [o for o in traced.outside if o.moved_back]
        lay = [tensor._storage_.form.frame for tensor in arguments.anywhere]
        checks: list[tuple[Callable[[Arguments], str | None], Any]] = [
            (gradients.mismatch, gradients.leaves),
            (functools.partial(_other_arguments, traced.inputs, inputs.storages), given),
            (functools.partial(_other_devices, traced.anchor, lay), lay),
            (functools.partial(_other_ids, traced.asked), traced.asked),
            (inputs.donated.mismatch, inputs.donated.sources),
            (inputs.kept.mismatch, inputs.kept.sources),
            (functools.partial(_other_settings, trace.settings), trace.settings),
            (functools.partial(_other_hooks, hooked), hooked),
            (functools.partial(_other_viewers, moved), moved),
        ]
        self._checks = [check for check, compared in checks if compared]
        try:
            self.prepared = inputs.prepare(arguments)
        except HostChanged as error:
            raise DataDependentError(
                "what the step computes with CPU tensors is something else when it is computed "
                f"again before a call: {error}; compute that outside of the step"
            ) from error

    def mismatch(self, arguments: Arguments) -> Mismatch | None:
        """Why the program can't run now, or None."""
        if self.stale is not None:
            return Mismatch(self.stale)
        if not self.watch.untouched():
            mismatch = self._look_closer()
            if mismatch is not None:
                return mismatch
        if self._epoch != epoch.tensors.value:
            for outside in (*self._traced.outside, *self._traced.others):
                changed = outside.changed()
                if changed is not None:
                    return Mismatch(changed)
            self._epoch = epoch.tensors.value
        return self.other_tensors(arguments)

    def other_tensors(self, arguments: Arguments) -> Mismatch | None:
        """Why the program can't run on what the tensors are now, and on the values that the host
        reads before the launch, whatever the step's Python reads besides; or None."""
        for check in self._checks:
            why = check(arguments)
            if why is not None:
                return Mismatch(why)
        # `Watch.met` makes a tuple of all arguments; in most calls the step finds none elsewhere.
        known, before = self.watch.known, self._traced.inputs.met
        tensors, containers = map(id, arguments.tensors), map(id, arguments.containers)
        if before or not (known.isdisjoint(tensors) and known.isdisjoint(containers)):
            met = self.watch.met(arguments)
            if not (len(met) == len(before) and all(map(operator.is_, met, before))):
                return Mismatch("which arguments are objects that the step finds elsewhere")
        try:
            prepared = self.prepared = self._inputs.prepare(arguments)
        except (NumberChanged, HostChanged) as changed:
            return Mismatch(str(changed))
        if self._decisions or self._looked_at:
            return self._decisions_differ(arguments, prepared)
        return None

    def decides_otherwise(self, arguments: Arguments) -> bool:
        """Whether the numbers alone say that the program can't run, which is quickly asked where
        there are many programs."""
        if self._inputs.depends_on_host or not self._decisions:
            return False
        try:
            numbers = self._inputs.prepare(arguments).numbers
            return any(d.compute(numbers) != d.outcome for d in self._decisions)
        except (NumberChanged, LookupError, AttributeError, *ARITHMETIC):
            return False  # `mismatch` says why

    # --- one after the other -----------------------------------------------------------------

    def _look_closer(self) -> Mismatch | None:
        """Compare by value what the step can read; None if nothing has changed."""
        traced = self._traced
        now = traced.look_again()
        if not traced.carries(now):
            return Mismatch(
                "whether there is something that the step keeps from one call to the next",
                moved=traced.moved(now),
            )
        forgotten = self.watch.forgotten()
        if forgotten is not None:
            return Mismatch(f"what the cache of {forgotten} holds", path=forgotten)
        differences = self.watch.differences(now)
        if not differences:
            # By path: two objects of a kind may have changed places.
            places = {(place.path, place.container) for place in now.reached.places}
            changed = [effect.place for effect in traced.effects.all]
            changed += [carried.place for carried in traced.carried]
            if any((place.path, place.container) not in places for place in changed):
                return Mismatch("something that the step changes, which is another object now")
            now.remember_caches(self.watch)
            self.watch = now
            return None
        before, after = differences[0]
        path = (after or before).path  # type: ignore[union-attr]
        was, is_now = (found.text() if found else "nothing" for found in (before, after))
        return Mismatch(
            f"{path}: from {was} to {is_now}",
            path=path,
            paths=frozenset(f.path for pair in differences for f in pair if f is not None),
            numbers=changed_numbers(differences),
        )

    def _decisions_differ(self, arguments: Arguments, prepared: Prepared) -> Mismatch | None:
        numbers = prepared.numbers
        if self._decisions and repr(numbers) != self._decided_by:
            try:
                for decision in self._decisions:
                    if decision.compute(numbers) != decision.outcome:
                        return Mismatch(decision.difference(), decided=decision)
            except ARITHMETIC as error:
                return Mismatch(f"the step decided {decision.text}: {error}")
            # A decision is a function of the numbers alone; two that are equal (0.0 and -0.0) may
            # decide otherwise, but not two that are written alike.
            self._decided_by = repr(numbers)
        for looked in self._looked_at:
            if looked.read(arguments, prepared.host) != looked.was:
                items = (looked.where(),) if looked.is_item else ()
                return Mismatch(looked.difference(), items=frozenset(items))
        return None


def _other_arguments(traced: TracedInputs, own: frozenset[int], arguments: Arguments) -> str | None:
    """
    Args:
        own: the ids of the storages that the step uses in each call.
    """
    tensors: Any = arguments.tensors
    for index, storage in traced.bound_arguments:
        if tensors[index]._storage_ is not storage:
            return "an argument, which was a tensor that the step uses anyway"
    for index, tensor in traced.bound_on_host:
        if tensors[index] is not tensor:
            return "an argument, which was a CPU tensor that the step uses anyway"
    for index in traced.free_arguments:
        if id(tensors[index]._storage_) in own:
            return "an argument, which is a tensor that the step uses anyway"
    return None


def _other_devices(
    anchor: Frame | None, lay: list[Frame | None], arguments: Arguments
) -> str | None:
    """
    Args:
        anchor: `Traced.anchor`, which tensors of the default device are copied to.
        lay: where the arguments with one value lay in the call that was traced.
    """
    for tensor, before in zip(arguments.anywhere, lay, strict=True):
        now = tensor._storage_.form.frame
        if (now or anchor) is not (before or anchor):
            change = f"from {lying(tensor, before)} to {lying(tensor, now)}"
            return f"{arguments.name_of(tensor)}: {change}"
    return None


def _other_ids(asked: list[tuple[int, Any]], arguments: Arguments) -> str | None:
    objects = arguments.objects()
    if any(objects[i] is not value for i, value in asked):
        return "the id() of an argument, which is another object"
    return None


def _other_viewers(moved: list[ExternalTensor], _: Arguments) -> str | None:
    for outside in moved:
        if outside.is_seen_by_others():
            shape = list(outside.get().shape)
            return f"which tensors show the memory of one of shape {shape}, which the step replaces"
    return None


def _other_hooks(hooked: list[ExternalTensor], _: Arguments) -> str | None:
    return next((o.changed() for o in hooked if o.other_hooks()), None)


def _other_settings(settings: dict[Callable[[], Any], Any], _: Arguments) -> str | None:
    for read, (value, text) in settings.items():
        if read() != value:
            return f"{text}: from {value!r} to {read()!r}"
    return None
