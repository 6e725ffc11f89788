"""Rules of factories that take a tensor as their model (``zeros_like``)."""

from __future__ import annotations

from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.rules.alternatives import Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.merging import shard_dim
from xla_dtensor.rules.registry import register


@register("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
def like(call: Call) -> Merged:
    """as the input; a made value is not partial"""
    x = call.tensors[0]
    rest = [t.placements for t in call.tensors[1:]]
    return call.follow([x.placements, *rest], unpartial(x.placements))


@register("empty_like")
def empty_like(call: Call) -> Merged:
    """as the input, partial included: it is about to be written"""
    placements = call.tensors[0].placements
    return call.follow([placements], placements)


@register("new_zeros", "new_ones", "new_full")
def new_filled(call: Call) -> Merged:
    """as the input if that has shards and the same shape; else replicated"""
    x = call.tensors[0]
    inputs = [t.placements for t in call.tensors]
    sharded = any(shard_dim(p) is not None for p in x.placements)
    whole = call.replicate().inputs[0]
    follows = call.out_shapes[0] == x.shape and sharded
    return call.follow(inputs, x.placements if follows else whole)


@register("new_empty", "new_empty_strided")
def new_empty(call: Call) -> Merged:
    """as the input if that has the same shape, partial included; else replicated"""
    x = call.tensors[0]
    whole = call.replicate().inputs[0]
    return call.follow([x.placements], x.placements if call.out_shapes[0] == x.shape else whole)
