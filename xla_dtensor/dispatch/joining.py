"""Tensors that a process has of its own, in a call with tensors of all processes' devices."""

from __future__ import annotations

from xla_dtensor.dispatch.call import Call
from xla_dtensor.forms.form import Form
from xla_dtensor.tensors.base import TensorMethods


def join(call: Call) -> bool:
    """Bring tensors of the default device to all devices, if the call has others that are there.

    With one device per process each device has its process's value, as under torch. Else, and
    where one joins a sharded tensor, it counts as replicated, and has to be the same everywhere.

    Returns:
        whether there were any: the call is another one then.

    Raises:
        DivergenceError: values that have to be the same aren't.
    """
    forms = [form for form in call.forms if form.__class__ is Form]
    frame = next((form.frame for form in forms if form.frame is not None), None)
    if frame is None:
        return False
    own = [
        leaf
        for leaf in call.leaves
        if isinstance(leaf, TensorMethods)
        and leaf._storage_.form.frame is None
        and not leaf._storage_.form.meta
    ]
    apart = frame.one_each and not any(form.is_sharded for form in forms)
    for tensor in own:
        if apart:
            tensor._storage_.join(frame, frame.process_axes)
        else:
            tensor._storage_.place(frame)
    return bool(own)
