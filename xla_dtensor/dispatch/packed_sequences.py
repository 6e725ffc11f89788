"""Routes of packed sequences: their lengths are CPU tensors, so shapes are known on the host."""

from __future__ import annotations

import math
from typing import Any

import torch

from xla_dtensor.plans.ops import handles
from xla_dtensor.tensors.of_form import is_ours


def _positions(shape: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    """Where in the first two dims, as one, the packed steps come from; how many each step has."""
    numbers = torch.arange(math.prod(shape[:2])).view(shape[:2])
    return torch.ops.aten._pack_padded_sequence.default(numbers, lengths, batch_first)


@handles("aten::_pack_padded_sequence.default")
def _pack(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, lengths, batch_first = args
    if is_ours(lengths):
        raise RuntimeError("'lengths' argument should be a 1D CPU int64 tensor, not one on xla")
    steps = x.shape[1 if batch_first else 0]
    if lengths.numel() and int(lengths.max()) > steps:  # CPU torch reads what lies behind
        raise RuntimeError(f"a sequence of {int(lengths.max())} steps in {steps} steps")
    positions, batch_sizes = _positions(x.shape, lengths, batch_first)
    return x.flatten(0, 1).index_select(0, positions.to(x.device)), batch_sizes


@handles("aten::_pack_padded_sequence_backward.default")
def _pack_backward(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    grad, shape, batch_sizes, batch_first = args
    lengths = (batch_sizes[:, None] > torch.arange(int(batch_sizes[0]))).sum(0)
    positions, _ = _positions(shape, lengths, batch_first)
    flat = grad.new_zeros([math.prod(shape[:2]), *shape[2:]])
    return flat.index_copy(0, positions.to(grad.device), grad).view(shape)
