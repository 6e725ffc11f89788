"""The placements of an operation's results: from its rule, or from what XLA chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, _StridedShard

from xla_dtensor.dispatch._call import Call, fill
from xla_dtensor.errors import PlacementError
from xla_dtensor.form import Form
from xla_dtensor.mesh import dim_mesh_dims, from_partition_spec
from xla_dtensor.rules import TensorInfo, infer_placements

if TYPE_CHECKING:
    from xla_dtensor.dispatch._plan import Meta


def output_placements(
    call: Call, mesh: DeviceMesh, metas: list[Meta | None]
) -> list[tuple[Placement, ...]]:
    """Per result (None for undefined ones) its placements on ``mesh``."""
    replicated = (Replicate(),) * mesh.ndim
    infos: list[Any] = []
    for leaf, form in zip(call.leaves, call.forms, strict=True):
        if isinstance(form, Form):
            placements = replicated if form.placements is None else form.placements
            infos.append(TensorInfo(form.shape, placements, form.dtype))
        else:
            infos.append(leaf)
    shapes = [None if m is None else m.shape for m in metas]
    args = tuple(fill(list(call.args), infos))
    kwargs = {name: fill(value, infos) for name, value in call.kwargs.items()}
    result = infer_placements(call.info.func, args, kwargs, shapes, tuple(mesh.shape))
    if result is None:
        return _compiler_placements(call, mesh, metas)
    return [
        replicated if p is None or m is None else _representable(tuple(p), mesh, len(m.shape))
        for p, m in zip(result, metas, strict=True)
    ]


def _representable(
    placements: tuple[Placement, ...], mesh: DeviceMesh, ndim: int
) -> tuple[Placement, ...]:
    """``placements`` with those strided shards replicated that no sharding of an array expresses.

    torch gives ``_StridedShard(0, split_factor=6)`` to the flattening of ``[6, n]`` with ``n``
    sharded: shards of six pieces each. XLA shards a dim in contiguous pieces only.
    """
    try:
        dim_mesh_dims(placements, tuple(mesh.shape), ndim)
    except PlacementError:
        return tuple(Replicate() if isinstance(p, _StridedShard) else p for p in placements)
    return placements


def _compiler_placements(
    call: Call, mesh: DeviceMesh, metas: list[Meta | None]
) -> list[tuple[Placement, ...]]:
    """Compile the operation alone with its input shardings and read back what XLA chose.

    What XLA chose is the layout in which it can give the result without extra communication; an
    axis group that is no whole mesh dim counts as replicated.
    """
    from xla_dtensor import rng
    from xla_dtensor.dispatch._lower import lowered_function

    lowered = lowered_function(call.info)
    forms = call.forms

    def run(leaves: Any) -> Any:
        counter = iter(range(1_000_000))
        values = [
            form.logical(leaf) if isinstance(form, Form) else leaf
            for leaf, form in zip(leaves, forms, strict=True)
        ]
        kwargs = {name: fill(value, values) for name, value in call.kwargs.items()}
        fresh, _ = lowered(
            lambda: rng.key_of(rng.words(), next(counter)), fill(list(call.args), values), kwargs
        )
        return [value for value in fresh if value is not None]

    leaves = [
        jax.ShapeDtypeStruct(
            tuple(mesh.shape[i] for i in f.unreduced) + f.padded_shape,
            f.jax_dtype,
            sharding=f.sharding,
        )
        if isinstance(f, Form)
        else f(0)
        for f in forms
    ]
    from xla_dtensor import _context

    with jax.enable_x64(True), _context.active(None):
        compiled = jax.jit(run).lower(leaves).compile()
    chosen = iter(compiled.output_shardings)
    result: list[tuple[Placement, ...]] = []
    for meta in metas:
        placements = (Replicate(),) * mesh.ndim
        if meta is not None:
            spec = getattr(next(chosen), "spec", None)
            if spec is not None:
                try:
                    placements = from_partition_spec(spec, mesh)
                except PlacementError:
                    placements = (Replicate(),) * mesh.ndim
        result.append(placements)
    return result
