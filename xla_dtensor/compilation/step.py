"""A compiled step: which program a call runs, and when one is made."""

from __future__ import annotations

import copy
import functools
import logging
import operator
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from xla_dtensor.base import assertions, events, interrupts, thread_state
from xla_dtensor.base.cache import Cache
from xla_dtensor.base.keys import exact
from xla_dtensor.compilation import totals
from xla_dtensor.compilation.arguments import Arguments, ReadsMore
from xla_dtensor.compilation.attempts import Attempt, trace
from xla_dtensor.compilation.audit import compare
from xla_dtensor.compilation.effects import counter_refused, is_counted_on
from xla_dtensor.compilation.family import KINDS, Family
from xla_dtensor.compilation.looking import called_without_data, looked_at, tracing
from xla_dtensor.compilation.program import Program
from xla_dtensor.compilation.streams import call_with_streams, has_streams
from xla_dtensor.compilation.trace import StepTrace
from xla_dtensor.compilation.traced import Traced
from xla_dtensor.dispatch import lazy
from xla_dtensor.runtime import abstract
from xla_dtensor.runtime.jax_runtime import code_bytes

logger = logging.getLogger("xla_dtensor")

PROGRAMS = 256
# Calls traced in a row of which one is told.
MANY_TRACES = 5


class CompiledStep:
    """A compiled step, which `compile` makes; call it like the function.

    Attributes:
        compilations: how many programs were compiled so far.
        traces: how many times the step's Python was run to make a program.
        recompilations: a line for each trace after the first that came to another program: why.

    Example::

        import torch, xla_dtensor as xd
        step = xd.compile(lambda x: x * 2)
        step(torch.ones(4, device="xla")), step(torch.ones(8, device="xla"))
        assert step.traces == step.compilations == 2 and len(step.recompilations) == 1
    """

    def __init__(
        self,
        function: Callable[..., Any],
        compiler_options: dict[str, Any] | None = None,
        audit: int = 0,
        checks: bool = False,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._options = compiler_options
        self._audit = audit
        self._asked_checks = checks
        self._checks = assertions.asking(checks)
        self._calls = 0
        # Threads may share a step: one call after another.
        self._lock = threading.RLock()
        name = f"compiled step {self._name()}"
        self._families: Cache[Any, Family] = Cache(f"{name}: kinds of arguments", KINDS)
        self._executables: Cache[Any, Any] = Cache(f"{name}: programs", PROGRAMS, size=code_bytes)
        self._last: tuple[Arguments, Program] | None = None
        # What it keeps outside of itself and replaces in each call, as messages call it; numbers.
        self._carried: frozenset[str] = frozenset()
        self._counted: frozenset[str] = frozenset()
        # The names of attributes that its code reads, so far; None: it may read any.
        self._reads: frozenset[str] | None = frozenset()
        # How much it takes from iterators among its arguments.
        self._streams: dict[Any, list[tuple[int, bool]]] = {}
        # What of it can't be taken from there, and why.
        self._not_carried: dict[str, Exception] = {}
        self.clear_cache()
        self.compilations = 0
        self.traces = 0
        self.recompilations: list[str] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trace = thread_state.current()
        if trace is not None and isinstance(trace, StepTrace):
            return self._function(*args, **kwargs)  # part of the step that is being traced
        if abstract.current() is not None:
            return called_without_data(self, args, kwargs)
        if not interrupts.ready():
            interrupts.install()
        lazy.flush_all()
        with self._lock:
            if has_streams(args, kwargs):
                return call_with_streams(
                    self._call, args, kwargs, lambda: self._reads, self._streams
                )
            return self._call(Arguments(args, kwargs, self._reads))

    @interrupts.completed
    def _call(self, arguments: Arguments) -> Any:
        family = self._families.get_or_make(arguments.key, Family)
        missed: tuple[str, str | None] | None = None
        for call, programs in family.candidates(arguments):
            for position, program in enumerate(programs):
                why = program.mismatch(call)
                if why is None:
                    if position:
                        programs.first(program)
                    self._last = call, program
                    self._in_a_row = 0
                    observer = events.observer
                    if observer is not None:
                        observer.compiled(self._name())
                    if self._audit:
                        self._look_again(program, call)
                    return program.run(call)
                missed = missed or (why, program.changed_path)
        return self._trace(arguments, family, missed)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The step's program for these arguments, not compiled and not run; nothing changes.

        Args:
            args, kwargs: as of a call.

        Returns:
            a ``jax.stages.Lowered``, with ``as_text()`` and ``compile()``.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x.sin())
            assert "sine" in step.lower(torch.ones(4, device="xla")).as_text() and step.traces == 0
        """
        return looked_at(self, args, kwargs, operator.attrgetter("lowered"))

    def clear_cache(self) -> None:
        """Forget all programs; the next call traces and compiles. The counts stay.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2)
            step(torch.ones(4, device="xla"))
            step.clear_cache()
            assert step.compiled_programs() == []
        """
        self._families.clear()
        self._executables.clear()
        self._last = None
        self._carried = self._counted = frozenset()
        self._not_carried = {}
        self._streams = {}
        self._in_a_row = 0

    def why_not(self, *args: Any, **kwargs: Any) -> str | None:
        """Why a call with these arguments would trace the step; nothing is traced, and nothing
        changes.

        Args:
            args, kwargs: as of a call.

        Returns:
            the reason in words, or None if a program is there that the call would run.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2)
            assert step.why_not(torch.ones(4, device="xla")) == "the step has not been called yet"
        """
        arguments = Arguments(args, kwargs, self._reads)
        with self._lock:
            family = self._families.get(arguments.key) or Family()
            candidates = list(family.candidates(arguments))
            tried = [(program, call) for call, programs in candidates for program in programs]
            reasons = [program.mismatch(call) for program, call in tried]
            if None in reasons:
                return None
            if self._last is None:
                return "the step has not been called yet"
            return reasons[0] if reasons else self._explain(arguments, family)

    def compiled_programs(self) -> list[Any]:
        """The programs that exist, and what XLA made of the step.

        Returns:
            ``jax.stages.Compiled``, oldest first: ``as_text()``, ``memory_analysis()`` and others.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2)
            step(torch.ones(4, device="xla"))
            assert "f32[4]" in step.compiled_programs()[-1].as_text()
        """
        return list(self._executables.values())

    # --- internals ---------------------------------------------------------------------------

    def _trace(
        self, arguments: Arguments, family: Family, missed: tuple[str, str | None] | None
    ) -> Any:
        """Make a program and run it; ``missed`` says why the first one that there was doesn't fit,
        and what of Python's has changed."""
        why, path = missed or (self._explain(arguments, family), None)
        if missed is None and family.programs:
            family.varies(arguments.numbers)
        with tracing, self._checks:
            try:
                traced = self._traced(arguments, family, path)
            except ReadsMore as more:
                self._read(more.reads)
                return self._call(Arguments(arguments.args, arguments.kwargs, self._reads))
            self._read(traced.watch.names_read)
        call = traced.take_call()
        program: Program | None = None
        try:
            program = Program(traced, call, self._executables, self._options)
            result = program.run(call)
        except BaseException as error:
            if program is None or not program.launched:
                traced.undo(error)
            else:  # a scheduler's step: the program has done what it had to
                self._keep(program, call, family)
            raise
        family.last = dict(arguments.numbers)
        self.traces += 1
        totals.add("traces")
        if program.newly_compiled:
            self.compilations += 1
            totals.add("compilations")
            if why is not None:
                self.recompilations.append(why)
                totals.add("recompilations")
                logger.warning("xla_dtensor: recompiled %s: %s", self._name(), why)
        self._keep(program, call, family)
        self._in_a_row += 1
        if self._in_a_row == MANY_TRACES:
            logger.warning(
                "xla_dtensor: %s has been traced in %d calls in a row, which takes long: %s",
                self._name(),
                MANY_TRACES,
                why or "every call has had other arguments",
            )
        return result

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

    def _traced(self, arguments: Arguments, family: Family, path: str | None) -> Traced:
        """A trace that takes what the step keeps and replaces from where it is in each call; with
        numbers as inputs if the step's Python can do with that.

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
                    self._carried |= suspects  # it is the step that raises
                    raise
                # The step's Python can't do with numbers that are inputs.
                self._not_carried |= dict.fromkeys(suspects, error)
                tried = set()
                continue
            last, carried = family.latest(), traced.names_of_carried
            earlier = () if last is None else last.effects
            again = [e for e in traced.effects if is_counted_on(e, carried, earlier)]
            counted = {label for effect in again for label in effect.labels()} & traced.counted
            found = (traced.replaced | counted) - self._not_carried.keys() - self._carried
            if found:
                traced.undo()
                self._carried |= found
                tried |= found & counted
                self._counted |= found & counted
                continue
            again = [e for e in again if path is not None and path.startswith(e.place.path)]
            if not again:
                return traced
            traced.undo()
            failed = [self._not_carried.get(label) for label in again[0].labels()]
            raise counter_refused(again[0]) from next(filter(None, failed), None)

    def _trace_once(self, arguments: Arguments, family: Family) -> Traced:
        traced, error = trace(self._function, arguments, family.dynamic, self._carried)
        if error is not None:
            logger.info("%s: its numbers stay constants: %s", self._name(), error)
            family.keep_static()
        return traced

    def _explain(self, arguments: Arguments, family: Family) -> str | None:
        """Why there is no program for such arguments."""
        if self._last is None:
            return None
        before = self._last[0]
        if family.last is not None:
            for i, name in enumerate(arguments.names()):
                if i in family.last and exact(family.last[i]) != exact(arguments.numbers[i]):
                    return f"{name}: from {family.last[i]!r} to {arguments.numbers[i]!r}"
        last = self._last[1].traced.carried
        return (arguments.carrying(last) or arguments).difference(before)

    def _look_again(self, program: Program, arguments: Arguments) -> None:
        """Every n-th call: the audit."""
        self._calls += 1
        if self._calls % self._audit == 0:
            with tracing, self._checks:
                compare(self._name(), self._function, program.traced, arguments)

    def _name(self) -> str:
        return name_of(self._function)

    # --- copies --------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledStep:
        """A step of its own of a copy of the function: that of a method is of a copied object."""
        other = self._again(copy.deepcopy(self._function, memo))
        memo[id(self)] = other
        added = {name: value for name, value in vars(self).items() if name not in vars(other)}
        vars(other).update(copy.deepcopy(added, memo))
        return other

    def __reduce__(self) -> Any:
        """By name, where its module has it (``@xd.compile``), else by the function; without
        programs."""
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for name in getattr(self, "__qualname__", "").split("."):
            found = getattr(found, name, None)
        if found is self:
            return self.__qualname__
        return _remade, (self._function, self._options, self._audit, self._asked_checks)

    def _again(self, function: Callable[..., Any]) -> CompiledStep:
        return CompiledStep(function, self._options, self._audit, self._asked_checks)


def _remade(*parts: Any) -> CompiledStep:
    return CompiledStep(*parts)


def name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__
