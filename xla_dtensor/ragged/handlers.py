"""Who executes which operations on tensors of so many rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.ragged.tensor import RaggedTensor

HANDLERS: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {}


def takes(*names: str) -> Callable[[Any], Any]:
    """Register who executes the overloads, or all of an op."""

    def register(function: Any) -> Any:
        HANDLERS.update({f"aten::{n}" if "::" not in n else n: function for n in names})
        return function

    return register


def plain(tensor: Any) -> Any:
    """The buffer of a tensor of so many rows; others as they are."""
    if not isinstance(tensor, RaggedTensor):
        return tensor
    if tensor.buffer is None:
        return torch.empty((), dtype=tensor.dtype, device="xla")
    return tensor.buffer
