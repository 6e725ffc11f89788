"""The published ``spmd_types`` package on per-device tensors.

Its tensors are plain ones, each rank's own, and its collectives say what ranks share: what a
per-device tensor is here. It wants to know of a group which ranks it has (`MeshAxis`), takes
strings for names of axes (a group of an xla mesh is one), and asks for its rank as a number where
it deals out a tensor. There it has a way for tensors of all ranks in one process (torch's
``LocalTensor``), which serves here too. Read and checked in 0.2.3.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching import callers
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over


def install() -> None:
    """When its modules are imported."""
    on_import("spmd_types._mesh_axis", _hook_axes)
    on_import("spmd_types.types", _hook_names)
    on_import("spmd_types._mesh", _hook_mesh)
    on_import("spmd_types._local", _hook_local)
    on_import("spmd_types", _hook_parameters)
    on_import("spmd_types", _hook_types_of_ranks)


def _is_group(value: Any) -> bool:
    from xla_dtensor.mesh.group import MeshGroup

    return isinstance(value, MeshGroup)


def _first(original: Any, args: Any, kwargs: Any) -> Any:
    return next(iter(inspect.signature(original).bind(*args, **kwargs).arguments.values()))


def _hook_axes(module: Any) -> None:
    def ranks_of(original: Any, args: Any, kwargs: Any) -> Any:
        group = _first(original, args, kwargs)
        if not _is_group(group):
            return original(*args, **kwargs)
        # torch hasn't the ranks, and spmd_types asks no more of a group that says its axis.
        known = module._pg_to_mesh_axis.get(group)
        if known is None:
            known = module._pg_to_mesh_axis[group] = _axis_of(module, group)
        return known

    take_over(module._from_pg, ranks_of)


def _axis_of(module: Any, group: Any) -> Any:
    """As spmd_types of a group's ranks: the first of the groups along the mesh dim."""
    ranks = group.mesh.mesh.movedim(group.dim, -1).reshape(-1, group.size())[0]
    ordered = sorted((ranks - ranks.min()).tolist())
    shape, strides = ((1,), (1,)) if len(ordered) == 1 else module._indices_to_layout(ordered)
    axis = module.MeshAxis(module._make_axis_layout(shape, strides))
    names = group.mesh.mesh_dim_names
    if names is not None:
        module._register_name(axis, f"mesh_{names[group.dim]}")
    return axis


def _hook_names(module: Any) -> None:
    take_over(module.normalize_axis, _normalize)
    take_over(module.format_axis, lambda original, args, kwargs: original(_axis(*args, **kwargs)))


def _axis(axis: Any) -> Any:
    """The axis of a group of an xla mesh; anything else as it is."""
    if not _is_group(axis):
        return axis
    from spmd_types._mesh_axis import MeshAxis

    return MeshAxis.of(axis)


def _normalize(original: Any, args: Any, kwargs: Any) -> Any:
    axis = _first(original, args, kwargs)
    return _axis(axis) if _is_group(axis) else original(*args, **kwargs)


def _hook_mesh(module: Any) -> None:
    def group_of(original: Any, args: Any, kwargs: Any) -> Any:
        axis = _first(original, args, kwargs)
        group = axis if _is_group(axis) else original(*args, **kwargs)
        _latest.group = group if _is_group(group) else None
        return group

    take_over(module._pg_for_axis, group_of)


# --- each rank's own part ------------------------------------------------------------------------


class _Latest(threading.local):
    """The group that spmd_types has asked about last, on its way to `_Ranks.tensor_map`."""

    group: Any = None


_latest = _Latest()


class _Ranks:
    """In the place of torch's ``LocalTensorMode``, for one per-device tensor."""

    def tensor_map(self, x: torch.Tensor, function: Callable[[int, Any], Any]) -> torch.Tensor:
        """``function(rank, x)`` on each device, whose rank in the group is a value of the device:
        what it gives for each rank is computed, and each device takes its own."""
        from xla_dtensor.movement import collectives

        group = _latest.group
        parts = [function(rank, x) for rank in range(group.size())]
        if x.is_meta:  # a parameter that is dealt out before it has values
            return _same_on_all(parts)
        own = collectives.index_in(group)
        return torch.stack(parts).index_select(0, own.reshape(1)).squeeze(0)


def _same_on_all(parts: list[torch.Tensor]) -> torch.Tensor:
    """What each device has of a tensor without values."""
    if len({part.shape for part in parts}) > 1:
        raise UnsupportedOpError(
            f"spmd_types deals out tensors of shapes {[list(part.shape) for part in parts]}; all "
            "devices need the same: choose a dim, or a mesh, that divides"
        )
    return parts[0]


def _hook_local(module: Any) -> None:
    def mode_of(original: Any, args: Any, kwargs: Any) -> Any:
        x = _first(original, args, kwargs)
        ours = x.device.type == "xla" or (x.is_meta and _latest.group is not None)
        return _Ranks() if ours else original(*args, **kwargs)

    def ranks_in(original: Any, args: Any, kwargs: Any) -> Any:
        group = _first(original, args, kwargs)
        if not _is_group(group):
            return original(*args, **kwargs)
        _latest.group = group
        return {rank: rank for rank in range(group.size())}

    take_over(module._get_local_tensor_mode, mode_of)
    take_over(module._build_rank_to_group_local, ranks_in)


def _hook_types_of_ranks(module: Any) -> None:
    """``get_rank(group)`` is a number to `spmd_types`, which needs no type; a tensor does."""

    def give_type(rank: torch.Tensor, group: Any) -> None:
        if not module.is_type_checking() or (mesh := module.current_mesh()) is None:
            return
        own = module.MeshAxis.of(group)
        module.assert_type(rank, {axis: module.V if axis == own else module.R for axis in mesh})

    callers.told.append(give_type)


# --- parameters under fully_shard ----------------------------------------------------------------


def _hook_parameters(module: Any) -> None:
    from xla_dtensor.parallel import annotated  # brings JAX, whose settings a command may make yet

    def read(parameter: Any, parallel: Any) -> Any:
        from xla_dtensor.ecosystem import spmd_parameters

        return spmd_parameters.annotation(module, parameter, parallel)

    annotated.readers.append(read)
