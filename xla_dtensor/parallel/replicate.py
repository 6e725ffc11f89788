"""``replicate``: data parallelism with whole parameters on every device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from xla_dtensor.base.torch_private import contract, contract_registry
from xla_dtensor.base.torch_private.attributes import names_that_ddp_ignores
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.movement.source_rank import synchronize
from xla_dtensor.parallel._manage import add_mixin, manage
from xla_dtensor.parallel._mesh import data_parallel
from xla_dtensor.parallel._state import State
from xla_dtensor.parallel.module import FSDPModule
from xla_dtensor.runtime import processes

# What DistributedDataParallel takes that says how to communicate; XLA decides that.
_OF_COMMUNICATION = frozenset(
    {
        "broadcast_buffers",
        "bucket_cap_mb",
        "check_reduction",
        "device_id",
        "device_ids",
        "dim",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "init_sync",
        "output_device",
        "skip_all_reduce_unused_params",
        "static_graph",
        "bucket_cap_mb_list",
    }
)


@contract(state_cls=State)
def replicate(
    module: Any,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (torch's signature)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    **kwargs: Any,
) -> Any:
    """``torch.distributed._composable.replicate`` for xla meshes: every device holds the parameters
    and computes on its own batch; backward averages the gradients over the devices.

    Takes the arguments of both of torch's versions, that of ``DistributedDataParallel`` and that of
    ``fully_shard``. Parameters stay what they are (plain tensors, or ``DTensor``s on a
    tensor-parallel mesh); those on the CPU become new objects on the "xla" device, so make
    optimizers after it. If the module's inputs are ``DTensor``s that are laid out over the mesh,
    the gradient is that of the global loss, without a division.

    Args:
        module: a module, or a list of modules.
        ignored_modules: modules whose parameters are left alone.
        mesh: of one dim; by default the current mesh, else all devices. Also as ``device_mesh``.
        mp_policy, offload_policy, ignored_params, dp_mesh_dims: as for `fully_shard`.
        kwargs: those of ``DistributedDataParallel`` that say how to communicate have no effect, but
            for ``init_sync``: unless it is False, all processes take the first one's parameters and
            buffers.

    Returns:
        ``module``, now a `ReplicateModule`.

    Raises:
        RuntimeError: `fully_shard` manages the module.
        TypeError: an argument that neither version has.
        UnsupportedOpError: an offload policy or a process group.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        model = xd.replicate(torch.nn.Linear(16, 8), mesh=mesh)
        x = xd.from_device_values([torch.randn(4, 16) for _ in range(8)], mesh)  # eight batches
        model(x).square().mean().backward()
        assert model.weight.grad.varying == ()  # the average, the same on all devices
    """
    device_mesh = kwargs.pop("device_mesh", None)
    if kwargs.pop("process_group", None) is not None:
        raise UnsupportedOpError("replicate(process_group=...): give the mesh as device_mesh=")
    unknown = set(kwargs) - _OF_COMMUNICATION
    if unknown:
        raise TypeError(f"replicate() got unexpected keyword arguments {sorted(unknown)}")
    if "device_id" in kwargs and not isinstance(kwargs["device_id"], int | torch.device):
        raise RuntimeError(
            f"Expected device_id to be int or torch.device, but got {type(kwargs['device_id'])}"
        )
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise UnsupportedOpError(
            "replicate(offload_policy=CPUOffloadPolicy()): whole parameters stay on the devices; "
            "offload the optimizer's state, xla_dtensor.parallel.offload_state(optimizer), or "
            "shard them, fully_shard(..., offload_policy=CPUOffloadPolicy())"
        )
    modules = [module] if isinstance(module, nn.Module) else list(module)
    for one in modules:
        if "fully_shard" in (contract_registry(one) or {}):
            raise RuntimeError(
                "Cannot apply `replicate()` on a Module already managed by `fully_shard`"
            )
    ignored = set(ignored_params or ())
    for one in ignored_modules or ():
        ignored |= set(one.parameters())
    parallel = data_parallel(mesh or device_mesh, dp_mesh_dims, "replicate", shard=False)
    if kwargs.get("init_sync", True) and processes.several():
        synchronize(_own_tensors(modules, ignored), parallel.mesh)
    state = manage(replicate, module, parallel, mp_policy, ignored, None, "replicate")
    state.reshard_after_forward = False
    state.local_gradients = True
    add_mixin(state.modules, ReplicateModule, "DDP")
    return module


def _own_tensors(modules: list[nn.Module], ignored: set[nn.Parameter]) -> list[torch.Tensor]:
    """The parameters and buffers that torch synchronizes."""
    found: dict[int, torch.Tensor] = {}
    left_alone = {id(parameter) for parameter in ignored}
    for module in modules:
        names = names_that_ddp_ignores(module)
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            if name not in names and id(tensor) not in left_alone:
                found[id(tensor)] = tensor
    return list(found.values())


class ReplicateModule(FSDPModule):
    """A module under `replicate`. Also an `FSDPModule`, as torch's is, whose methods work where
    there is something to do without shards.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        model = xd.replicate(torch.nn.Linear(16, 8), mesh=mesh)
        assert isinstance(model, xd.parallel.ReplicateModule) and isinstance(model, torch.nn.Linear)
    """

    _orig_cls_mro_index = 4
    _api = staticmethod(replicate)

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        """Not supported: the reduction is one collective inside of XLA's program.

        Raises:
            UnsupportedOpError: always.
        """
        raise UnsupportedOpError(
            "register_comm_hook: XLA runs the reduction, nothing can be called inside of it; "
            "mp_policy=MixedPrecisionPolicy(reduce_dtype=...) sets its dtype"
        )
