"""Eager calls in several processes: all must execute the same, and may mix in their own tensors."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.execution.interfaces import Call
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.runtime import agreement, arrays
from xla_dtensor.tensors.of_form import is_ours


def joins(call: Call) -> bool:
    """Bring tensors of the default device to all devices, if the call has others that are there.

    With one device per process each device has its process's value, as under torch. Else, and
    where one joins a sharded tensor, it counts as replicated, and has to be the same everywhere.

    Returns:
        whether there were any: the call is another one then.

    Raises:
        DivergenceError: values that have to be the same aren't.
    """
    if _join(call):
        return True
    if agreement.every_launch():
        agree(call, f" at the seed and position {call.stream.position()}")
    return False


def _join(call: Call) -> bool:
    forms = [form for form in call.forms if form.__class__ is Form]
    frame = next((form.frame for form in forms if form.frame is not None), None)
    if frame is None:
        return False
    own = [
        leaf
        for leaf in call.leaves
        if is_ours(leaf) and leaf._storage_.form.frame is None and not leaf._storage_.form.meta
    ]
    apart = frame.one_each and not any(form.is_sharded for form in forms)
    if not apart:
        hosts = [leaf for leaf in call.leaves if _is_of_the_host(leaf)]
        arrays.check_same(map(to_numpy, hosts), "combines with sharded tensors, from the CPU,")
    for tensor in own:
        if apart:
            tensor._storage_.join(frame, frame.process_axes)
        else:
            tensor._storage_.place(frame)
    return bool(own)


def _is_of_the_host(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_ours(leaf)


def agree(call: Any, details: str = "") -> None:
    """Let all processes execute the same operation, if it is one on sharded tensors. On per-device
    tensors no device waits for another: a process may do it alone, or something else."""
    if any(form.__class__ is Form and form.is_sharded for form in call.forms):
        agreement.agree(lambda: f"executes {call.described()}{details}")
