"""Ops that join, cut and reorder along some dims and leave the other dims alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Placement, Shard

from xla_dtensor.mesh.placements import unpartial
from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.cost import redistribute_cost
from xla_dtensor.rules.merging import (
    REPLICATE,
    Placements,
    TensorInfo,
    map_shards,
    shard_dim,
)
from xla_dtensor.rules.registry import register


def without_dims(placements: Placements, dims: Sequence[int], ndim: int) -> Placements:
    """`placements` with `dims` gathered."""
    return map_shards(placements, {d: d for d in range(ndim) if d not in dims})


def _removed(placements: Placements, dim: int, ndim: int) -> Placements:
    return map_shards(placements, {d: d - (d > dim) for d in range(ndim) if d != dim})


def _inserted(placements: Placements, dim: int, ndim: int) -> Placements:
    return map_shards(placements, {d: d + (d >= dim) for d in range(ndim)})


# --- cutting -------------------------------------------------------------------------------------


@register("select")
def select(call: Call) -> Merged:
    """the dims other than the selected one"""
    x = call.tensors[0]
    dim = call.dim(x.ndim)
    used = without_dims(x.placements, [dim], x.ndim)
    return call.follow([used], _removed(used, dim, x.ndim))


@register("unbind")
def unbind(call: Call) -> Merged:
    """the dims other than the unbound one, for each result"""
    return select(call)


@register(
    "split",
    "split_with_sizes",
    "chunk",
    "tensor_split",
    "unsafe_split",
    "unsafe_chunk",
    "unsafe_split_with_sizes",
    "hsplit",
    "vsplit",
    "dsplit",
)
def split(call: Call) -> Merged:
    """the dims other than the split one, for each result"""
    x = call.tensors[0]
    implied = {"hsplit": int(x.ndim > 1), "vsplit": 0, "dsplit": 2}
    used = without_dims(x.placements, [implied.get(call.name, call.dim(x.ndim))], x.ndim)
    return call.follow([used], used)


@register("slice", "narrow")
def slice_(call: Call) -> Merged:
    """the dims other than the sliced one; that too, if the slice takes it whole"""
    x = call.tensors[0]
    dim = call.dim(x.ndim)
    whole = call.out_shapes[0] is not None and call.out_shapes[0][dim] == x.shape[dim]
    used = x.placements if whole else without_dims(x.placements, [dim], x.ndim)
    return call.follow([used], used)


@register("select_backward")
def select_backward(call: Call) -> Merged:
    """the gradient's dims around the selected one"""
    grad = call.tensors[0]
    dim = call.dim(grad.ndim + 1)
    return call.follow([grad.placements], _inserted(grad.placements, dim, grad.ndim))


@register("slice_backward")
def slice_backward(call: Call) -> Merged:
    """the gradient's dims other than the sliced one"""
    grad = call.tensors[0]
    used = without_dims(grad.placements, [call.dim(grad.ndim)], grad.ndim)
    return call.follow([used], used)


@register("slice_scatter")
def slice_scatter(call: Call) -> Merged:
    """as the input, with the sliced dim gathered"""
    x = call.tensors[0]
    used = unpartial(without_dims(x.placements, [call.dim(x.ndim)], x.ndim))
    return call.follow([used, used], used)


@register("select_scatter")
def select_scatter(call: Call) -> Merged:
    """the dims other than the selected one"""
    x = call.tensors[0]
    dim = call.dim(x.ndim)
    return call.merge(
        [
            Alternative((Shard(d),), (Shard(d), Shard(d - (d > dim))))
            for d in range(x.ndim)
            if d != dim
        ]
    )


@register("diagonal_scatter")
def diagonal_scatter(call: Call) -> Merged:
    """the dims other than the diagonal's"""
    x = call.tensors[0]
    planes = [call.dim(x.ndim, "dim1", 0), call.dim(x.ndim, "dim2", 1)]
    rest = [d for d in range(x.ndim) if d not in planes]
    return call.merge([Alternative((Shard(d),), (Shard(d), Shard(i))) for i, d in enumerate(rest)])


# --- joining -------------------------------------------------------------------------------------


@register("stack")
def stack(call: Call) -> Merged:
    """the layout that the inputs agree on, per mesh dim"""
    tensors = call.tensors
    dim = call.dim(tensors[0].ndim + 1)
    used = _agreed([t.placements for t in tensors])
    return call.follow([used] * len(tensors), _inserted(used, dim, tensors[0].ndim))


def _agreed(layouts: Sequence[Placements]) -> Placements:
    """Per mesh dim the one shard, else the one partial, that occurs; replicated on a conflict."""
    result = []
    for here in zip(*layouts, strict=True):
        shards = {p for p in here if shard_dim(p) is not None}
        partials = {p for p in here if isinstance(p, Partial)}
        candidates = shards or partials
        result.append(next(iter(candidates)) if len(candidates) == 1 else REPLICATE)
    return tuple(result)


@register("cat", "concat", "concatenate")
def cat(call: Call) -> Merged:
    """the cheapest of the inputs' own layouts, the joined dim gathered"""
    tensors = call.tensors
    ndim = max(t.ndim for t in tensors)
    # An empty 1-d tensor may be joined to anything (an old habit of torch.cat).
    real = [t for t in tensors if t.ndim == ndim]
    dim = call.dim(ndim)
    candidates = dict.fromkeys(without_dims(t.placements, [dim], ndim) for t in real)

    def cost(layout: Placements) -> tuple[float, bool]:
        moved = any(t.placements != layout for t in real)
        return sum(redistribute_cost(t, layout, call.mesh_shape) for t in real), moved

    used = min(candidates, key=cost)
    whole = call.replicate().inputs[0]
    return call.follow([used if t.ndim == ndim else whole for t in tensors], used)


# --- reordering and padding ----------------------------------------------------------------------

_PASSING = ("sum", "avg", "max", "min")


def inactive_dims(
    call: Call, active: Sequence[int], partial: Sequence[str] = (), *, new_shards: bool = False
) -> Merged:
    """A shard of any dim but the `active` ones, and the reductions in `partial`, pass through."""
    x: TensorInfo = call.tensors[0]
    n, outs = len(call.tensors), call.n_outputs
    slots: list[Placement] = [Shard(d) for d in range(x.ndim) if d not in active]
    slots += [Partial(op) for op in partial]
    options = [Alternative((slot,) * outs, (slot,) * n) for slot in slots]
    return call.merge(options, new_shards=new_shards)


@register("roll", "flip", "fliplr", "flipud", "rot90")
def reorder(call: Call) -> Merged:
    """the dims that are not reordered; partial passes"""
    x = call.tensors[0]
    implied = {"flipud": [0], "fliplr": [1]}
    dims = implied.get(call.name) or call.dims(x.ndim, "dims") or range(x.ndim)
    return inactive_dims(call, list(dims), _PASSING)


@register("_fft_c2c", "_fft_r2c", "_fft_c2r")
def fft(call: Call) -> Merged:
    """the dims that are not transformed; partial passes"""
    return inactive_dims(call, call.dims(call.tensors[0].ndim) or [], _PASSING)


_PADS = [f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)]


@register("constant_pad_nd", "pad", *_PADS, *(f"{name}_backward" for name in _PADS))
def pad(call: Call) -> Merged:
    """the dims that are not padded"""
    x = call.tensors[0]
    widths = call.args.get("pad") or call.args.get("padding") or []
    padded = [x.ndim - 1 - i // 2 for i, width in enumerate(widths) if width]
    # A constant is its own average, maximum and minimum on every device, but not its own sum.
    constant = bool(call.args.get("value")) and any(widths)
    return inactive_dims(call, padded, _PASSING[1:] if constant else _PASSING)


@register("tril", "triu")
def triangle(call: Call) -> Merged:
    """elementwise in effect, and linear"""
    return inactive_dims(call, [], ("sum", "avg"))


@register("repeat_interleave.self_int")
def repeat_interleave(call: Call) -> Merged:
    """the dims other than the repeated one"""
    x = call.tensors[0]
    if call.args.get("dim") is None:
        return call.replicate()
    return inactive_dims(call, [call.dim(x.ndim)], _PASSING)


@register("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def shuffle(call: Call) -> Merged:
    """the dims before channel, height and width"""
    ndim = call.tensors[0].ndim
    return inactive_dims(call, range(ndim - 3, ndim), _PASSING)


@register("unfold_backward", "trace_backward")
def gather_all(call: Call) -> Merged:
    """replicated"""
    return call.replicate()
