"""Parameters with types of ``spmd_types`` under ``fully_shard``, which torch 2.14's own reads, too.

Such a parameter is a plain tensor, each rank's part, with a type per mesh axis: replicated,
invariant, or sharded. Storage, optimizers and checkpoints see a ``DTensor``, modules compute with
the parts. A type says what the gradient is, as well: of a replicated parameter a part of a sum, of
an invariant one the same on all. Read and checked in spmd_types 0.2.3 and 0.3.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.parallel.annotated import Annotation


def annotation(spmd: Any, parameter: Any, parallel: Any) -> Annotation | None:
    """What the types of a parameter mean on the mesh that it is stored on.

    Args:
        spmd: the package.
        parameter: that `fully_shard` is given.
        parallel: the data-parallel part of the mesh.

    Raises:
        ValueError: as torch: an axis that has no type, or a data-parallel one along which the
            parameter isn't replicated.
    """
    from spmd_types._state import _current_mode
    from spmd_types.runtime import get_partition_spec, has_local_type
    from spmd_types.types import partition_spec_to_shard_types

    if not has_local_type(parameter) or not (given := dict(spmd.get_local_type(parameter))):
        return None
    mesh: DeviceMesh = parallel.whole_mesh
    spec = get_partition_spec(parameter)
    types = given if spec is None else given | partition_spec_to_shard_types(spec)
    axes = _axes(spmd, mesh)
    own = [axes[i] for i in parallel.numbers_in_whole_mesh if mesh.size(i) > 1]
    for axis, kind in types.items():
        if _is_inside(axis, own):
            if kind is not spmd.R:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is {kind} along the "
                    f"data-parallel axis {axis}: fully_shard takes those that are R there, as it "
                    "adds up their gradients"
                )
        elif axis not in axes:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} has the type {kind} along {axis}, "
                f"which is no axis of {mesh!r}"
            )
    kinds = []
    for i, axis in enumerate(axes):
        kind = spmd.R if i in parallel.numbers_in_whole_mesh or mesh.size(i) == 1 else None
        kind = kind or types.get(axis)
        if kind is None:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} has no type along dim {i} of "
                f"{mesh!r}; its types are {given}: spmd_types.assert_type says it"
            )
        kinds.append(kind)
    placement = spmd.spmd_type_to_dtensor_placement

    computed = {axis: given.get(axis, spmd.R) for axis in _computed_axes(spmd, given, axes)}

    def restore(tensor: torch.Tensor) -> None:
        if _current_mode() is not None:  # paused, too: it may be used when it no longer is
            spmd.assert_type(tensor, computed, partition_spec=spec)

    return Annotation(
        tuple(map(placement, kinds)),
        tuple(placement(kind.backward_type()) for kind in kinds),
        restore,
    )


def _computed_axes(spmd: Any, given: Any, stored: list[Any]) -> Any:
    """The axes that modules have types along, as torch finds them: the parameter's where they span
    the mesh, else those of the current mesh. Data-parallel ones may have other parts than those
    that it is stored along."""
    from spmd_types._mesh_axis import flatten_axes

    real = tuple(axis for axis in stored if axis.size() > 1)
    if flatten_axes(tuple(given)) == flatten_axes(real):
        return given
    return spmd.current_mesh() or real


def _axes(spmd: Any, mesh: DeviceMesh) -> list[Any]:
    return [spmd.MeshAxis.of(mesh.get_group(i)) for i in range(mesh.ndim)]


def _is_inside(axis: Any, axes: list[Any]) -> bool:
    """Whether an axis is one of those, or made of them."""
    from spmd_types._mesh_axis import flatten_axes

    return bool(axes) and axis <= flatten_axes(tuple(axes))
