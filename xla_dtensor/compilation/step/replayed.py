"""Replayed steps, whose Python runs in every call: ``xd.compile(step, watch="replay")``.

The Python computes nothing: its operations are written down, as eager ones are, while the devices
are still at the step before. What was written down is then looked up among the programs that the
step has come to before; another sequence of operations is compiled. So nothing of Python's has to
be watched, and no program can be stale.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from xla_dtensor.base import executor, interrupts
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.compilation.code.garbage import Seldom
from xla_dtensor.compilation.recorded.attempts import Attempt
from xla_dtensor.compilation.step.base_step import BaseStep
from xla_dtensor.compilation.step.lower_only import called_without_data
from xla_dtensor.compilation.step.step_batch import (
    NotingStepBatch,
    Refused,
    ReplayedProgram,
    StepBatch,
)
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.execution import lazy
from xla_dtensor.execution.batch_program import Entry, Outputs
from xla_dtensor.execution.blocks import writing_down
from xla_dtensor.runtime import abstract, processes

SEQUENCES = 256  # sequences of operations whose programs are kept
# After so many calls that leave uncollected results, a program is made that computes these, too.
OFTEN = 3


class ReplayedStep(BaseStep):
    """A step whose Python runs in every call and only writes operations down, which one program
    computes; `compile` makes it with ``watch="replay"``. Call it like the function.

    Attributes:
        compilations: how many programs were compiled so far.
        traces: likewise, as each is made of what one call has written down.
        recompilations: a line for each that came where there was one: where the operations were
            others. (A call that reads a value is several programs, one after the other.)

    Example::

        import torch, xla_dtensor as xd
        calls = []
        def count_and_double(x):
            calls.append(len(calls))
            return x * 2
        step = xd.compile(count_and_double, watch="replay")
        step(torch.ones(4, device="xla")), step(torch.ones(4, device="xla"))
        assert calls == [0, 1] and step.compilations == 1
    """

    _notes_lines: bool

    def __init__(
        self, function: Callable[..., Any], compiler_options: dict[str, Any] | None = None
    ) -> None:
        super().__init__(function, compiler_options)
        self._options = compiler_options
        name = f"replayed step {self._name()}"
        self._programs: Cache[Any, list[ReplayedProgram | Refused]] = Cache(
            f"{name}: programs",
            SEQUENCES,
            size=lambda some: sum(one.size() for one in some),
            stays=True,
        )
        self.clear_cache()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if executor.is_in_step():
            return self._function(*args, **kwargs)  # part of the step around it
        if abstract.current() is not None:
            return called_without_data(self, args, kwargs)
        if processes.several():
            raise UnsupportedOpError(
                f'xd.compile({self._name()}, watch="replay") with several processes: which values '
                "a step leaves behind is up to each process's garbage collector, and all must "
                "launch the same program; compile it without watch="
            )
        if not interrupts.ready():
            interrupts.install()
        lazy.flush_all()
        self._piece = 0
        recorded = (NotingStepBatch if self._notes_lines else StepBatch)(self._next_program)
        try:
            # What is written down is thousands of objects that all go with the call's end: Python
            # would visit them again and again meanwhile, and now and then all others with them.
            with Seldom():
                try:
                    with writing_down(recorded):
                        return self._function(*args, **kwargs)
                finally:
                    recorded.run()
        except BaseException:
            self._notes_lines = True  # for the message, should it fail again
            raise

    def compiled_programs(self) -> list[Any]:
        """The programs that exist: ``jax.stages.Compiled``, those of a sequence together.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2, watch="replay")
            step(torch.ones(4, device="xla"))
            assert "f32[4]" in step.compiled_programs()[-1].as_text()
        """
        known = (one for some in self._programs.values() for one in some)
        return [program.compiled for program in known if isinstance(program, ReplayedProgram)]

    def clear_cache(self) -> None:
        """Forget all programs; the counts stay.

        Example::

            import torch, xla_dtensor as xd
            step = xd.compile(lambda x: x * 2, watch="replay")
            step(torch.ones(4, device="xla"))
            step.clear_cache()
            assert step.compiled_programs() == []
        """
        self._programs.clear()
        # What was compiled last, by which piece of a call it is.
        self._latest: dict[int, ReplayedProgram] = {}
        self._piece = self._uncollected = 0
        # For the message should the operations be others next time.
        self._notes_lines = True

    # --- internals ---------------------------------------------------------------------------

    def _next_program(self, recorded: StepBatch) -> ReplayedProgram | Refused | None:
        """`_program_of` the next piece of a call."""
        program = self._program_of(recorded)
        self._piece += program is not None
        return program

    def _program_of(self, recorded: StepBatch) -> ReplayedProgram | Refused | None:
        """The program of what was written down, compiled if there is none; None if nothing is
        wanted of it any more."""
        wanted = recorded.wanted()
        if not wanted:
            return None
        entries = tuple(recorded.entries)
        known = self._programs.get(entries) or []
        program = _one_of(known, wanted)
        if program is not None:
            self._notes_lines = isinstance(program, Refused)
            return program
        # What cycles alone hold, and Python hasn't collected yet, nobody wants. When it collects
        # is no part of the step: a program for each time it may would be many.
        # Only what is younger than two collections, as all is that this call has made: a full one
        # visits every object of the process, which takes a second where there are millions.
        gc.collect(1)
        if len(recorded) != len(entries):  # finalizers have recorded operations, or read a value
            return self._program_of(recorded)
        collected = recorded.wanted()
        program = _one_of(known, collected)
        if not isinstance(program, ReplayedProgram) or self._uncollected == OFTEN:
            if isinstance(program, ReplayedProgram):
                wanted = tuple(dict.fromkeys((*wanted, *program.outputs)))
                self._uncollected = 0
            else:
                wanted = collected
            program = self._compiled(recorded, entries, wanted)
            self._programs.put(entries, known).append(program)
        else:
            self._uncollected += 1
        return program

    def _compiled(
        self, recorded: StepBatch, entries: tuple[Entry, ...], wanted: Outputs
    ) -> ReplayedProgram | Refused:
        self._notes_lines = True
        attempt = Attempt()
        try:
            with Seldom():
                program = ReplayedProgram(recorded, entries, wanted, self._options)
        except Exception as error:
            if attempt.is_final(error):
                raise
            return Refused(error, self._name(), len(entries))
        before = self._latest.get(self._piece)
        self._count(True, None if before is None else before.difference(program))
        self._latest[self._piece] = program
        return program


def _one_of(
    programs: list[ReplayedProgram | Refused], wanted: Outputs
) -> ReplayedProgram | Refused | None:
    return next((p for p in programs if p.computes(wanted)), None)
