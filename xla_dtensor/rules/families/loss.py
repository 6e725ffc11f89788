"""Losses: the class dim is whole; reducing over a sharded batch leaves the loss partial."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Shard

from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.families.pointwise import elementwise_alternatives
from xla_dtensor.rules.families.shape import without_dims
from xla_dtensor.rules.merging import (
    REPLICATE,
    TensorInfo,
    is_even,
    map_shards,
    shard_dim,
)
from xla_dtensor.rules.registry import register

NONE, MEAN, SUM = 0, 1, 2
_PENDING = {MEAN: Partial("avg"), SUM: Partial("sum")}

_ELEMENTWISE = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss
    binary_cross_entropy_with_logits kl_div poisson_nll_loss hinge_embedding_loss
"""

_BACKWARD = """
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss
"""


@register(*_ELEMENTWISE.split())
def elementwise_loss(call: Call) -> Merged:
    """elementwise, then reduced"""
    reduction = call.args.get("reduction", NONE)
    options = elementwise_alternatives(call.tensors)
    if reduction == NONE:
        return call.merge(options)
    merged = call.merge(options)
    shape = max((t.shape for t in call.tensors), key=len)
    result = TensorInfo(shape, merged.outputs[0], call.tensors[0].dtype)
    even = all(is_even(result, d, call.mesh_shape) for d in range(result.ndim))
    pending: Placement = _PENDING[reduction] if even or reduction == SUM else REPLICATE
    out = tuple(pending if shard_dim(p) is not None else p for p in merged.outputs[0])
    return call.follow(merged.inputs, out)


@register(*(f"{name}_backward" for name in _BACKWARD.split()))
def elementwise_loss_backward(call: Call) -> Merged:
    """elementwise; the gradient of a reduced loss is a scalar"""
    shape = call.out_shapes[0]
    return call.merge(
        [
            Alternative(
                tuple(
                    REPLICATE if s is None or s != shape else a.outputs[0] for s in call.out_shapes
                ),
                a.inputs,
            )
            for a in elementwise_alternatives(call.tensors, 1)
        ]
    )


def _classes(x: TensorInfo) -> int:
    return 1 if x.ndim >= 2 else 0


@register("nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss_nd")
def nll_loss(call: Call) -> Merged:
    """n c!, n -> n, then reduced; the total weight is a sum"""
    x, target = call.tensors[:2]
    classes = _classes(x)
    used = unpartial(without_dims(x.placements, [classes], x.ndim))
    per_item = map_shards(used, {d: d - (d > classes) for d in range(x.ndim) if d != classes})
    inputs = [used, per_item] + [(REPLICATE,) * len(used)] * (len(call.tensors) - 2)
    reduction = call.args["reduction"]
    whole = (REPLICATE,) * len(used)
    if reduction == NONE:
        outputs = [per_item, whole]
    else:
        even = TensorInfo(target.shape, per_item, target.dtype)
        if reduction == MEAN and not all(
            is_even(even, d, call.mesh_shape) for d in range(target.ndim)
        ):
            outputs = [whole, whole]
        else:
            pending = _PENDING[reduction]
            outputs = [
                tuple(pending if shard_dim(p) is not None else p for p in per_item),
                tuple(Partial("sum") if shard_dim(p) is not None else p for p in per_item),
            ]
    return Merged(tuple(inputs), tuple(outputs[: call.n_outputs]))


@register("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(call: Call) -> Merged:
    """as the forward's input"""
    x = call.tensor("self")
    classes = _classes(x)
    used = unpartial(without_dims(x.placements, [classes], x.ndim))
    per_item = map_shards(used, {d: d - (d > classes) for d in range(x.ndim) if d != classes})
    whole = (REPLICATE,) * len(used)
    grad = per_item if call.args["reduction"] == NONE else whole
    inputs = [grad, used, per_item] + [whole] * (len(call.tensors) - 3)
    return call.follow(inputs, used)


@register("cross_entropy_loss")
def cross_entropy(call: Call) -> Merged:
    """n c!, n -> n, then reduced"""
    x, target = call.tensors[:2]
    if x.shape != target.shape:
        return nll_loss(call)
    classes = _classes(x)
    merged = call.merge(
        [Alternative((Shard(d),), (Shard(d),) * 2) for d in range(x.ndim) if d != classes]
        if len(call.tensors) == 2
        else []
    )
    reduction = call.args["reduction"]
    if reduction == NONE:
        per_item: dict[int, int | None] = {
            d: d - (d > classes) for d in range(x.ndim) if d != classes
        }
        return call.follow(merged.inputs, map_shards(merged.outputs[0], per_item))
    pending = _PENDING[reduction]
    return call.follow(
        merged.inputs, tuple(pending if shard_dim(p) is not None else p for p in merged.outputs[0])
    )
