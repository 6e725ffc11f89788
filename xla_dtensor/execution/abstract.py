"""The executor of ``xd.abstract``: plans say what results are like; nothing is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xla_dtensor.execution.interfaces import Call, Plan
from xla_dtensor.execution.running import Running
from xla_dtensor.forms.form import Form
from xla_dtensor.runtime.abstract_array import AbstractArray
from xla_dtensor.tensors.of_form import new_tensor


def array_of(form: Form) -> AbstractArray:
    """An array without data, with the shape, dtype and sharding of ``form``."""
    return AbstractArray(form.array_shape, form.jax_dtype, form.sharding)


class Abstract(Running):
    """Gives each result its form, and an `AbstractArray`."""

    has_values = False

    def moving(self, storage: Any) -> None:
        storage.check_loss()

    def new_array(self, form: Form, eager: Any, traced: Any) -> AbstractArray:
        return array_of(form)

    def compute(self, plan: Plan, call: Call) -> Iterable[Any]:
        forms = (*plan.result_forms, *plan.base_forms)
        return [array_of(form) for form in forms if form is not None]

    def convert(self, tensor: Any, form: Form, conversion: Any, traced: Any) -> Any:
        return new_tensor(array_of(form), form)
