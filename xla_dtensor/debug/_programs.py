"""The text of the compiled program of an operation."""

from __future__ import annotations

from typing import Any

import jax

from xla_dtensor.base import executor
from xla_dtensor.base.random import rng
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.read import read
from xla_dtensor.forms.views import leave_open
from xla_dtensor.plans.call import Call
from xla_dtensor.plans.plan import Plan
from xla_dtensor.tensors.of_form import is_ours


def program_text(plan: Plan, call: Call) -> str:
    """The text of the program that ``plan`` runs for the call. It is compiled once more."""
    leaves: list[Any] = [
        leaf if not isinstance(form, Form) else read(leaf) if is_ours(leaf) else to_numpy(leaf)
        for leaf, form in zip(call.leaves, call.forms, strict=True)
    ]
    written = [call.leaves[i] for i in plan.mutated]
    bases = [(t._storage_.array, leave_open(t._steps)[1]) if t._steps else None for t in written]
    state = rng.keyed(rng.words()) if plan.random else None
    with jax.enable_x64(True), executor.running_at_once():
        return plan.eager.jitted.lower(state, leaves, bases).compile().as_text()
