"""Who is told of operations while they run: nobody, unless `xla_dtensor.debug` looks.

A call on the hot path costs one look at ``_observe.observer``.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xla_dtensor.custom_ops.distributed_op import DistributedOp, Inferred
    from xla_dtensor.dispatch.call import Call
    from xla_dtensor.dispatch.plan import Plan, ViewPlan
    from xla_dtensor.forms.form import Form


class Observer(Protocol):
    """What is told. Forms are those before and after."""

    def operation(self, call: Call, plan: Plan | ViewPlan) -> None:
        """A call has gone through dispatch's general path."""

    def special(
        self, run: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return ``run(func, args, kwargs)``, a call that may leave the general path."""

    def redistribute(self, source: Form, target: Form) -> None:
        """A sharded tensor gets another layout."""

    def to_local(self, source: Form, target: Form) -> None:
        """What devices hold of a sharded tensor is looked at."""

    def from_local(self, source: Form, target: Form) -> None:
        """What devices hold becomes a sharded tensor."""

    def relayout(self, convert: Any, source: Form, target: Form) -> None:
        """``convert`` computes the array of another form: a collective, a gathering, a view."""

    def function(self, op: DistributedOp, inputs: Sequence[Any]) -> AbstractContextManager[None]:
        """For the time of a `DFunction` call on the sharded tensors ``inputs``."""

    def inferred(self, inferred: Inferred) -> None:
        """What the rule of the present `DFunction` call says; its inputs are in place."""

    def compiled(self, name: str) -> None:
        """A compiled step runs a program that was traced before."""


class _FromEnvironment:
    """Until the first operation, whose observers the environment asks for."""

    def __getattr__(self, name: str) -> Any:
        importlib.import_module("xla_dtensor.debug")  # makes them
        return getattr(observer, name)


ENVIRONMENT_VARIABLE = "XLA_DTENSOR_LOGS"

observer: Any = _FromEnvironment() if os.environ.get(ENVIRONMENT_VARIABLE) else None
"""An `Observer`, or None."""
