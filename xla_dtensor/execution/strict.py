"""`Strict`: the executor that launches each operation at once (``xd.config.eager``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xla_dtensor.base import assertions
from xla_dtensor.base.config import config
from xla_dtensor.execution import value_checks
from xla_dtensor.execution.interfaces import Call, Plan
from xla_dtensor.execution.running import Running, launched
from xla_dtensor.forms.sharing import launching


class Strict(Running):
    """Launches each operation by a program of its own."""

    def perform(self, plan: Plan, call: Call) -> Any:
        with launching():
            return super().perform(plan, call)

    def look(self, checked: tuple[Any, ...], call: Call) -> None:
        if config.checks in assertions.EAGER:
            value_checks.check(checked, call)

    def compute(self, plan: Plan, call: Call) -> Iterable[Any]:
        arrays: Iterable[Any] = launched(plan, call)
        return arrays
