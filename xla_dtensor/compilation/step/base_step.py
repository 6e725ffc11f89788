"""The base of watched and replayed steps: name, method binding, counts of traces and programs."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

from xla_dtensor.base.tables import counters
from xla_dtensor.compilation.step.copied import deep_copy, reduced

logger = logging.getLogger("xla_dtensor")

TOLD = 20  # recompilations of a step that are logged as warnings


class BaseStep:
    """A step: its name, that it can be a method, and its counts.

    Args:
        function: the step's Python.
        asked: with what else a copy is made.
    """

    __call__: Callable[..., Any]
    __deepcopy__ = deep_copy
    __reduce__ = reduced

    def __init__(self, function: Callable[..., Any], *asked: Any) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._asked = function, asked
        self.compilations = self.traces = 0
        self.recompilations: list[str] = []

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _name(self) -> str:
        return name_of(self._function)

    def _count(self, compiled: bool, why: str | None) -> None:
        """Count a program: whether XLA had to compile it, and why those before wouldn't do."""
        self.traces += 1
        counters.add("traces")
        if not compiled:
            return
        self.compilations += 1
        counters.add("compilations")
        if why is not None:
            self.recompilations.append(why)
            counters.add("recompilations")
            # Steps that nobody has written (transformers' `generate`) have lengths of their own.
            own = str(getattr(self._function, "__module__", "")).startswith("xla_dtensor.")
            often = len(self.recompilations)
            level = logging.INFO if own or often > TOLD else logging.WARNING
            logger.log(level, "xla_dtensor: recompiled %s: %s", self._name(), why)
            if often == TOLD and not own:
                logger.warning(
                    "xla_dtensor: recompiled %s %d times; its recompilations has this list, and "
                    "what comes is logged with INFO",
                    *(self._name(), often),
                )


def name_of(function: Any) -> str:
    """What messages call a function."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__
