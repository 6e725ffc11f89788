"""torch's `fully_shard`, `replicate` and ``DistributedDataParallel``, for xla meshes and modules.

torch's own ask for a process group, which there is none.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from xla_dtensor.base import torch_private
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.distributed import process_groups
from xla_dtensor.integration.patching.take_over import take_over

# Methods of DistributedDataParallel about a reducer, or processes that have fewer batches.
_WITHOUT_REDUCER = (
    "join",
    "join_hook",
    "register_comm_hook",
    "_register_buffer_comm_hook",
    "_register_builtin_comm_hook",
    "_register_fused_optim",
    "_get_ddp_logging_data",
    "_set_static_graph",
    "_update_process_group",
    "__getstate__",
)


def install() -> None:
    """What torch has imported by itself. Read in torch 2.11, checked on 2.13."""
    wrapper = vars(DistributedDataParallel)
    signature = inspect.signature(wrapper["__init__"])
    take_over(wrapper["__init__"], functools.partial(_wrap, signature))
    take_over(wrapper["forward"], _forward)
    for name in _WITHOUT_REDUCER:
        if name in wrapper:
            take_over(wrapper[name], functools.partial(_refuse, name))


@functools.cache
def install_for_modules() -> None:
    """What takes time to import: with the first mesh or tensor."""
    from torch.distributed import fsdp

    take_over(fsdp.fully_shard, functools.partial(_composed, "fully_shard"))
    take_over(fsdp.FullyShardedDataParallel.__init__, _refuse_first_fsdp)
    if hasattr(fsdp, "share_comm_ctx"):
        take_over(fsdp.share_comm_ctx, _share)
    for name in ("composable_replicate", "replicate_with_fsdp"):
        replicate = torch_private.find(name)
        if replicate is not None:
            take_over(replicate, functools.partial(_composed, "replicate"))
    for name in ("FSDPMeshInfo", "DDPMeshInfo"):
        take_over(getattr(torch_private.fsdp_common, name).__post_init__, _describe)


def _describe(original: Any, args: Any, kwargs: Any) -> Any:
    """What a ``shard_placement_fn`` says of a parameter's mesh has sizes and groups; the rank,
    which torch writes to it too, is none that one process could name."""
    info = args[0]
    mesh = info.mesh
    if mesh.device_type != "xla":
        return original(*args, **kwargs)
    info.is_spmd_mesh = getattr(info, "dp_mesh_dims", None) is not None
    for kind, dim in (("shard", info.shard_mesh_dim), ("replicate", info.replicate_mesh_dim)):
        if dim is not None:
            setattr(info, f"{kind}_mesh_size", mesh.size(dim))
            setattr(info, f"{kind}_process_group", mesh.get_group(dim))
    return None


def _composed(name: str, original: Any, args: Any, kwargs: Any) -> Any:
    module = args[0] if args else kwargs.get("module")
    mesh = kwargs.get("mesh", kwargs.get("device_mesh"))
    if not _is_for_xla(module, mesh):
        return original(*args, **kwargs)
    from xla_dtensor import parallel

    if not args and module is not None:
        args, kwargs = (module,), {key: value for key, value in kwargs.items() if key != "module"}
    return getattr(parallel, name)(*args, **kwargs)


def _is_for_xla(module: Any, mesh: Any) -> bool:
    """Whether the mesh is an xla mesh, or without one the module is on xla devices."""
    if mesh is not None:
        return getattr(mesh, "device_type", None) == "xla"
    if process_groups.is_default():
        return True
    modules = [module] if isinstance(module, nn.Module) else module
    if any(p.device.type == "xla" for m in modules for p in m.parameters()):
        return True
    from xla_dtensor.mesh import current_mesh

    mesh = current_mesh()
    return mesh is not None and mesh.device_type == "xla"


def _share(original: Any, args: Any, kwargs: Any) -> Any:
    """``share_comm_ctx``: modules of ours have no streams to share."""
    from xla_dtensor.parallel import FSDPModule

    modules = args[0] if args else kwargs["modules"]
    if modules and all(isinstance(module, FSDPModule) for module in modules):
        return None
    return original(*args, **kwargs)


def _refuse_first_fsdp(original: Any, args: Any, kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    group, mesh = given.get("process_group"), given.get("device_mesh")
    if _is_for_xla(given["module"], mesh if mesh is not None else group):
        raise UnsupportedOpError(
            "FullyShardedDataParallel of a module on xla devices: use fully_shard(module, "
            "mesh=mesh[dim]), torch's newer form of it, or xla_dtensor.fully_shard"
        )
    return original(*args, **kwargs)


# --- DistributedDataParallel ---------------------------------------------------------------------


def _wrap(signature: inspect.Signature, original: Any, args: Any, kwargs: Any) -> Any:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    mesh, group = given.get("device_mesh"), given.get("process_group")
    if not _is_for_xla(given["module"], mesh if mesh is not None else _with_a_device(group)):
        return original(*args, **kwargs)
    install_for_modules()
    from xla_dtensor.parallel import distributed_data_parallel

    distributed_data_parallel.wrap(given["self"], given)
    return None


def _with_a_device(group: Any) -> Any:
    """The group, if it is a dim of a mesh; a process group says nothing about the module."""
    return group if getattr(group, "device_type", None) == "xla" else None


def _is_wrapped(module: Any) -> bool:
    return getattr(vars(module).get("process_group"), "device_type", None) == "xla"


def _forward(original: Any, args: Any, kwargs: Any) -> Any:
    if not _is_wrapped(args[0]):
        return original(*args, **kwargs)
    from xla_dtensor.parallel import distributed_data_parallel

    return distributed_data_parallel.forward(*args, **kwargs)


def _refuse(name: str, original: Any, args: Any, kwargs: Any) -> Any:
    if not _is_wrapped(args[0]):
        return original(*args, **kwargs)
    from xla_dtensor.parallel import distributed_data_parallel

    return distributed_data_parallel.refuse(args[0], name)
