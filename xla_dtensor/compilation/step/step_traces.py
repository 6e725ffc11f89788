"""The traces of a compiled step: when it is traced again, with which inputs, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.base.tables.keys import exact
from xla_dtensor.base.thread_state import tracing
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.buckets import (
    BucketedArguments,
    Padding,
    check_lengths,
    cuts_of,
    refuse_writes,
    shapes_of,
)
from xla_dtensor.compilation.call.retraces import ManyTraces
from xla_dtensor.compilation.code.garbage import Seldom
from xla_dtensor.compilation.objects.readers import ReadsMore
from xla_dtensor.compilation.program.guards import Mismatch
from xla_dtensor.compilation.program.program import Program
from xla_dtensor.compilation.program.saved import Executables
from xla_dtensor.compilation.recorded.attempts import Attempt, trace
from xla_dtensor.compilation.recorded.traced import Traced
from xla_dtensor.compilation.step.base_step import BaseStep
from xla_dtensor.compilation.step.family import Family
from xla_dtensor.compilation.trace.numbers import Decision, NumberChanged
from xla_dtensor.compilation.watch.effects import counter_refused, goes_on, is_counted_on
from xla_dtensor.errors import DataDependentError
from xla_dtensor.execution import lazy

logger = logging.getLogger("xla_dtensor")


class StepTraces(BaseStep):
    """How a step comes to its programs; see `CompiledStep`."""

    _function: Callable[..., Any]
    _options: dict[str, Any] | None
    _lays_out: bool
    _checks: Any
    _buckets: BucketedArguments | None
    _families: Cache[Any, Family]
    _executables: Executables
    _last: tuple[Arguments, Program] | None
    _carried: frozenset[str]
    _counted: frozenset[str]
    _not_carried: dict[str, Exception]
    _left_alone: set[str]
    _many: ManyTraces
    _reads: frozenset[str] | None
    _lock: Any
    _call: Callable[[Arguments], Any]

    def _program(
        self, traced: Traced, arguments: Arguments, executables: Cache[Any, Any] | None
    ) -> Program:
        return Program(traced, arguments, executables, self._options, self._lays_out)

    def _trace(self, arguments: Arguments, family: Family, missed: Mismatch | None) -> Any:
        """Make a program and run it; ``missed`` says why the first one that there was doesn't
        fit."""
        changed: frozenset[str] = frozenset()
        decided: Decision | None = None
        if missed is None:
            why = self._explain(arguments, family)
            if family.programs:
                family.varies(arguments)
        else:
            why, decided, changed = missed.why, missed.decided, missed.paths
            self._take_changed(missed)
        with tracing, self._checks:
            try:
                traced = self._traced_with_cuts(arguments, family, missed)
            except ReadsMore as more:
                self._read(more.reads)
                given = arguments.args, arguments.kwargs
                again = Arguments(*given, self._reads, arguments.padding)
                return self._call(again)
            self._read(traced.watch.names.reads)
        self._compare_what_it_assigns(traced, changed)
        call = traced.take_call()
        made: Program | None = None
        try:
            made = program = self._program(traced, call, self._executables)
            result = program.run(call)
        except BaseException as error:
            if made is None or not program.launched:
                traced.undo(error)
            else:  # a scheduler's step raised, after the program's results were written back
                self._keep(program, call, family)
            if isinstance(error, NumberChanged):
                raise DataDependentError(
                    f"the step changes a number that it takes as an input ({error}): do that "
                    "outside of the compiled step"
                ) from error
            raise
        family.last = dict(arguments.numbers)
        self._count(program.executable.is_new, why)
        self._keep(program, call, family)
        told = self._many.message(why, decided)
        if told is not None:
            logger.warning("xla_dtensor: %s %s", self._name(), told)
        return result

    def looked_at(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], look: Callable[[Program], Any]
    ) -> Any:
        """What ``look`` sees of the program that a call with these arguments would run, which is
        lowered and not compiled; nothing runs, changes or is counted. State that the step's
        optimizer makes is there while it looks. `lower` and ``xd.plan`` are such looks.

        Args:
            args, kwargs: as of a call.
            look: is given the program (`compilation.program.Program`).

        Returns:
            what ``look`` does.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2)
            x = torch.ones(4, device="xla")
            jaxpr = step.looked_at((x,), {}, lambda program: program.jaxpr)
            assert "mul" in str(jaxpr) and step.traces == 0
        """
        lazy.flush_all()
        arguments = Arguments(args, kwargs, self._reads)
        with self._lock, tracing, self._checks, Seldom():
            known = self._carried, self._counted, self._not_carried, self._left_alone, self._reads
            self._not_carried, self._left_alone = dict(known[2]), set(known[3])
            try:
                try:
                    traced = self._as_called(arguments)
                except ReadsMore as more:
                    self._read(more.reads)
                    arguments = Arguments(args, kwargs, self._reads)
                    traced = self._as_called(arguments)
                try:
                    return look(self._program(traced, traced.take_call(), None))
                finally:
                    traced.undo()
            finally:
                self._carried, self._counted, self._not_carried, self._left_alone, self._reads = (
                    known
                )

    def _as_called(self, arguments: Arguments) -> Traced:
        """The trace behind the program that a call would find, or that it would make."""
        there = self._families.get(arguments.key) or Family()
        family = there.settings()
        family.takes(arguments.lengths)
        found, missed = there.find(arguments, to_run=False)
        if found is not None:
            traced = found[-1].traced
            family.dynamic, self._carried = traced.dynamic, traced.names_of_carried
            family.positions = traced.trace.positions is not None
            return self._trace_once(arguments, family)
        if missed is not None:
            self._take_changed(missed)
        elif there.programs:
            family.varies(arguments)
        return self._traced(arguments, family, missed)

    def _take_changed(self, missed: Mismatch) -> None:
        """Numbers outside of the step that have changed since a program was made are inputs."""
        changed = missed.numbers - self._not_carried.keys()
        self._carried, self._counted = self._carried | changed, self._counted | changed

    def _compare_what_it_assigns(self, traced: Traced, changed: frozenset[str]) -> None:
        """Compare in later calls what the step's Python assigns somewhere, and has left, or put, as
        it was; not what has ``changed`` since the trace before, and stayed that."""
        changes = {each for effect in traced.effects.all for each in effect.changed()}
        unchanged = traced.watch.unchanged(changes)
        self._left_alone |= unchanged & changed
        traced.kept = unchanged - self._left_alone
        traced.watch.keep(traced.kept)

    def _read(self, names: frozenset[str] | None) -> None:
        """Its code is known to read attributes of these names; None for any."""
        known = self._reads
        self._reads = None if names is None or known is None else names | known

    def _keep(self, program: Program, call: Arguments, family: Family) -> None:
        family.keep(program, call)
        for other in self._families.values():
            for programs in other.programs.values():
                programs.succeeded(program)
        self._last = call, program

    def _traced_with_cuts(
        self, arguments: Arguments, family: Family, missed: Mismatch | None
    ) -> Traced:
        """The same, and of a step whose arguments are padded, what of its results is cut back."""
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
        other = Arguments(args, kwargs, self._reads)
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
        while True:
            attempt = Attempt()
            try:
                traced = self._trace_once(arguments, family)
            except Exception as error:
                suspects = (tried or self._counted) & self._carried
                if not suspects or attempt.is_final(error):
                    raise
                self._carried -= suspects
                try:
                    self._trace_once(arguments, family).undo()
                except BaseException:
                    self._carried |= suspects  # it raises without carried numbers, too
                    raise
                # The step's Python raises for symbolic numbers, which carried ones are.
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
            found = (effects.replaced | counted) - self._not_carried.keys() - self._carried
            if found:
                traced.undo()
                self._carried |= found
                tried |= found & counted
                self._counted |= found & counted
                continue
            again = [
                effect
                for effect in again
                if missed is not None
                and missed.path is not None
                and missed.path.startswith(effect.place.path)
                and goes_on(effect, earlier, missed.paths)
            ]
            if not again:
                return traced
            traced.undo()
            failed = [self._not_carried.get(label) for label in again[0].labels()]
            raise counter_refused(again[0]) from next(filter(None, failed), None)

    def _trace_once(self, arguments: Arguments, family: Family) -> Traced:
        traced, error = trace(
            self._function, arguments, family.dynamic, self._carried, family.positions
        )
        family.positions = traced.trace.positions is not None
        if error is not None:
            logger.info("%s: its numbers stay constants: %s", self._name(), error)
            family.keep_static(error, family.dynamic & traced.dynamic)
        return traced

    def _explain(self, arguments: Arguments, family: Family) -> str | None:
        """Why there is no program for such arguments."""
        if self._last is None:
            return None
        before = self._last[0]
        if family.last is not None:
            for i, name in arguments.names_of_numbers().items():
                if i in family.last and exact(family.last[i]) != exact(arguments.numbers[i]):
                    change = f"from {family.last[i]!r} to {arguments.numbers[i]!r}"
                    return f"{name}: {change}{family.why_static}"
        last = self._last[1].traced.carried
        return (arguments.carrying(last) or arguments).difference(before)
