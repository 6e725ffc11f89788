"""Reductions: a shard of a reduced dim leaves the result partial.

A partial input may go on only if it is pending the same reduction; otherwise, and for reductions
that parts cannot be put together from (variance, argmax), the reduced dims are gathered first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from torch.distributed.tensor import Partial, Placement, Shard

from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.merging import (
    REPLICATE,
    Placements,
    TensorInfo,
    is_even,
    moved_to,
    norm_partial,
    shard_dim,
)
from xla_dtensor.rules.registry import Rule, register

Reduction: TypeAlias = str | Placement | None
"""A reduce op, a partial placement of another kind, or None where parts do not combine."""


def reduced_dim_map(ndim: int, dims: Iterable[int], keepdim: bool) -> dict[int, int | None]:
    """Where each input dim is in the output; None for a reduced one."""
    reduced = set(dims)
    result: dict[int, int | None] = {}
    at = 0
    for d in range(ndim):
        result[d] = None if d in reduced else at
        at += keepdim or d not in reduced
    return result


def reduce_placements(
    x: TensorInfo,
    dims: Iterable[int],
    keepdim: bool,
    reduction: Reduction,
    mesh_shape: Sequence[int],
) -> tuple[Placements, Placements]:
    """The layout to use `x` in, and the result's."""
    dims = set(dims) & set(range(x.ndim))  # a 0-d tensor has, by courtesy, a dim 0
    combines = reduction is not None
    if reduction == "avg":
        # The average of averages weighs every device the same.
        combines = all(is_even(x, d, mesh_shape) for d in dims)
    pending = reduction if isinstance(reduction, Placement) else Partial(reduction or "sum")
    if any(isinstance(p, Partial) and p != pending for p in x.placements):
        combines = False
    if isinstance(reduction, Placement) and any(isinstance(p, Partial) for p in x.placements):
        combines = False  # a norm is not linear, even in a pending norm
    position = reduced_dim_map(x.ndim, dims, keepdim)
    inputs: list[Placement] = []
    outputs: list[Placement] = []
    for placement in x.placements:
        dim = shard_dim(placement)
        if dim is not None and position[dim] is not None:
            inputs.append(placement)
            outputs.append(moved_to(placement, position[dim] or 0))
        elif placement == REPLICATE or not combines:
            inputs.append(REPLICATE)
            outputs.append(REPLICATE)
        else:
            inputs.append(placement)
            outputs.append(placement if dim is None else pending)
    return tuple(inputs), tuple(outputs)


def norm_reduction(order: float | str) -> Reduction:
    """How the p-norms of parts make the norm of the whole."""
    if order in (float("inf"), "inf"):
        return "max"
    if order in (float("-inf"), "-inf"):
        return "min"
    if order == 0:
        return "sum"
    return norm_partial(float(order) if isinstance(order, str) else order)


def _reduce(call: Call, reductions: Sequence[Reduction], dims: list[int] | None) -> Merged:
    x = call.tensors[0]
    keepdim = bool(call.args.get("keepdim", False))
    used: Placements = x.placements
    outputs = []
    for reduction in reductions:
        # No dims, like an empty list of them, means all.
        used, out = reduce_placements(x, dims or range(x.ndim), keepdim, reduction, call.mesh_shape)
        outputs.append(out)
    return call.follow([used], *outputs)


# What each reduction of an op's parts is. A name with an overload is that overload's alone.
REDUCTIONS: dict[str, list[Reduction]] = {
    "sum": ["sum"],
    "nansum": ["sum"],
    "count_nonzero": ["sum"],
    "any": ["sum"],
    "all": ["product"],
    "prod": ["product"],
    "mean": ["avg"],
    "nanmean": [None],
    "amax": ["max"],
    "amin": ["min"],
    "aminmax": ["min", "max"],
    "max": ["max"],
    "min": ["min"],
    "linalg__powsum": ["sum"],
    "argmax": [None],
    "argmin": [None],
    "std": [None],
    "var": [None],
    "std_mean": [None, None],
    "var_mean": [None, None],
    "logsumexp": [None],
    "median": [None],
    "nanmedian": [None],
}


def _table_rule(reductions: list[Reduction]) -> Rule:
    def rule(call: Call) -> Merged:
        name = "dims" if "dims" in call.args else "dim"
        return _reduce(call, reductions, call.dims(call.tensors[0].ndim, name))

    words = [str(r or "gathered first") for r in reductions]
    rule.__doc__ = f"reduction: {', '.join(words)}"
    return rule


for _name, _reductions in REDUCTIONS.items():
    register(_name)(_table_rule(_reductions))
for _name in ("sum", "prod", "var"):
    register(_name, namespace="prims")(_table_rule(REDUCTIONS[_name]))


@register("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode", "kthvalue")
def with_index(call: Call) -> Merged:
    """a reduction that also says where: the reduced dim is whole"""
    x = call.tensors[0]
    reduced = call.dim(x.ndim, default=-1)
    position = reduced_dim_map(x.ndim, [reduced], bool(call.args.get("keepdim")))
    return call.merge(
        [
            Alternative((Shard(out),) * call.n_outputs, (Shard(d),))
            for d, out in position.items()
            if out is not None
        ]
    )


@register("linalg_vector_norm", "norm")
def vector_norm(call: Call) -> Merged:
    """reduction: the norm of the parts' norms"""
    order = call.args.get("ord", call.args.get("p"))
    x = call.tensors[0]
    return _reduce(call, [norm_reduction(2 if order is None else order)], call.dims(x.ndim))


@register("equal", "is_same_size", "_local_scalar_dense", "is_nonzero", "item", "allclose")
def to_python(call: Call) -> Merged:
    """a Python value: the operands follow the first, reduced"""
    placements = unpartial(call.tensors[0].placements)
    same = [t for t in call.tensors if t.shape == call.tensors[0].shape]
    whole = call.replicate().inputs
    inputs = [placements] * len(call.tensors) if len(same) == len(call.tensors) else whole
    return Merged(tuple(inputs), call.replicate().outputs)
