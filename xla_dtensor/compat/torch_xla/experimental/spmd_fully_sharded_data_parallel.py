"""FSDPv2: fully sharded data parallelism by shardings alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.compat.torch_xla.core.xla_model import xla_device
from xla_dtensor.compat.torch_xla.distributed.fsdp.wrap import recursive_wrap
from xla_dtensor.compat.torch_xla.distributed.spmd.marking import mark_sharding
from xla_dtensor.compat.torch_xla.distributed.spmd.meshes import get_global_mesh
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor


class SpmdFullyShardedDataParallel(nn.Module):
    """A module whose parameters are sharded over the mesh axis ``"fsdp"``, each along its largest
    dim, in place, and whose output is sharded along its batch. XLA gathers the parameters where
    they are used, and sums the gradients to where they belong.

    Args:
        module: brought to the devices. Parameters that are sharded already stay as they are.
        mesh: has an axis ``"fsdp"``; by default the global mesh.
        shard_output: called with the output and the mesh, shards it in place; by default dim 0 of
            the output, or of the first of several, over ``"fsdp"``.
        auto_wrap_policy: which modules inside of it are wrapped first, as torch_xla's FSDP has it.
        auto_wrapper_callable: makes a wrapper of them; by default this class.
        extra_data_axis: another axis along which there are other data, outside of ``"fsdp"``: the
            output is sharded over both, parameters aren't.
        kwargs: for the wrappers inside.

    Raises:
        ValueError: no mesh, or it lacks an axis.
        RuntimeError: the module is wrapped already, or has no ``forward``.

    Example::

        import torch
        import xla_dtensor.compat.torch_xla.distributed.spmd as xs
        from xla_dtensor.compat.torch_xla.experimental.spmd_fully_sharded_data_parallel import (
            SpmdFullyShardedDataParallel as FSDPv2,
        )

        mesh = xs.Mesh(range(8), (8, 1), ("fsdp", "tensor"))
        model = FSDPv2(torch.nn.Linear(16, 8), mesh)
        x = xs.mark_sharding(torch.ones(8, 16, device="xla"), mesh, ("fsdp", None))
        assert model(x).partition_spec == (0, None) and model.weight.partition_spec == (None, 0)
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh | None = None,
        shard_output: Callable[[Any, DeviceMesh], None] | None = None,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        extra_data_axis: str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(module, SpmdFullyShardedDataParallel):
            raise RuntimeError(
                "Cannot wrap a module that is already wrapped with FSDP. Wrap the modules inside "
                "first, then the one around them"
            )
        forward = getattr(module, "forward", None)
        if getattr(forward, "__func__", None) is nn.Module.forward or isinstance(
            module, nn.ModuleList | nn.ModuleDict
        ):
            raise RuntimeError(
                f"The module wrapped by FSDP *must define a `forward` method*: {type(module)} has "
                "none that is called; wrap the modules inside"
            )
        mesh = get_global_mesh() if mesh is None else mesh
        if mesh is None:
            raise ValueError("No mesh is provided: give mesh=, or set_global_mesh(mesh) first")
        names = mesh.mesh_dim_names or ()
        if "fsdp" not in names:
            raise ValueError(f"The mesh must have an axis named 'fsdp'; {mesh!r} has {names}")
        if extra_data_axis is not None and extra_data_axis not in names:
            raise ValueError(
                f"The provided {extra_data_axis} axis is not in the mesh. {mesh!r} has {names}"
            )
        super().__init__()
        if auto_wrap_policy is not None:
            make: Any = auto_wrapper_callable or SpmdFullyShardedDataParallel
            inner = {"mesh": mesh, "shard_output": shard_output, "extra_data_axis": extra_data_axis}
            recursive_wrap(module, auto_wrap_policy, functools.partial(make, **inner, **kwargs))
        if any(parameter.device.type != "xla" for parameter in module.parameters()):
            module = module.to(xla_device())
        self._orig_module = module
        self._mesh = mesh
        self._shard_output = shard_output or functools.partial(
            _shard_batch, axis=(extra_data_axis, "fsdp") if extra_data_axis else "fsdp"
        )
        for parameter in module.parameters():
            if parameter.ndim and not isinstance(parameter, XLAShardedTensor):
                mark_sharding(parameter, mesh, _along(parameter, _largest(parameter), "fsdp"))

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._orig_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output, sharded."""
        output = self.module(*args, **kwargs)
        self._shard_output(output, self._mesh)
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]


def _largest(tensor: torch.Tensor) -> int:
    return list(tensor.shape).index(max(tensor.shape))


def _along(tensor: torch.Tensor, dim: int, axis: Any) -> tuple[Any, ...]:
    return tuple(axis if i == dim else None for i in range(tensor.ndim))


def _shard_batch(output: Any, mesh: DeviceMesh, axis: Any) -> None:
    real = output[0] if isinstance(output, tuple) else output
    if not isinstance(real, torch.Tensor):
        raise RuntimeError(
            f"The output type is not supported: {type(output)}. Please provide your own "
            "shard_output callable."
        )
    if real.ndim:
        mark_sharding(real, mesh, _along(real, 0, axis))
