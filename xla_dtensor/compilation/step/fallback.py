"""What a step is left to whose Python can't be one program: its Python runs in every call."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from typing import Any

from xla_dtensor.base import interrupts
from xla_dtensor.compilation.code.lasting import Since
from xla_dtensor.compilation.step.base_step import BaseStep, logger
from xla_dtensor.compilation.step.family import Family
from xla_dtensor.compilation.step.replayed import ReplayedStep
from xla_dtensor.compilation.trace.items import TracedItems
from xla_dtensor.errors import DataDependentError, NotInStepError, XlaDTensorError
from xla_dtensor.runtime import last_words, processes

# What Python, or a library, raises of a number that has no value yet: `json`, `Decimal`.
_OF_ITEMS = (TypeError, ValueError, AttributeError, struct.error)
# So many kinds of arguments that were refused are enough to know, and to have told.
_ENOUGH = 3
_HOW = 'its Python runs in every call from now on, as with watch="replay"'


class Begun:
    """When a trace began.

    Attributes:
        lasting: what it has done since then that can't be taken back.
    """

    def __init__(self) -> None:
        self._items, self.lasting = TracedItems.given, Since()

    def refused(self, error: Exception) -> XlaDTensorError | None:
        """What is wrong with a step whose trace has raised ``error``, if it isn't the user's: that
        it can't be one program. Python's own errors count where a trace has given items
        (``loss.item()``), which have no value."""
        if isinstance(error, (DataDependentError, NotInStepError)):
            return error
        if TracedItems.given == self._items or isinstance(error, XlaDTensorError):
            return None
        return DataDependentError(_of_an_item(error)) if isinstance(error, _OF_ITEMS) else None


def _of_an_item(error: Exception) -> str:
    return (
        f"what .item() gives has no value before the program has run, and Python wants it "
        f"({type(error).__name__}: {error}){last_words.line(error.__traceback__)}\n"
        "Return it from the step (it is a number then), or move this line out of the compiled "
        "function"
    )


class Fallback(ReplayedStep):
    """A step that is replayed because it couldn't be traced.

    Args:
        step: the one that is traced where it can be; it counts.
        function, compiler_options: its own.
    """

    def __init__(
        self,
        step: BaseStep,
        function: Callable[..., Any],
        compiler_options: dict[str, Any] | None,
    ) -> None:
        super().__init__(function, compiler_options)
        self._step = step
        self._said: set[str] = set()
        self._kinds, self._why = 0, ""

    @interrupts.interruptible
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool) -> Any:
        """Run the step's Python; ``again``: its trace, in this call, has run some of it."""
        try:
            return self(*args, **kwargs)
        except OSError as error:
            if again:
                error.add_note(
                    "(In this call the step's Python has run before, to be traced, up to a line at "
                    'which that can\'t go on; what it did to files stayed. With watch="replay" it '
                    "runs once.)"
                )
            raise

    def serves(self, error: Exception, begun: Begun) -> XlaDTensorError | None:
        """Why a step that can't be traced is to be replayed, if it may be. Where it might, but for
        what has happened, ``error`` says so.

        Args:
            error: what the trace has raised.
            begun: when the trace began.
        """
        refused = begun.refused(error)
        if refused is None:
            return None
        lasting = begun.lasting.what()
        if lasting is not None:
            error.add_note(
                f"(Before this line the step {lasting}. To run its Python once more would do so "
                'twice: it isn\'t done unasked. xd.compile(step, watch="replay") runs it once, in '
                "every call.)"
            )
        if processes.several():
            error.add_note(
                "(In one process the step's Python would run in every call, with a warning; in "
                "several this is an error.)"
            )
        return refused if lasting is None and not processes.several() else None

    def refuse(self, family: Family, why: str) -> None:
        """Say that the step is replayed with arguments of this kind, as it can't be traced."""
        again = family.refusals > 0
        self._kinds += not again
        self._why = why
        self._say(f"can't be one program: {_HOW}, which takes longer. {why}", again)
        family.refuse(why)

    def refuse_as_others(self, family: Family) -> None:
        """Arguments of a kind that hasn't been tried: as those of several others were refused, and
        none is a program, neither is this."""
        if self._kinds >= _ENOUGH and not family.programs:
            family.refuse(self._why, for_good=True)

    def serves_many(self, text: str) -> bool:
        """Whether a step may be replayed that is traced in every call: ``text`` says why."""
        if processes.several():
            return False
        self._say(f"{text}. {_HOW[0].upper()}{_HOW[1:]}.", again=False)
        return True

    def _say(self, text: str, again: bool) -> None:
        again = again or text in self._said or len(self._said) >= _ENOUGH
        level = logging.INFO if again else logging.WARNING
        self._said.add(text)
        logger.log(level, 'xla_dtensor: %s %s (watch="trace" raises instead.)', self._name(), text)

    def _count(self, compiled: bool, why: str | None) -> None:
        self._step._count(compiled, why)
