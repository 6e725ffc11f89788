"""How a compiled step is traced, and what its traces so far have told of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.buckets import (
    BucketedArguments,
    Padding,
    check_lengths,
    cuts_of,
    refuse_writes,
    shapes_of,
)
from xla_dtensor.compilation.program.guards import Mismatch
from xla_dtensor.compilation.recorded.attempts import Attempt, trace
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.compilation.step.base_step import name_of
from xla_dtensor.compilation.step.family import Family
from xla_dtensor.compilation.watch.counted import counter_refused, goes_on, is_counted_on
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.errors import DataDependentError
from xla_dtensor.movement.vary import let_vary
from xla_dtensor.tensors.of_form import is_ours

logger = logging.getLogger("xla_dtensor")


class StepTraces:
    """Traces a step, with what its traces so far have told of it.

    Args:
        function: the step's Python.
        buckets: what pads its arguments, if they are.

    Attributes:
        reads: the names of attributes that its code reads; None: it may read any.
    """

    def __init__(self, function: Callable[..., Any], buckets: BucketedArguments | None) -> None:
        self._function, self._buckets = function, buckets
        self.reads: frozenset[str] | None = frozenset()
        self._known: Watch | None = None
        self.forget()

    def forget(self) -> None:
        """Forget what traces have told, but for the names that the code reads."""
        # What it keeps outside of itself and replaces in each call, by name in messages; numbers.
        self._carried: frozenset[str] = frozenset()
        self._counted: frozenset[str] = frozenset()
        # What of it can't be taken from there, and why.
        self._not_carried: dict[str, Exception] = {}
        # The items of tensors that are inputs, as they have changed (`Mismatch.items`).
        self._items: frozenset[str] | None = frozenset()
        # What a trace has left as it was, although it had changed before.
        self._left_alone: set[str] = set()

    def copy(self) -> StepTraces:
        """Another one that has been told the same so far."""
        other = StepTraces(self._function, self._buckets)
        other.reads, other._carried, other._counted = self.reads, self._carried, self._counted
        other._not_carried, other._left_alone = dict(self._not_carried), set(self._left_alone)
        other._items = self._items
        return other

    def read(self, names: frozenset[str] | None, watch: Watch | None = None) -> None:
        """The code is known to read attributes of these names; None for any. ``watch`` has found it
        out, and the next trace needn't again."""
        known, self._known = self.reads, watch
        self.reads = None if names is None or known is None else names | known

    def made(self, arguments: Arguments, family: Family, missed: Mismatch | None) -> Traced:
        """The trace for a program that isn't there yet.

        Args:
            missed: why the first one that there was doesn't fit.
        """
        if missed is not None:
            self._take_changed(missed)
        elif family.programs:
            family.varies(arguments)
        traced = self._with_cuts(arguments, family, missed)
        while not family.programs and _let_vary(traced, arguments):
            traced = self._with_cuts(arguments, family, missed)
        if not family.programs and _settle(traced):
            traced = self._with_cuts(arguments, family, missed)
        self.read(traced.watch.names.reads)
        return traced

    def as_called(self, arguments: Arguments, families: Cache[Any, Family]) -> Traced:
        """The trace behind the program that a call would find, or that it would make."""
        there = families.get(arguments.key) or Family()
        family = there.settings()
        family.takes(arguments.lengths)
        found, missed = there.find(arguments, to_run=False)
        if found is not None:
            traced = found[-1].traced
            family.dynamic, self._carried = traced.dynamic, traced.names_of_carried
            self._items = traced.items
            family.positions = traced.trace.positions is not None
            return self._once(arguments, family)
        if missed is not None:
            self._take_changed(missed)
        elif there.programs:
            family.varies(arguments)
        return self._traced(arguments, family, missed)

    def compare_what_it_assigns(self, traced: Traced, changed: frozenset[str]) -> None:
        """Compare in later calls what the step's Python assigns somewhere, and has left, or put, as
        it was; not what has ``changed`` since the trace before, and stayed that."""
        changes = {each for effect in traced.effects.all for each in effect.changed()}
        unchanged = traced.watch.unchanged(changes)
        self._left_alone |= unchanged & changed
        traced.kept = unchanged - self._left_alone
        traced.watch.keep(traced.kept)

    def _take_changed(self, missed: Mismatch) -> None:
        """Numbers outside of the step that have changed since a program was made are inputs."""
        changed = missed.numbers - self._not_carried.keys()
        self._carried, self._counted = self._carried | changed, self._counted | changed
        self._items = (self._items or frozenset()) | missed.items
        for name in missed.moved & self._counted:
            # A list that is replaced by another one (`scheduler._last_lr`) is taken from where
            # that is, with all that is in it.
            outer = {name[: name.rindex("[")]} if name.endswith("]") else set()
            self._carried, self._counted = self._carried - {name}, self._counted - {name}
            self._carried, self._counted = self._carried | outer, self._counted | outer

    def _with_cuts(self, arguments: Arguments, family: Family, missed: Mismatch | None) -> Traced:
        """A trace, and of a step whose arguments are padded, what of its results is cut back."""
        traced, padding = self._traced(arguments, family, missed), arguments.padding
        if padding is None:
            return traced
        try:
            refuse_writes(traced, arguments)
            shapes, others = shapes_of(traced, arguments), None
            if not padding.is_named() and any(shapes):
                traced.undo()
                others = self._other_shapes(padding)
                traced = self._traced(arguments, family, missed)
            traced.cuts = cuts_of(padding, shapes, others)
            check_lengths(traced.cuts, padding)
        except BaseException as error:
            traced.undo(error)
            raise
        return traced

    def _other_shapes(self, padding: Padding) -> list[tuple[int, ...] | None]:
        """The shapes of the results for other sizes of the same buckets."""
        assert self._buckets is not None
        args, kwargs, _ = self._buckets.padded(*padding.given, other=True)
        other = Arguments(args, kwargs, self.reads)
        traced, _ = trace(self._function, other, other.lengths, self._carried)
        traced.undo()
        return shapes_of(traced, other)

    def _traced(self, arguments: Arguments, family: Family, missed: Mismatch | None) -> Traced:
        """A trace that takes what the step keeps and replaces from where it is in each call; with
        numbers as inputs if the step's Python can do with that.

        Args:
            missed: what has changed since the trace before.

        Raises:
            DataDependentError: it changes in each call what the next one would have to be traced
                for.
        """
        tried: set[str] = set()
        replaced: set[str] = set()
        not_yet: set[str] = set()  # what the step raises, and may take from its place another time
        while True:
            attempt = Attempt()
            try:
                traced = self._once(arguments, family)
            except Exception as error:
                suspects = (tried or self._counted) & self._carried
                if not suspects and replaced and isinstance(error, DataDependentError):
                    self._carried -= replaced  # the next call is to say the same
                    raise _replaced_refused(error, replaced) from error
                if not suspects or attempt.is_final(error):
                    raise
                self._carried -= suspects
                try:
                    self._once(arguments, family).undo()
                except BaseException:
                    self._carried |= suspects  # it raises without carried numbers, too
                    raise
                # The step's Python raises for symbolic numbers, which carried ones are. (Where it
                # makes an optimizer's state it may do so in this call alone.)
                if suspects <= tried and missed is None:
                    not_yet |= suspects
                else:
                    self._not_carried |= dict.fromkeys(suspects, error)
                tried = set()
                continue
            effects = traced.effects
            for label in effects.of_others - self._not_carried.keys():
                # While a trace runs the place holds a symbolic number, which that thread would use.
                self._not_carried[label] = DataDependentError(f"another thread changes {label}")
            if effects.of_others & self._counted & self._carried:
                self._carried -= effects.of_others
                traced.undo()
                continue
            last, carried = family.latest(), traced.names_of_carried
            earlier = () if last is None else last.traced.effects.all
            again = [e for e in effects.all if is_counted_on(e, carried, earlier)]
            counted = {label for effect in again for label in effect.labels()} & effects.counted
            counted |= traced.read_of_schedulers()
            found = (effects.replaced | counted) - self._not_carried.keys()
            found -= self._carried | not_yet
            if found:
                traced.undo()
                self._carried |= found
                replaced |= found - counted
                tried |= found & counted
                self._counted |= found & counted
                continue
            again = [
                effect
                for effect in again
                if missed is not None
                and missed.path is not None
                and effect.concerns(missed.path)
                and goes_on(effect, earlier, missed.paths)
            ]
            if not again:
                return traced
            traced.undo()
            failed = [self._not_carried.get(label) for label in again[0].labels()]
            raise counter_refused(again[0]) from next(filter(None, failed), None)

    def _once(self, arguments: Arguments, family: Family) -> Traced:
        known, self._known = self._known, None
        traced, error = trace(
            *(self._function, arguments, family.dynamic, self._carried, family.positions, known),
            self._items,
        )
        family.positions = traced.trace.positions is not None
        if error is not None:
            logger.info("%s: its numbers stay constants: %s", name_of(self._function), error)
            family.keep_static(error, family.dynamic & traced.dynamic)
        return traced


def _replaced_refused(error: DataDependentError, replaced: set[str]) -> DataDependentError:
    """An error of a step that was traced as long as its state was no input, which it is because the
    step replaces it."""
    names = ", ".join(sorted(replaced))
    return DataDependentError(
        f"{error}\nThe step replaces {names} by another tensor in each call. What it writes in "
        "place (self.count += 1, self.mean.copy_(mean)) it may look at, unless that depends on an "
        "argument, a parameter or a gradient"
    )


def _settle(traced: Traced) -> bool:
    """Whether there was a setting that the step leaves otherwise than it has found it, and that may
    as well be so from the start (torchtitan's ``set_reshard_after_forward`` in each step)."""
    settled = [settle() for settle in traced.trace.settling]
    if any(settled):
        traced.undo()
    return any(settled)


def _let_vary(traced: Traced, arguments: Arguments) -> bool:
    """Whether there was something that is one value for all devices before the first step, and one
    for each after it (a count of tokens): it is one for each from the start, and the program that
    of the second step, too."""
    given = {id(tensor._storage_) for tensor in arguments.tensors if is_ours(tensor)}
    found = [(s, form) for s, form in traced.outputs.come_apart if id(s) not in given]
    traced.outputs.come_apart = []
    if found:
        traced.undo()
    for storage, form in found:
        let_vary(storage, form)
    return bool(found)
