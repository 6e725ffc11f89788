"""Manual sharding: torch_xla's names for computing on each device's shard (`XLATensor`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.compat.torch_xla.distributed.spmd.meshes import OpSharding, mesh_or_global
from xla_dtensor.compat.torch_xla.distributed.spmd.specs import PartitionSpec, to_placements
from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.forms.form import contiguous_stride
from xla_dtensor.movement.local_view import as_sharded, from_local
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """What each device holds of a tensor that is laid out so.

    Args:
        t: on the xla device; stays as it is.
        partition_spec: as of `mark_sharding`.
        mesh: by default the global one.

    Returns:
        a per-device tensor of the shape of one device's piece, with ``t``'s history.

    Raises:
        SpmdError: the spec doesn't fit, or there is no mesh.
        UnsupportedOpError: a sharded dim doesn't divide.

    Example::

        import torch
        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        mesh = xs.get_1d_mesh("data")
        x = torch.arange(16.0, device="xla")
        piece = xs.enable_manual_sharding(x, ("data",), mesh=mesh)
        doubled = piece * 2  # on each device by itself
        whole = xs.disable_manual_sharding(doubled, ("data",), x.shape, mesh=mesh)
        assert piece.shape == (2,) and whole.tolist() == (torch.arange(16.0) * 2).tolist()
    """
    found = mesh_or_global(mesh, "enable_manual_sharding")
    placements = to_placements(found, tuple(partition_spec), t.ndim)
    return as_sharded(t, found).redistribute(found, placements).to_local()


def disable_manual_sharding(
    t: torch.Tensor,
    partition_spec: PartitionSpec,
    full_shape: Sequence[int],
    *,
    mesh: DeviceMesh | None = None,
) -> Any:
    """The sharded tensor that the devices' pieces make up: the way back.

    Args:
        t: a per-device tensor.
        partition_spec: how the pieces make up the whole; where it has no axis the devices hold the
            same.
        full_shape: of the whole.
        mesh: by default the global one.

    Raises:
        SpmdError: the spec doesn't fit, or there is no mesh.
        UnsupportedOpError: devices differ where the spec says that they hold the same.
        PlacementError: the pieces don't make up a tensor of ``full_shape``.
    """
    found = mesh_or_global(mesh, "disable_manual_sharding")
    shape = tuple(full_shape)
    placements = to_placements(found, tuple(partition_spec), len(shape))
    return from_local(t, found, placements, shape=shape, stride=contiguous_stride(shape))


def full_to_shard_shape(t: Any) -> torch.Tensor:
    """What each device holds of a sharded tensor.

    Raises:
        SpmdError: it isn't sharded.
    """
    if not isinstance(t, XLAShardedTensor):
        raise SpmdError(
            f"_spmd_full_to_shard_shape of a tensor of shape {list(t.shape)} that isn't sharded: "
            "mark_sharding(t, mesh, partition_spec) first"
        )
    return t.to_local()


def shard_to_full_shape(
    t: Any, sharding: OpSharding, full_shape: Sequence[int], dtype: torch.dtype
) -> Any:
    """The sharded tensor that the devices' pieces make up.

    Raises:
        SpmdError: ``t`` is a sharded tensor already.
    """
    if isinstance(t, XLAShardedTensor):
        raise SpmdError(
            f"_spmd_shard_to_full_shape of a sharded tensor of shape {list(t.shape)}: it takes "
            "what each device holds, as _spmd_full_to_shard_shape gives it"
        )
    whole = disable_manual_sharding(t, sharding.partition_spec, full_shape, mesh=sharding.mesh)
    return whole if whole.dtype == dtype else whole.to(dtype)
