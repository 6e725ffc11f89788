"""The observer that is called for each operation: none, unless `xla_dtensor.debug` sets one.

A call on the hot path costs one look at ``events.observer``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from xla_dtensor.base import executor


class Observer(Protocol):
    """What is told. Forms (`xla_dtensor.forms.form.Form`) are those before and after."""

    def planned(self, call: Any, plan: Any) -> None:
        """A call (`plans.call.Call`) is about to go through the general path, by its plan: what
        is raised here is raised by it, before anything is computed."""

    def operation(self, call: Any, plan: Any) -> None:
        """A call (`plans.call.Call`) has gone through the general path, by its plan."""

    def special(
        self, run: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return ``run(func, args, kwargs)``, a call that may leave the general path."""

    def redistribute(self, source: Any, target: Any) -> None:
        """A sharded tensor gets another layout."""

    def to_local(self, source: Any, target: Any) -> None:
        """What devices hold of a sharded tensor is looked at."""

    def from_local(self, source: Any, target: Any) -> None:
        """What devices hold becomes a sharded tensor."""

    def relayout(self, convert: Any, source: Any, target: Any) -> None:
        """``convert`` computes the array of another form: a collective, a gathering, a view."""

    def function(self, op: Any, inputs: Sequence[Any]) -> AbstractContextManager[None]:
        """For the time of a `DFunction` call, ``op`` its `DistributedOp`, on sharded ``inputs``."""

    def inferred(self, inferred: Any) -> None:
        """What the rule of the present `DFunction` call says; its inputs are in place."""

    def compiled(self, name: str) -> None:
        """A compiled step runs a program that was traced before."""

    def launched(self, program: Any, part: str, text: Callable[[], str]) -> None:
        """A compiled step's program (`compilation.program.Program`) has been launched, or its
        backward pass; ``text`` gives what XLA made of that part."""


observer: Observer | None = None
"""Who is told; `observe` says who."""


def observe(by: Observer | None) -> None:
    """Tell ``by`` of operations from now on; None: nobody."""
    global observer
    observer = by
    executor.choose()


before_waiting: list[Callable[[], None]] = []
"""Who has something that waits to be begun."""


def settle() -> None:
    """Have everything that was asked for begun."""
    for function in before_waiting:
        function()
