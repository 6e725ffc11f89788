"""``xla_distribute_tensor`` and ``xla_distribute_module``, which torch calls for xla meshes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from xla_dtensor.compat.torch_xla import runtime
from xla_dtensor.compat.torch_xla.distributed.spmd.marking import lay_out
from xla_dtensor.compat.torch_xla.distributed.spmd.meshes import Mesh
from xla_dtensor.compat.torch_xla.errors import SpmdError
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.mesh import normalize_placements
from xla_dtensor.movement.factories import distribute_tensor
from xla_dtensor.tensors.device_tensor import XLATensor


def auto_policy(mod_name: str, mod: nn.Module, mesh: DeviceMesh) -> None:
    """torch_xla's ``partition_fn`` that asks for auto-sharding.

    Raises:
        UnsupportedOpError: always.
    """
    runtime.use_spmd(auto=True)


def convert_to_xla_mesh(dt_mesh: DeviceMesh) -> Mesh:
    """A torch mesh as a `Mesh`.

    Args:
        dt_mesh: an xla mesh of all devices.

    Raises:
        SpmdError: devices are missing.

    Example::

        import xla_dtensor as xd
        from xla_dtensor.compat.torch_xla.distributed.spmd.api import convert_to_xla_mesh

        mesh = convert_to_xla_mesh(xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("x", "y")))
        assert mesh.mesh_shape == (2, 4) and mesh.axis_names == ("x", "y")
    """
    count = runtime.global_runtime_device_count()
    if dt_mesh.size() != count:
        raise SpmdError(
            f"convert_to_xla_mesh: {dt_mesh!r} has {dt_mesh.size()} of {count} devices; "
            "torch_xla's meshes have all of them (functions here take the mesh as it is)"
        )
    return Mesh(dt_mesh.mesh.flatten().numpy(), tuple(dt_mesh.shape), dt_mesh.mesh_dim_names)


def convert_to_xla_partition_spec(
    tensor: torch.Tensor, placements: Sequence[Placement]
) -> tuple[Any, ...]:
    """Placements as a partition spec.

    Raises:
        ValueError: one is neither ``Shard`` nor ``Replicate``.
    """
    axes: list[list[int]] = [[] for _ in range(tensor.ndim)]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            axes[placement.dim].append(axis)
        elif not isinstance(placement, Replicate):
            raise ValueError(f"Unsupported placement type: {type(placement).__name__}")
    return tuple(None if not a else a[0] if len(a) == 1 else tuple(a) for a in axes)


def xla_distribute_tensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement] | None = None
) -> Any:
    """``distribute_tensor`` as torch_xla has it: a tensor on the xla device is sharded in place.

    Args:
        tensor: of any device; one on the CPU stays as it is, and another one is returned.
        device_mesh: an xla mesh.
        placements: one per mesh dim; replicated by default.

    Returns:
        the sharded tensor; ``tensor`` itself if it is on the xla device.

    Raises:
        PlacementError: the placements don't fit.
    """
    if isinstance(tensor, XLATensor) and not tensor.varying:
        call = "xla_distribute_tensor"
        wanted = normalize_placements(placements, device_mesh, tensor.ndim, call)
        lay_out(tensor, device_mesh, wanted, call)
        return tensor
    return distribute_tensor(tensor, device_mesh, placements)


def xla_distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """``distribute_module`` as torch_xla has it: parameters that ``partition_fn`` doesn't shard
    stay what they are, whole on every device.

    Args:
        module: changed in place.
        device_mesh: an xla mesh.
        partition_fn: called with each submodule's name, the submodule and the mesh.
        input_fn, output_fn: ``(module, inputs, mesh)`` and ``(module, outputs, mesh)``, before and
            after the module's forward.

    Returns:
        ``module``.

    Raises:
        ValueError: ``input_fn`` or ``output_fn`` takes another number of arguments.
        UnsupportedOpError: ``partition_fn`` is `auto_policy`.
    """
    for name, fn in (("input_fn", input_fn), ("output_fn", output_fn)):
        if fn is not None and len(inspect.signature(fn).parameters) != 3:
            count = len(inspect.signature(fn).parameters)
            raise ValueError(f"{name} should take in 3 arguments, but got {count} arguments!")
    if partition_fn is auto_policy:
        raise UnsupportedOpError(
            "xla_distribute_module(partition_fn=auto_policy): there is no auto-sharding; give a "
            "partition_fn that shards the parameters"
        )
    if partition_fn is not None:
        for path, submodule in module.named_modules():
            partition_fn(path, submodule, device_mesh)
    if input_fn is not None:
        before = input_fn
        module.register_forward_pre_hook(lambda m, inputs: before(m, inputs, device_mesh))
    if output_fn is not None:
        after = output_fn
        module.register_forward_hook(lambda m, _, outputs: after(m, outputs, device_mesh))
    return module
