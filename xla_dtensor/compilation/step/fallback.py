"""What a step is left to whose Python can't be one program: its Python runs in every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xla_dtensor.base import interrupts
from xla_dtensor.compilation.code.lasting import Since
from xla_dtensor.compilation.step.base_step import BaseStep, logger
from xla_dtensor.compilation.step.replayed import ReplayedStep
from xla_dtensor.compilation.trace.items import TracedItems
from xla_dtensor.errors import DataDependentError
from xla_dtensor.runtime import processes

# What Python, or a library, raises of a number that has no value yet: `json`, `Decimal`.
_OF_ITEMS = (TypeError, ValueError, AttributeError)
_HOW = 'its Python runs in every call from now on, as with watch="replay"'


class Begun:
    """When a trace began.

    Attributes:
        lasting: what it has done since then that can't be taken back.
    """

    def __init__(self) -> None:
        self._items, self.lasting = TracedItems.given, Since()

    def gave_items(self) -> bool:
        """Whether it has given items since then (``loss.item()``), which have no value."""
        return TracedItems.given != self._items


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

    @interrupts.interruptible
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def serves(self, error: Exception, begun: Begun) -> bool:
        """Whether a step that can't be traced may be replayed. Where it might, but for what has
        happened, ``error`` says so.

        Args:
            error: what the trace has raised.
            begun: when the trace began.
        """
        for_want_of_it = type(error) in _OF_ITEMS and begun.gave_items()
        if not (isinstance(error, DataDependentError) or for_want_of_it):
            return False
        lasting, instead = begun.lasting.what(), 'so that it isn\'t left to watch="replay"'
        if lasting is not None:
            error.add_note(f"(The step {lasting}: it has happened once, {instead}.)")
        if processes.several():
            error.add_note(f"(There are several processes, {instead}, which is for one.)")
        return lasting is None and not processes.several()

    def tell(self, error: Exception) -> str:
        """Say that the step is replayed, as its trace has raised ``error``; returns why."""
        why = str(error)
        if not isinstance(error, DataDependentError):
            why = f"what .item() gives has no value while the step is traced ({error!r})"
        self._say(f"can't be one program: {_HOW}, which takes longer. {why}")
        return why

    def serves_many(self, text: str) -> bool:
        """Whether a step may be replayed that is traced in every call: ``text`` says why."""
        if processes.several():
            return False
        self._say(f"{text}. {_HOW[0].upper()}{_HOW[1:]}.")
        return True

    def _say(self, text: str) -> None:
        logger.warning('xla_dtensor: %s %s (Not with watch="trace".)', self._name(), text)

    def _count(self, compiled: bool, why: str | None) -> None:
        self._step._count(compiled, why)
