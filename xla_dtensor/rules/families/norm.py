"""Softmax and the normalizations: the normalized dims are whole, the others may be sharded.

A backward gives the weight's gradient as a sum over the batch: partial where that is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed.tensor import Partial, Placement, Shard

from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.rules.alternatives import Alternative, Merged, merge
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.families.shape import without_dims
from xla_dtensor.rules.merging import REPLICATE, TensorInfo, shard_dim
from xla_dtensor.rules.registry import register

R = REPLICATE


@register("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")
@register("_softmax_backward_data", "_log_softmax_backward_data")
def softmax(call: Call) -> Merged:
    """as the (most sharded) input, the normalized dim gathered and partial reduced"""

    def shards(x: TensorInfo) -> int:
        sizes = zip(x.placements, call.mesh_shape, strict=True)
        return math.prod(n for p, n in sizes if shard_dim(p) is not None)

    x = max(call.tensors, key=shards)
    used = unpartial(without_dims(x.placements, [call.dim(x.ndim)], x.ndim))
    return call.follow([used] * len(call.tensors), used)


def _normalized_from(x: TensorInfo, call: Call) -> int:
    shape = call.args["normalized_shape"]
    return x.ndim - (1 if isinstance(shape, int) else len(shape))


def _params(call: Call, *names: str) -> tuple[Placement, ...]:
    return tuple(R for name in names if isinstance(call.args.get(name), TensorInfo))


def _rows(call: Call) -> list[Alternative]:
    x = call.tensor("input")
    params = _params(call, "weight", "bias")
    return [
        Alternative((Shard(d),) * call.n_outputs, (Shard(d), *params))
        for d in range(_normalized_from(x, call))
    ]


@register("native_layer_norm", "layer_norm")
def layer_norm(call: Call) -> Merged:
    """the dims before the normalized ones, for the result and its statistics"""
    return call.merge(_rows(call))


@register("_fused_rms_norm", "rms_norm")
def rms_norm(call: Call) -> Merged:
    """as layer_norm, and partial reduced"""
    return _of_whole(call, _rows(call))


def _rows_backward(call: Call) -> list[Alternative]:
    x = call.tensor("input")
    params = _params(call, "weight", "bias")
    n_data = len(call.tensors) - len(params)
    return [
        Alternative(
            (Shard(d), *(Partial(),) * (call.n_outputs - 1)),
            ((Shard(d),) * n_data + params),
        )
        for d in range(_normalized_from(x, call))
    ]


@register("native_layer_norm_backward")
def layer_norm_backward(call: Call) -> Merged:
    """as layer_norm; the parameters' gradients are sums over the batch"""
    return call.merge(_rows_backward(call))


@register("_fused_rms_norm_backward")
def rms_norm_backward(call: Call) -> Merged:
    """as rms_norm; the weight's gradient is a sum over the batch"""
    return _of_whole(call, _rows_backward(call))


def _of_whole(call: Call, options: list[Alternative]) -> Merged:
    """Sums of parts are added up, and not cut over the sequence on the way, though that is cheaper:
    what follows would have to gather it. (Llama 3 8B on v5e:16x16 moved 2.1 times the bytes.)"""
    whole = [replace(t, placements=unpartial(t.placements)) for t in call.tensors]
    return merge(options, whole, call.n_outputs, call.mesh_shape)


@register("native_group_norm")
def group_norm(call: Call) -> Merged:
    """the batch dim"""
    params = _params(call, "weight", "bias")
    return call.merge([Alternative((Shard(0),) * call.n_outputs, (Shard(0), *params))])


@register("native_group_norm_backward")
def group_norm_backward(call: Call) -> Merged:
    """the batch dim; the parameters' gradients are sums over it"""
    params = _params(call, "weight")
    data = (Shard(0),) * (len(call.tensors) - len(params))
    return call.merge([Alternative((Shard(0), Partial(), Partial()), data + params)])


def _per_dim(tensors: Sequence[TensorInfo], dim: int, channel: Placement) -> list[Placement]:
    """`dim` for tensors with a batch dim, `channel` for those of one value per channel."""
    return [Shard(dim) if t.ndim > 1 else channel for t in tensors]


@register(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "cudnn_batch_norm",
    "batch_norm",
)
def batch_norm(call: Call) -> Merged:
    """the channels; or the batch and positions, whose statistics are then whole"""
    x = call.tensors[0]
    whole = _whole_statistics(call)
    options = []
    for d in [1, *(d for d in range(x.ndim) if d != 1)]:
        channel: Placement = Shard(0) if d == 1 else R
        outs = [Shard(d) if i == 0 else channel for i in range(call.n_outputs)]
        for i, shape in enumerate(call.out_shapes):
            if i and (shape is None or shape != (x.shape[1],)):
                outs[i] = R
        inputs = tuple(_per_dim(call.tensors, d, channel))
        options.append(Alternative(tuple(outs), inputs, exchanges=whole and d != 1))
    return call.merge(options)


def _whole_statistics(call: Call) -> bool:
    """Whether mean and variance are taken of the batch, and not given."""
    given = call.name.endswith("_no_training")
    return not given and bool(call.args.get("training", call.args.get("train", True)))


@register("native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward")
def batch_norm_backward(call: Call) -> Merged:
    """the channels; or the batch and positions, over which the parameters' gradients are sums"""
    x = call.tensors[0]
    options = []
    for d in [1, *(d for d in range(x.ndim) if d != 1)]:
        channel: Placement = Shard(0) if d == 1 else R
        gradient: Placement = Shard(0) if d == 1 else Partial()
        options.append(
            Alternative(
                (Shard(d), *(gradient,) * (call.n_outputs - 1)),
                tuple(_per_dim(call.tensors, d, channel)),
                exchanges=d != 1,
            )
        )
    return call.merge(options)
