"""Scans and sorts: the dim that is scanned or sorted is whole, the others may be sharded."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Shard

from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.families.shape import inactive_dims, without_dims
from xla_dtensor.rules.merging import REPLICATE
from xla_dtensor.rules.registry import register


@register("cumsum", "cumprod", "logcumsumexp", "_cummax_helper", "_cummin_helper")
def scan(call: Call) -> Merged:
    """as the input, the scanned dim gathered and partial reduced"""
    x = call.tensors[0]
    used = unpartial(without_dims(x.placements, [call.dim(x.ndim)], x.ndim))
    # The helpers of cummax and cummin write to two more.
    return call.follow([used] * len(call.tensors), used)


@register("sort", "argsort", "topk", "msort")
def sort(call: Call) -> Merged:
    """the dims other than the sorted one, for values and indices"""
    ndim = call.tensors[0].ndim
    dim = call.dim(ndim, default=0 if call.name == "msort" else -1)
    return inactive_dims(call, [dim], new_shards=True)


@register("cummax", "cummin", "cumulative_trapezoid", "diff")
def scan_pairs(call: Call) -> Merged:
    """the dims other than the scanned one"""
    ndim = call.tensors[0].ndim
    return inactive_dims(call, [call.dim(ndim, default=-1)], new_shards=True)


@register("histc")
def histc(call: Call) -> Merged:
    """counts add up, once the bins do not depend on the data"""
    x = call.tensors[0]
    if call.args.get("min") == call.args.get("max"):
        return call.replicate()
    return call.merge([Alternative((Partial(),), (Shard(d),)) for d in range(x.ndim)])


@register("bincount")
def bincount(call: Call) -> Merged:
    """counts add up"""
    n = len(call.tensors)
    return call.merge([Alternative((Partial(),), (Shard(0),) * n)])


@register("multinomial")
def multinomial(call: Call) -> Merged:
    """the batch dim"""
    batch = call.tensors[0].ndim - 1
    return call.merge([Alternative((Shard(0),), (Shard(0),))] if batch else [])


@register("searchsorted.Scalar", "quantile", "nanquantile")
def quantile(call: Call) -> Merged:
    """replicated"""
    whole = (REPLICATE,) * len(call.mesh_shape)
    return call.follow([whole] * len(call.tensors), whole)
