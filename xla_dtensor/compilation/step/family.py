"""The programs of a step for one kind of arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from xla_dtensor.base.tables.keys import exact
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.objects.carried import Carried
from xla_dtensor.compilation.program.guards import Mismatch
from xla_dtensor.compilation.program.program import Program
from xla_dtensor.compilation.program.programs import Programs

# How many kinds of arguments a step keeps programs for.
KINDS = 256


class Family:
    """The programs for one kind of arguments.

    Attributes:
        programs: by the values of the numbers that are part of them, the places that they take more
            arguments from, and the key of what is there.
        dynamic: the numbers that are inputs, because they have changed between calls.
        last: the numbers of the call that was traced last.
        latest: gives the program that was made of it, if it still exists.
        positions: whether positions (``x[n]``) may be inputs, too.
        misses: how many calls in a row were traced because no program fitted.
        why_static: why numbers can't be inputs, for messages; empty if they can.
        refused: why the step's Python can't be one program with such arguments, if that is known.
        refusals: how often it was found out.
        tries_again_after: after how many calls that is tried again; None: no more.
    """

    # After how many calls it is tried again, after the first refusal, and after the second: the
    # first call may be the one that writes a log.
    _TRIES = (0, 4)

    __slots__ = (
        "_static",
        "_static_fields",
        "dynamic",
        "last",
        "latest",
        "misses",
        "positions",
        "programs",
        "refusals",
        "refused",
        "tries_again_after",
        "why_static",
    )

    def __init__(self) -> None:
        self.programs: dict[Any, Programs] = {}
        self.dynamic: frozenset[int] = frozenset()
        self.last: dict[int, int | float] | None = None
        self.latest: Callable[[], Program | None] = lambda: None
        self.positions = True
        self.why_static = ""
        self.refused: str | None = None
        self.tries_again_after: int | None = 0
        self.refusals = self.misses = 0
        self._static = self._static_fields = False

    def refuse(self, why: str, for_good: bool = False) -> None:
        """The step's Python can't be one program: ``why``.

        Args:
            for_good: whether it isn't to be tried again.
        """
        self.refused = why
        again = None if for_good else dict(enumerate(self._TRIES)).get(self.refusals)
        self.refusals, self.tries_again_after = self.refusals + 1, again

    def tries(self) -> bool:
        """Whether this call is to be traced, if no program fits."""
        if self.refused is None:
            return True
        if self.tries_again_after is None:
            return False
        self.tries_again_after -= 1
        return self.tries_again_after < 0

    def settings(self) -> Family:
        """A family without programs that traces as this one does, until one of both learns more."""
        other = Family()
        other.dynamic, other.last, other.latest = self.dynamic, self.last, self.latest
        other.positions, other.why_static = self.positions, self.why_static
        other._static, other._static_fields = self._static, self._static_fields
        return other

    def takes(self, lengths: frozenset[int]) -> None:
        """These numbers are inputs from the first call on."""
        if not self._static and not lengths <= self.dynamic:
            self.dynamic |= lengths

    def keep_static(self, error: Exception, but: frozenset[int]) -> None:
        """The step does with its numbers what only Python numbers can do; ``error`` says what.

        Args:
            but: those that can be inputs: all but the numbers in dataclasses, or none.
        """
        self.dynamic = but
        self._static, self._static_fields = not but, True
        self.why_static = f" (numbers stay constants: {error})"
        self.programs.clear()

    def candidates(self, arguments: Arguments) -> list[tuple[Arguments, Programs]]:
        """The programs that may run, with the arguments that each of them takes."""
        # The places that programs take more arguments from, by what tells them from others, those
        # of the latest first. Programs alone refer to them: to a place belongs an object.
        places: dict[Any, list[Carried]] = {}
        for (_, where, _), programs in reversed(self.programs.items()):
            program = next(iter(programs), None)
            if program is not None:
                places.setdefault(where, program.traced.carried)
        found = []
        for where, carried in (places or {(): []}).items():
            call = arguments.carrying(carried) if carried else arguments.given or arguments
            if call is not None:
                found.append((call, self._programs_for(call, where)))
        return found

    def uses(self, arguments: Arguments) -> set[int]:
        """The ids of the storages that a call with these arguments may use, as far as programs
        that there are can tell."""
        found = [program.uses(arguments) for kept in self.programs.values() for program in kept]
        return set().union(*found)

    def find(
        self, arguments: Arguments, to_run: bool = True
    ) -> tuple[tuple[Arguments, Program] | None, Mismatch | None]:
        """The program that fits, with the arguments that it takes; and why the first one that
        doesn't fit doesn't.

        Args:
            to_run: whether it is going to run, and so becomes the first that is tried.
        """
        missed: Mismatch | None = None
        for call, programs in self.candidates(arguments):
            for position, program in enumerate(programs):
                if position and program.guards.decides_otherwise(call):
                    continue
                mismatch = program.guards.mismatch(call)
                if mismatch is None:
                    if position and to_run:
                        programs.first(program)
                    return (call, program), missed
                missed = missed or mismatch
        return None, missed

    def _programs_for(self, call: Arguments, where: Any) -> Programs:
        """Those that take their arguments from ``where``, too, and may run with ``call``."""
        fixed: tuple[Any, ...] = ()
        if call.numbers:
            inputs = self.dynamic | call.carried_numbers()
            fixed = tuple(exact(n) for i, n in call.numbers.items() if i not in inputs)
        return self.programs.get((fixed, where, call.carried)) or Programs()

    def keep(self, program: Program, call: Arguments) -> None:
        """Add a program that was made with these arguments."""
        self.latest = weakref.ref(program)
        places = program.traced.carried
        where = tuple(place.where() for place in places)
        fixed = tuple(exact(n) for i, n in call.numbers.items() if i not in program.traced.dynamic)
        key = fixed, where, call.carried
        programs = self.programs.pop(key, None) or Programs()
        self.programs[key] = programs
        programs.first(program)
        for other in [key for key, held in self.programs.items() if not any(held)]:
            del self.programs[other]
        while len(self.programs) > KINDS:
            del self.programs[next(iter(self.programs))]

    def varies(self, arguments: Arguments) -> None:
        """Programs exist, but not for these numbers: from now on those that differ are inputs."""
        if self.last is None or self._static:
            return
        static = arguments.fields if self._static_fields else frozenset()
        numbers = {i: n for i, n in arguments.numbers.items() if i not in static}
        differ = {i for i, n in numbers.items() if exact(n) != exact(self.last[i])}
        if differ - self.dynamic:
            self.dynamic |= differ
            self.programs.clear()

    def explain(self, arguments: Arguments, last: tuple[Arguments, Program] | None) -> str | None:
        """Why there is no program for such arguments; ``last`` is the call that ran last."""
        if last is None:
            return None
        if self.last is not None:
            for i, name in arguments.names_of_numbers().items():
                if i in self.last and exact(self.last[i]) != exact(arguments.numbers[i]):
                    change = f"from {self.last[i]!r} to {arguments.numbers[i]!r}"
                    return f"{name}: {change}{self.why_static}"
        before, program = last
        return (arguments.carrying(program.traced.carried) or arguments).difference(before)
