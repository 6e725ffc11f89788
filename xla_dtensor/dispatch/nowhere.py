"""Operations whose results are nowhere: where tensors have layouts and no data (``xd.abstract``), a
plan says what comes of a call, and nothing is computed."""

from __future__ import annotations

from xla_dtensor.dispatch.plan import Plan
from xla_dtensor.forms.form import Form
from xla_dtensor.runtime.abstract_array import AbstractArray


def array(form: Form) -> AbstractArray:
    """What stands for the array of a tensor of ``form``."""
    return AbstractArray(form.array_shape, form.jax_dtype, form.sharding)


def results(plan: Plan) -> list[AbstractArray]:
    """What stands for the arrays that a plan computes: its results, and what it writes."""
    return [array(form) for form in (*plan.result_forms, *plan.base_forms) if form is not None]
