"""View ops: each is a list of dim transforms; nothing is computed, and partial passes."""

from __future__ import annotations

from collections.abc import Callable

from xla_dtensor.rules import dim_transforms as dt
from xla_dtensor.rules.alternatives import Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.merging import TensorInfo, map_shards
from xla_dtensor.rules.registry import register, register_family
from xla_dtensor.rules.view_propagation import propagate

Build = Callable[[Call, TensorInfo, tuple[int, ...]], dt.Transforms]


def _dim_list(call: Call, name: str) -> list[int]:
    value = call.args.get(name)
    return [value] if isinstance(value, int) else list(value or ())


def _reshape(call: Call, x: TensorInfo, out: tuple[int, ...]) -> dt.Transforms:
    return dt.reshape(x.shape, out)


def _squeeze(call: Call, x: TensorInfo, out: tuple[int, ...]) -> dt.Transforms:
    return dt.squeeze(x.shape, call.dims(x.ndim))


def _transpose(call: Call, x: TensorInfo, out: tuple[int, ...]) -> dt.Transforms:
    names = ("dim0", "dim1") if "dim0" in call.args else ("axis0", "axis1")
    return dt.transpose(x.ndim, call.args[names[0]], call.args[names[1]])


VIEWS: dict[str, Build] = {
    **dict.fromkeys(
        (
            *("view", "_unsafe_view", "_reshape_alias", "_reshape_copy"),
            *("reshape", "flatten", "unflatten"),
        ),
        _reshape,
    ),
    "squeeze": _squeeze,
    "unsqueeze": lambda call, x, out: dt.unsqueeze(x.ndim, call.args["dim"]),
    "permute": lambda call, x, out: dt.permute(call.args["dims"]),
    "transpose": _transpose,
    "swapaxes": _transpose,
    "t": lambda call, x, out: dt.transpose(x.ndim, 0, -1),
    "numpy_T": lambda call, x, out: dt.permute(range(x.ndim)[::-1]),
    "mT": lambda call, x, out: dt.transpose(x.ndim, -2, -1),
    "adjoint": lambda call, x, out: dt.transpose(x.ndim, -2, -1),
    "movedim": lambda call, x, out: dt.movedim(
        x.ndim, _dim_list(call, "source"), _dim_list(call, "destination")
    ),
    "expand": lambda call, x, out: dt.expand(x.shape, out),
    "broadcast_to": lambda call, x, out: dt.expand(x.shape, out),
    "repeat": lambda call, x, out: dt.repeat(x.ndim, call.args["repeats"]),
    "tile": lambda call, x, out: dt.repeat(
        x.ndim, [1] * (x.ndim - len(call.args["dims"])) + list(call.args["dims"])
    ),
}

# Torch gathers a shard of an inner flattened dim where the result is a copy anyway.
COPIES: dict[str, Build] = {"view_copy": _reshape, "_reshape_alias_copy": _reshape}


def _view_rule(build: Build, strided: bool) -> Callable[[Call], Merged]:
    def rule(call: Call) -> Merged:
        x, *others = call.tensors
        out = call.out_shapes[0]
        assert out is not None
        used, placements = propagate(
            build(call, x, out), x.placements, x.shape, call.mesh_shape, strided=strided
        )
        return call.follow([used, *(o.placements for o in others)], placements)

    rule.__doc__ = "view: dim transforms"
    return rule


for _name, _build in VIEWS.items():
    register(_name)(_view_rule(_build, strided=True))
for _name, _build in COPIES.items():
    register(_name)(_view_rule(_build, strided=False))
register_family("aten::expand_as", "aten::expand")
register_family("aten::view_as", "aten::view")
register_family("aten::reshape_as", "aten::reshape")


@register("view_as_real")
def view_as_real(call: Call) -> Merged:
    """as the input, with a new unsharded last dim"""
    return call.follow([call.tensors[0].placements], call.tensors[0].placements)


@register("view_as_complex")
def view_as_complex(call: Call) -> Merged:
    """as the input, its last dim gathered"""
    x = call.tensors[0]
    kept = map_shards(x.placements, {d: d for d in range(x.ndim - 1)})
    return call.follow([kept], kept)


@register("diagonal", "diag_embed", "linalg_diagonal")
def diagonal(call: Call) -> Merged:
    """the dims other than the diagonal's; the diagonal is last, and not sharded"""
    x = call.tensors[0]
    out = call.out_shapes[0]
    assert out is not None
    embeds = call.name == "diag_embed"
    ndim = len(out) if embeds else x.ndim
    planes = [call.args.get(n, default) % ndim for n, default in (("dim1", 0), ("dim2", 1))]
    rest = [d for d in range(ndim) if d not in planes]
    pairs = ((i, d) if embeds else (d, i) for i, d in enumerate(rest))
    dim_map: dict[int, int | None] = dict(pairs)
    used = map_shards(x.placements, {d: d for d in dim_map})
    return call.follow([used], map_shards(used, dim_map))


@register("unfold")
def unfold(call: Call) -> Merged:
    """the dims other than the unfolded one"""
    x = call.tensors[0]
    dim = call.dim(x.ndim, "dimension")
    kept = map_shards(x.placements, {d: d for d in range(x.ndim) if d != dim})
    return call.follow([kept], kept)


@register("real", "imag", "resolve_conj", "resolve_neg")
def follow_view(call: Call) -> Merged:
    """as the input, partial included"""
    return call.follow([call.tensors[0].placements], call.tensors[0].placements)
