"""Lookups and writes by index.

A shard of the *indices* is a shard of the result; a shard of the table's other dims too. Where
the indexed dim itself is sharded, a device finds the rows that it has, and the result is their
sum: partial for `embedding`, as in torch. The indices of a write must all be seen by everyone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Placement, Shard

from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.families.shape import inactive_dims
from xla_dtensor.rules.merging import REPLICATE, TensorInfo
from xla_dtensor.rules.registry import register

ALL_REDUCTIONS = ("sum", "avg", "min", "max", "product")
R = REPLICATE


MASKED = Partial("mask")
"""Indices looked up in a part of the table. Whole ones are masked in place; to a shard of them
the table must come instead, so that a sharded batch stays where it is."""


@register("embedding")
def embedding(call: Call) -> Merged:
    """vocabulary h, ... -> ... h; a sharded vocabulary makes a sum"""
    _, indices = call.tensors
    merged = call.merge(
        [
            Alternative((Shard(indices.ndim),), (Shard(1), R)),
            Alternative((Partial(),), (Shard(0), MASKED)),
            *(Alternative((Shard(d),), (R, Shard(d))) for d in range(indices.ndim)),
        ],
        new_shards=True,
    )
    table, used = merged.inputs
    return call.follow([table, unpartial(used)], *merged.outputs)


@register("embedding_dense_backward")
def embedding_backward(call: Call) -> Merged:
    """... h, ... -> vocabulary h, summed over the batch dims"""
    grad, indices = call.tensors
    return call.merge(
        [
            Alternative((Shard(1),), (Shard(grad.ndim - 1), R)),
            *(Alternative((Partial(),), (Shard(d), Shard(d))) for d in range(indices.ndim)),
            Alternative((Partial(),), (Partial(), R)),
        ],
        new_shards=True,
    )


@register("one_hot")
def one_hot(call: Call) -> Merged:
    """... -> ... classes!"""
    return inactive_dims(call, [])


@register("gather", "take_along_dim")
def gather(call: Call) -> Merged:
    """the dims other than the indexed one; that too, as the index is sharded"""
    x, index = call.tensors
    dim = call.dim(x.ndim)
    own = [d for d in range(x.ndim) if d != dim and _matches(x, index, d)]
    options = [Alternative((Shard(dim),), (R, Shard(dim)))] if x.ndim else []
    options += [Alternative((Shard(d),), (Shard(d), Shard(d))) for d in own]
    return call.merge(options, new_shards=True)


def _matches(a: TensorInfo, b: TensorInfo, dim: int) -> bool:
    return a.ndim == b.ndim and a.shape[dim] == b.shape[dim]


@register("scatter", "scatter_add", "scatter_reduce")
def scatter(call: Call) -> Merged:
    """the dims other than the indexed one, where all operands have the same size"""
    x, *others = call.tensors
    dim = call.dim(x.ndim)
    own = [d for d in range(x.ndim) if d != dim and all(_matches(x, o, d) for o in others)]
    n = len(call.tensors)
    options = [Alternative((Shard(d),), (Shard(d),) * n) for d in own]
    return call.merge(options, new_shards=True)


@register("index_select")
def index_select(call: Call) -> Merged:
    """the dims other than the indexed one, and the index; partial passes"""
    x, _ = call.tensors
    dim = call.dim(x.ndim)
    return call.merge(
        [
            *(Alternative((Shard(d),), (Shard(d), R)) for d in range(x.ndim) if d != dim),
            *(Alternative((Shard(d),), (R, Shard(0))) for d in range(x.ndim) if d == dim),
            *(Alternative((Partial(op),), (Partial(op), R)) for op in ALL_REDUCTIONS),
        ]
    )


@register("take")
def take(call: Call) -> Merged:
    """as the index"""
    _, index = call.tensors
    return call.merge([Alternative((Shard(d),), (R, Shard(d))) for d in range(index.ndim)])


class _Indexed:
    """Where the dims of ``x[indices]`` come from."""

    def __init__(self, x: TensorInfo, indices: Sequence[TensorInfo | None]) -> None:
        self.index = [i for i in indices if i is not None]
        self.at = [d for d, i in enumerate(indices) if i is not None]
        self.kept = [d for d in range(x.ndim) if d not in self.at]
        self.ndim = max((i.ndim for i in self.index), default=0)
        """The rank that the indices broadcast to."""
        adjacent = bool(self.at) and self.at[-1] - self.at[0] + 1 == len(self.at)
        self.start = self.at[0] if adjacent else 0
        """Where those dims are in the result: in place of adjacent indexed dims, else in front."""

    def result_dim(self, dim: int) -> int:
        if dim < self.start:
            return dim
        return dim + self.ndim - sum(a < dim for a in self.at)


@register("index", "_unsafe_index")
def index(call: Call) -> Merged | None:
    """the dims that are not indexed, and those of the indices; partial passes"""
    x, indices = call.tensor("self"), call.args["indices"]
    where = _Indexed(x, indices)
    if any(i.dtype.itemsize == 1 for i in where.index):
        return None  # a mask's result has a size that depends on its values
    n = len(where.index)
    options = [
        Alternative((Shard(where.result_dim(d)),), (Shard(d), *(R,) * n)) for d in where.kept
    ]
    for d in range(where.ndim):
        slots: list[Placement] = []
        for i in where.index:
            own = d - (where.ndim - i.ndim)
            slots.append(Shard(own) if own >= 0 and i.shape[own] > 1 else R)
        if any(slot != R for slot in slots):
            options.append(Alternative((Shard(where.start + d),), (R, *slots)))
    options += [Alternative((Partial(op),), (Partial(op), *(R,) * n)) for op in ("sum", "avg")]
    return call.merge(options)


@register("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(call: Call) -> Merged:
    """as the input, the indexed dims gathered"""
    x, indices, values = call.tensor("self"), call.args["indices"], call.tensor("values")
    where = _Indexed(x, indices)
    n = len(where.index)
    if any(i.dtype.itemsize == 1 for i in where.index):
        return _masked_fill(call, x, where, values)
    result_ndim = where.ndim + len(where.kept)
    options = []
    for d in where.kept:
        own = where.result_dim(d) - (result_ndim - values.ndim)
        whole = own < 0 or values.shape[own] == 1
        options.append(Alternative((Shard(d),), (Shard(d), *(R,) * n, R if whole else Shard(own))))
    options.append(Alternative((Partial(),), (Partial(), *(R,) * n, Partial())))
    return call.merge(options)


def _masked_fill(call: Call, x: TensorInfo, where: _Indexed, values: TensorInfo) -> Merged:
    """The mask beside the dims that it covers; the values are the same at all of its positions."""
    if len(where.index) != 1:
        return call.replicate()
    (mask,), (start,) = where.index, where.at
    after = x.ndim - start - mask.ndim
    options = []
    for d in range(x.ndim):
        inside = start <= d < start + mask.ndim
        # Before the mask's dims the values have one dim for all of them.
        own = (
            d - x.ndim + values.ndim if d >= x.ndim - after else d - start - 1 - after + values.ndim
        )
        whole = inside or own < 0 or values.shape[own] == 1
        slots = (Shard(d), Shard(d - start) if inside else R, R if whole else Shard(own))
        options.append(Alternative((Shard(d),), slots))
    options.append(Alternative((Partial(),), (Partial(), R, Partial())))
    return call.merge(options)


@register("index_add", "index_copy", "index_reduce")
def index_write(call: Call) -> Merged:
    """the dims other than the indexed one"""
    x = call.tensors[0]
    dim = call.dim(x.ndim)
    rest = [d for d in range(x.ndim) if d != dim]
    return call.merge([Alternative((Shard(d),), (Shard(d), R, Shard(d))) for d in rest])


@register("index_fill")
def index_fill(call: Call) -> Merged:
    """the dims other than the indexed one"""
    x, *others = call.tensors
    dim = call.dim(x.ndim)
    whole = (R,) * len(others)
    options = [Alternative((Shard(d),), (Shard(d), *whole)) for d in range(x.ndim) if d != dim]
    if len(others) == 1:  # a scalar value: equal on every device, so not a sum of parts
        kept = ("avg", "max", "min")
        options += [Alternative((Partial(op),), (Partial(op), R)) for op in kept]
    else:
        options += [
            Alternative((Partial(op),), (Partial(op), R, Partial(op))) for op in ALL_REDUCTIONS
        ]
    return call.merge(options)


@register("masked_scatter", "put", "masked_select", "nonzero", "_unique2", "unique_dim")
def everything(call: Call) -> Merged:
    """replicated: a position in the result depends on all positions before it"""
    return call.replicate()


@register("bucketize", "searchsorted")
def bucketize(call: Call) -> Merged | None:
    """as the input; a sharded boundary list counts in parts"""
    if call.name == "searchsorted":
        boundaries, x = call.args["sorted_sequence"], call.args["self"]
    else:
        x, boundaries = call.args["self"], call.args["boundaries"]
    if not isinstance(x, TensorInfo) or boundaries.ndim != 1 or len(call.tensors) != 2:
        return None
    pairs: list[tuple[Placement, Placement, Placement]] = [
        *((Shard(d), Shard(d), R) for d in range(x.ndim)),
        (Partial(), R, Shard(0)),
        *((Partial(op), Partial(op), R) for op in ("max", "min")),
    ]
    swap = call.name == "searchsorted"
    return call.merge([Alternative((o,), (b, a) if swap else (a, b)) for o, a, b in pairs])
