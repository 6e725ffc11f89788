"""``DistributedDataParallel`` of modules on xla devices: `replicate` in a wrapper.

The wrapper is torch's own class, without its reducer; ``integration`` calls these functions in
place of its methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from xla_dtensor.base.torch_private import preserve_version_counter
from xla_dtensor.base.torch_private.attributes import names_that_ddp_ignores
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.mesh.group import MeshGroup, World, mesh_along, resolve_group
from xla_dtensor.movement import in_place
from xla_dtensor.movement.collectives import broadcast
from xla_dtensor.parallel._mesh import data_parallel
from xla_dtensor.parallel.replicate import replicate
from xla_dtensor.tensors.device_tensor import XLATensor

_REFUSED = {
    "mixed_precision": "replicate(module, mp_policy=xla_dtensor.MixedPrecisionPolicy(...))",
    "delay_all_reduce_named_params": "xla_dtensor.replicate(module, ignored_params=...)",
    "param_to_hook_all_reduce": "xla_dtensor.replicate(module, ignored_params=...)",
}


def wrap(self: DistributedDataParallel, arguments: Mapping[str, Any]) -> None:
    """``DistributedDataParallel.__init__``.

    Args:
        arguments: its arguments, all of them.

    Raises:
        UnsupportedOpError: one that puts code into the communication, or a process group that is no
            dim of an xla mesh.
        RuntimeError: no parameter requires grad, or a mesh of several dims, as in torch.
    """
    module = arguments["module"]
    for name, instead in _REFUSED.items():
        if arguments.get(name) is not None:
            raise UnsupportedOpError(
                f"DistributedDataParallel({name}=...) of a module on xla devices: XLA runs the "
                f"reduction; use {instead}"
            )
    mesh = _mesh(arguments.get("process_group"), arguments.get("device_mesh"))
    ignored = names_that_ddp_ignores(module)
    named = dict(module.named_parameters())
    if not any(p.requires_grad for name, p in named.items() if name not in ignored):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameters that "
            "require a gradient."
        )
    parallel = data_parallel(mesh, None, "DistributedDataParallel", shard=False)
    replicate(
        module,
        mesh=parallel.mesh,
        ignored_params={p for n, p in named.items() if n in ignored},
        init_sync=arguments.get("init_sync", True),
    )
    nn.Module.__init__(self)
    of_torch: Any = self
    of_torch.module = module
    of_torch.parameters_to_ignore = ignored
    of_torch.device_mesh = parallel.mesh
    of_torch.process_group = parallel.mesh.get_group()
    of_torch.device, of_torch.device_type = torch.device("xla:0"), "xla"
    of_torch.is_multi_device_module = False
    of_torch.require_backward_grad_sync = of_torch.require_forward_param_sync = True
    # Before torch 2.13 the second is all there is, and True by default.
    given = arguments.get("forward_sync_buffers"), arguments.get("broadcast_buffers")
    of_torch.broadcast_buffers = next((bool(x) for x in given if x is not None), True)
    for name in ("device_ids", "output_device", "dim", "find_unused_parameters", "static_graph"):
        setattr(self, name, arguments.get(name))
    of_torch.gradient_as_bucket_view = bool(arguments.get("gradient_as_bucket_view"))
    replicate.state(module).asked_in_forward = lambda: of_torch.require_backward_grad_sync
    if arguments.get("init_sync", True):
        buffers = given[0] is not None or of_torch.broadcast_buffers
        _broadcast(of_torch.process_group, _tensors(self, parameters=True, buffers=buffers))


def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    """``DistributedDataParallel.forward``: buffers become those of the first device where torch's
    do, and the module runs."""
    if self.require_forward_param_sync and self.broadcast_buffers:
        _broadcast(self.process_group, _tensors(self, parameters=False, buffers=True))
    output = self.module(*inputs, **kwargs)
    self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
    return output


def refuse(self: Any, name: str) -> NoReturn:
    """A method that has no meaning here.

    Raises:
        UnsupportedOpError: always.
    """
    raise UnsupportedOpError(
        f"DistributedDataParallel.{name} of a module on xla devices: XLA runs the reduction, in "
        "one program with forward and backward, and one process has the batches of all devices; "
        "xla_dtensor.replicate(module, mp_policy=...) sets the dtype of the reduction"
    )


def _mesh(process_group: Any, device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh of one dim that is meant; None for the default one."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh
    if process_group is None:
        return None
    group = resolve_group(process_group)
    if group is None:
        raise UnsupportedOpError(
            f"DistributedDataParallel(process_group={process_group!r}) of a module on xla devices: "
            "give device_mesh=mesh[dim], or process_group=mesh.get_group(dim)"
        )
    return None if isinstance(group, World) else mesh_along(group)


def _tensors(self: Any, parameters: bool, buffers: bool) -> list[torch.Tensor]:
    named: list[tuple[str, torch.Tensor]] = []
    if parameters:
        named += self.module.named_parameters()
    if buffers:
        named += self.module.named_buffers()
    return [tensor for name, tensor in named if name not in self.parameters_to_ignore]


def _broadcast(group: MeshGroup, tensors: list[torch.Tensor]) -> None:
    """Give all devices the first one's values, of tensors whose values differ. As under torch that
    is no write to autograd: what a forward before has saved of them stays usable."""
    axes = set(group.axes)
    differing = [t for t in tensors if isinstance(t, XLATensor) and axes & set(t._form.varying)]
    with torch.no_grad(), preserve_version_counter(tuple(differing)):
        for tensor in differing:
            in_place.put(tensor, broadcast(tensor, group, 0))
