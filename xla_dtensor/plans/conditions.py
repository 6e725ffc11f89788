"""Which arguments of a call have their values checked (indices in range), as part of its plan.

The conditions are said beside the lowerings (`lowering/bounds.py`); executors check them
(`execution/value_checks.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xla_dtensor.base import executor
from xla_dtensor.execution.interfaces import Slot
from xla_dtensor.execution.value_checks import Checked, raise_if_wrong
from xla_dtensor.forms.form import Form
from xla_dtensor.lowering.bounds import bounds_of
from xla_dtensor.plans.call import Call
from xla_dtensor.plans.ops import info_of


def conditions_of(call: Call) -> tuple[Checked, ...]:
    """The checks that calls like this one make of their arguments' values."""
    info = call.info
    find = bounds_of(info.name)
    if find is None:
        return ()
    slots = dict(zip(info.argument_names, call.args, strict=False)) | call.kwargs
    described = {name: _described(value, call.forms) for name, value in slots.items()}
    shapes = [list(form.shape) for form in call.forms if isinstance(form, Form)]
    found = []
    for where, condition in find(described):
        slot = slots[where] if isinstance(where, str) else slots[where[0]][where[1]]
        text = f" ({info.name}, tensors of shapes {', '.join(map(str, shapes))})"
        if not isinstance(slot, Slot):  # a constant of the plan: checked once
            raise_if_wrong(condition, np.asarray(slot), text)
            continue
        form = call.forms[slot.index]
        if isinstance(form, Form) and 0 in form.shape:
            continue
        found.append(Checked(slot.index, form, condition, text))
    return tuple(found)


def look_at(func: Any, args: tuple[Any, ...]) -> None:
    """Look at the arguments of a call that torch takes apart before a plan is made of it.

    Raises:
        Exception: torch's, if something doesn't hold.
    """
    call = Call(info_of(func), args, {})
    executor.current().look(conditions_of(call), call)


def _described(value: Any, forms: list[Any]) -> Any:
    if isinstance(value, Slot):
        return forms[value.index]
    if isinstance(value, list | tuple):
        return [_described(item, forms) for item in value]
    return value
