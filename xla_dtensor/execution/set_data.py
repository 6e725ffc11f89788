"""Replaces a tensor's storage in place (``x.data = y``), and checks when that is refused."""

from __future__ import annotations

import math
from typing import Any

from xla_dtensor.base import executor
from xla_dtensor.errors import UnsupportedOpError


def set_data(tensor: Any, other: Any, name: str) -> None:
    """Make ``tensor`` what ``other`` is: the same view of the same storage.

    Raises:
        NotInStepError: see `check_set_data`.
    """
    check_set_data(tensor, name)
    tensor._become(other)


def check_set_data(tensor: Any, name: str) -> None:
    """Raise if `set_data` would.

    Raises:
        NotInStepError: a step is being compiled, and the tensor is from outside of it.
    """
    now = executor.current()
    if not now.owns(tensor._storage_):
        now.not_in_step(
            f"{name} in a compiled step changes the shape or memory of a tensor "
            f"{list(tensor.shape)} from outside of it, which would happen when the step is "
            "compiled and in no later call; do it before the step, or on a tensor that the step "
            "makes"
        )


def refuse_shared(tensor: Any, name: str, size: tuple[int, ...]) -> None:
    """Raise if other tensors see the memory that ``tensor`` is about to leave."""
    storage = tensor._storage_
    if math.prod(storage.form.shape) and storage.is_shared(tensor):
        raise UnsupportedOpError(
            f"{name}: a tensor of shape {list(tensor.shape)} would need new memory for "
            f"{list(size)}, and other tensors (views of it, or what autograd has saved) share the "
            "memory that it has; make a new tensor instead"
        )
