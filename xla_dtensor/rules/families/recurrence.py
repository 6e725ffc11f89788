"""Recurrent layers (`lowering/nn/recurrence.py`): the batch may be sharded, the sequence not."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.merging import TensorInfo
from xla_dtensor.rules.registry import register

_BATCH: dict[str, Placement] = {
    **dict.fromkeys(("gates", "grad_states", "states", "cells", "of_hidden"), Shard(1)),
    **dict.fromkeys(("hx", "cx", "grad_h", "grad_c"), Shard(0)),
}
"""The batch's dim of each argument that has one."""


def _by_batch(call: Call, results: tuple[Placement, ...]) -> Merged:
    tensors = [(n, x) for n, x in call.args.items() if isinstance(x, TensorInfo)]
    inputs = tuple(_BATCH.get(n, Replicate()) if x.shape else Replicate() for n, x in tensors)
    # What there is none of is a scalar.
    shapes = zip(results, call.out_shapes, strict=True)
    return call.merge([Alternative(tuple(p if s else Replicate() for p, s in shapes), inputs)])


@register("recurrence", namespace="xla_dtensor")
def recurrence(call: Call) -> Merged:
    """t! b g!, b h! -> t! b h!, b h!, and likewise what the backward needs"""
    return _by_batch(call, (Shard(1), Shard(0), Shard(0), Shard(1), Shard(1)))


@register("recurrence_backward", namespace="xla_dtensor")
def recurrence_backward(call: Call) -> Merged:
    """as the forward's; the weights' gradients are sums over the batch"""
    return _by_batch(call, (Shard(1), Shard(0), Shard(0), Partial(), Partial(), Partial()))
