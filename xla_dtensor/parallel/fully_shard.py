"""``fully_shard``: parameters, gradients and optimizer state sharded over data-parallel devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from xla_dtensor.base.torch_private import contract
from xla_dtensor.mesh import frame_of
from xla_dtensor.mesh.memories import check_host_memory
from xla_dtensor.parallel._manage import add_mixin, manage
from xla_dtensor.parallel._mesh import DataParallel, data_parallel
from xla_dtensor.parallel._state import State
from xla_dtensor.parallel.module import FSDPModule


@contract(state_cls=State)
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (torch's signature)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """``torch.distributed.fsdp.fully_shard`` for xla meshes: shard the parameters of ``module``
    over data-parallel devices, gather them where they are used, reduce-scatter their gradients.

    Outside of forward the module's parameters are ``DTensor``s with ``Shard(0)`` on the mesh (one
    that was a ``DTensor`` on a tensor-parallel mesh: on both). In forward the module has whole
    tensors in their place. If its inputs are per-device tensors (each device has its own batch),
    these are tensors that each device holds, and the gradient is the average over the devices, as
    under torch. If its inputs are ``DTensor``s that are laid out over ``mesh`` (one global batch),
    they are ``DTensor``s too, and the gradient is that of the global loss;
    `FSDPModule.set_gradient_divide_factor` then divides it.

    The parameters are new objects, as under torch: make optimizers after it, since those made
    before keep the old ones and change nothing in the module. ``parameter.data = x`` takes a
    ``DTensor`` (give it the parameter's layout, with ``distribute_tensor``), which the next forward
    gathers; a plain tensor raises. What is written to the whole tensors is lost in
    `FSDPModule.reshard`. ``docs/parallel.md`` has what differs from torch.

    Args:
        module: a module, or a list of modules that are to be one group.
        mesh: of one dim (shards), or two (replicates over the first, shards over the second); by
            default the current mesh, else all devices.
        reshard_after_forward: whether backward gathers the parameters again, in place of keeping
            them from forward; an int: keeps them sharded over that many devices; None: True but for
            the root, the first module to run.
        shard_placement_fn: gives for a parameter the ``Shard`` to use, a ``ShardPlacementResult``
            whose ``mesh_info`` is a mesh or has one as ``.mesh``, or None.
        mp_policy: torch's: dtypes of the whole parameters, of the reduction and of the outputs.
        offload_policy: torch's; with ``CPUOffloadPolicy()`` the sharded parameters, their gradients
            and what an optimizer makes like them rest in the host's memory, and programs copy them
            to the devices and back. Other than in torch the optimizer computes on the devices, and
            ``parameter.device`` stays xla. ``pin_memory`` means nothing: it is pinned.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: the names of the data-parallel dims in ``mesh``, on which all parameters are
            ``DTensor``s then. As under torch the gradient is that of the global loss divided by the
            number of data-parallel devices; ``set_gradient_divide_factor(1)`` turns that off.

    Returns:
        ``module``, now an `FSDPModule`.

    Raises:
        ValueError: as torch: a container without forward, a scalar parameter, a parameter that
            another group manages, a mesh with a wrong number of dims.
        UnsupportedOpError: offloading on devices that reach no memory of the host.
        MeshError: ``mesh`` is not an xla mesh.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        model = xd.fully_shard(torch.nn.Linear(16, 8), mesh=mesh)
        assert model.weight.placements == (xd.Shard(0),)
        x = xd.from_device_values([torch.randn(4, 16) for _ in range(8)], mesh)  # eight batches
        model(x).square().mean().backward()
        assert model.weight.grad.placements == (xd.Shard(0),)
    """
    parallel = data_parallel(mesh, dp_mesh_dims, "fully_shard", shard=True)
    offloads = isinstance(offload_policy, CPUOffloadPolicy)
    if offloads:
        check_host_memory(frame_of(parallel.mesh), "fully_shard(offload_policy=CPUOffloadPolicy())")
    reshard = _reshard(reshard_after_forward, parallel)
    state = manage(
        fully_shard,
        module,
        parallel,
        mp_policy,
        ignored_params,
        shard_placement_fn,
        "fully_shard",
        offloads,
    )
    state.reshard_after_forward = reshard
    add_mixin(state.modules, FSDPModule, "FSDP")
    return module


def _reshard(value: Any, parallel: DataParallel) -> bool | int | None:
    """``reshard_after_forward``, checked; an int only where it is neither of the bools."""
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {value}"
        )
    if parallel.whole_mesh is not None:
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    assert parallel.shard_dim is not None
    size = parallel.mesh.size(parallel.shard_dim)
    if value < 1 or size % value:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{size}, not {value}"
        )
    if value in (1, size):
        return value == size
    return value


FSDPModule._api = staticmethod(fully_shard)
