"""Convolution and pooling: batch and channels may be sharded, positions are whole.

Positions need their neighbours; XLA can exchange them, but a result whose positions are sharded is
only worth it where the input came so. Then it is kept.
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.tensor import Partial, Placement, Shard

from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.merging import REPLICATE, TensorInfo
from xla_dtensor.rules.registry import register

R = REPLICATE


def _has(call: Call, name: str) -> bool:
    return isinstance(call.args.get(name), TensorInfo)


@register("convolution", "convolution_overrideable", "cudnn_convolution", "_convolution")
@register("conv1d", "conv2d", "conv3d")
def convolution(call: Call) -> Merged:
    """n c *, o c * -> n o *: contracted channels make a sum; a sharded position is kept"""
    x = call.tensors[0]
    bias = _has(call, "bias")
    outer, inner = (1, 0) if call.args.get("transposed") else (0, 1)

    def option(out: Placement, a: Placement, w: Placement, b: Placement) -> Alternative:
        return Alternative((out,), (a, w, b) if bias else (a, w))

    grouped = call.args.get("groups", 1) != 1
    options = [option(Shard(0), Shard(0), R, R)]
    if not grouped:
        options += [
            option(Shard(1), R, Shard(outer), Shard(0)),
            option(Partial(), Shard(1), Shard(inner), Partial()),
        ]
    elif not call.args.get("transposed"):
        options.append(option(Shard(1), Shard(1), Shard(0), Shard(0)))
    positions = (option(Shard(d), Shard(d), R, R) for d in range(2, x.ndim))
    return call.merge([*options, *(replace(o, exchanges=True) for o in positions)])


@register("convolution_backward", "convolution_backward_overrideable")
def convolution_backward(call: Call) -> Merged:
    """gradients of n c *, o c * -> n o *; those of the parameters are sums over the batch"""
    x = call.tensors[1]
    outer, inner = (1, 0) if call.args.get("transposed") else (0, 1)

    def option(*slots: Placement) -> Alternative:
        return Alternative(slots[: call.n_outputs], slots[3:])

    options = [option(Shard(0), Partial(), Partial(), Shard(0), Shard(0), R)]
    if call.args.get("groups", 1) == 1:
        options += [
            option(Partial(), Shard(outer), Shard(0), Shard(1), R, Shard(outer)),
            option(Shard(1), Shard(inner), R, R, Shard(1), Shard(inner)),
        ]
    positions = (
        option(Shard(d), Partial(), Partial(), Shard(d), Shard(d), R) for d in range(2, x.ndim)
    )
    return call.merge([*options, *(replace(o, exchanges=True) for o in positions)])


_SPATIAL = {"1d": 1, "2d": 2, "3d": 3}


def _spatial(call: Call) -> int:
    return next(n for mark, n in _SPATIAL.items() if mark in call.name)


_AVERAGES = [f"{kind}{n}d" for kind in ("avg_pool", "adaptive_avg_pool") for n in (1, 2, 3)]
_AVERAGES += ["_adaptive_avg_pool2d", "_adaptive_avg_pool3d"]
_MAXIMA = [f"{kind}{n}d" for kind in ("max_pool", "adaptive_max_pool") for n in (1, 2, 3)]
_MAXIMA += [f"{kind}{n}d" for kind in ("fractional_max_pool", "max_unpool") for n in (2, 3)]
_MAXIMA += [f"max_pool{n}d_with_indices" for n in (1, 2, 3)]
_UPSAMPLES = [
    f"{prefix}{kind}{suffix}"
    for prefix, kind, suffix in [
        *(("", f"upsample_nearest{n}d", "") for n in (1, 2, 3)),
        *(("", f"_upsample_nearest_exact{n}d", "") for n in (1, 2, 3)),
        *(("", f"_upsample_{k}2d_aa", "") for k in ("bilinear", "bicubic", "lanczos")),
        ("", "upsample_linear1d", ""),
        ("", "upsample_bilinear2d", ""),
        ("", "upsample_bicubic2d", ""),
        ("", "upsample_trilinear3d", ""),
    ]
]
_BACKWARDS = [
    *("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    *("adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("fractional_max_pool2d", "fractional_max_pool3d", "max_pool2d"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices"),
]


def _batch_and_channel(call: Call, linear: bool) -> Merged:
    x = call.tensors[0]
    n, outs = len(call.tensors), call.n_outputs
    slots: list[Placement] = [Shard(d) for d in range(x.ndim - _spatial(call))]
    if linear and n == 1:
        slots += [Partial("sum"), Partial("avg")]
    options = [Alternative((slot,) * outs, (slot,) * n) for slot in slots]
    # Torch makes shards of a pooled partial, but not of an interpolated one.
    return call.merge(options, new_shards="pool" in call.name and "backward" not in call.name)


@register(*_AVERAGES, *_UPSAMPLES, *(f"{name}_backward" for name in _UPSAMPLES))
def linear_pool(call: Call) -> Merged:
    """batch and channel; linear"""
    return _batch_and_channel(call, linear=True)


@register(*_MAXIMA, *(f"{name}_backward" for name in _BACKWARDS))
def pool(call: Call) -> Merged:
    """batch and channel"""
    return _batch_and_channel(call, linear=False)


@register(
    "grid_sampler_2d", "grid_sampler_3d", "grid_sampler_2d_backward", "grid_sampler_3d_backward"
)
def grid_sampler(call: Call) -> Merged:
    """batch; linear in the image"""
    n, outs = len(call.tensors), call.n_outputs
    options = [Alternative((Shard(0),) * outs, (Shard(0),) * n)]
    if "backward" not in call.name:
        options += [Alternative((Partial(op),), (Partial(op), R)) for op in ("sum", "avg")]
    return call.merge(options)
