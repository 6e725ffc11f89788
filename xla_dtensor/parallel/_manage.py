"""What `fully_shard` and `replicate` have in common: move, shard and register parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
)
from torch.distributed.tensor.placement_types import Shard

from xla_dtensor.base.tables.cache import Interned
from xla_dtensor.base.torch_private import contract_registry, get_root_modules
from xla_dtensor.base.torch_private.attributes import buffers_of, parameters_of
from xla_dtensor.parallel._mesh import DataParallel, data_parallel
from xla_dtensor.parallel._parameter import ManagedParameter
from xla_dtensor.parallel._state import State, states_of
from xla_dtensor.parallel._whole import Location


def manage(
    function: Any,
    module: Any,
    parallel: DataParallel,
    policy: MixedPrecisionPolicy,
    ignored_params: set[nn.Parameter] | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    call: str,
    offloads: bool = False,
) -> State:
    """Move, shard and register the parameters that no other group has."""
    roots = (module,) if isinstance(module, nn.Module) else tuple(get_root_modules(list(module)))
    for root in roots:
        if (
            isinstance(root, nn.ModuleList | nn.ModuleDict)
            and type(root).forward is nn.Module.forward
        ):
            raise ValueError(
                f"{call} does not support containers that do not implement forward: {root}"
            )
    state: State = function.state(roots[0])
    state.modules, state.policy, state.offloads = roots, policy, offloads
    found = _locations(roots, ignored_params or set())
    _move_buffers(roots)
    for parameter, locations in found:
        name = locations[0].name
        if parameter.ndim == 0 and parallel.shard_dim is not None:
            raise ValueError(
                "fully_shard doesn't support scalar parameters. Change "
                f"{name} to a 1D tensor with numel equal to 1."
            )
        if getattr(parameter, "_managed", None) is not None:
            raise ValueError(
                f"Parameter '{name}' is shared with a parameter already managed by another FSDP "
                "group. For shared/tied parameters, use fully_shard([module_a, module_b]) to place "
                "them in the same FSDP group."
            )
        own, dim = parallel, 0
        if shard_placement_fn is not None:
            own, dim = _placement(shard_placement_fn(parameter), parameter, parallel)
        managed = ManagedParameter(state, locations, parameter, own, dim)
        parameter._managed = managed
        managed.parameter._managed = managed
        state.parameters.append(managed)
    # A forward leaves whole parameters in the modules until they are resharded; state dicts are of
    # the sharded ones.
    for holder in {at.module for p in state.parameters for at in p.locations}:
        holder.register_state_dict_pre_hook(lambda *args: state.reshard())
        holder.register_load_state_dict_pre_hook(lambda *args: state.reshard())
    return state


def _move_buffers(roots: Sequence[nn.Module]) -> None:
    moved: dict[int, torch.Tensor] = {}
    for module in _managed_modules(roots):
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.device.type == "cpu":
                buffers_of(module)[name] = moved.setdefault(id(buffer), buffer.to("xla"))


def _managed_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules inside ``roots`` that no earlier call manages."""
    modules: list[nn.Module] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        registry = contract_registry(module) or {}
        if not any(module is root for root in roots) and (
            states_of(module) or "fully_shard" in registry or "replicate" in registry
        ):
            return
        for child in module.children():
            visit(child)
        modules.append(module)

    for root in roots:
        visit(root)
    return modules


def _locations(
    roots: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> list[tuple[nn.Parameter, list[Location]]]:
    found: dict[int, tuple[nn.Parameter, list[Location]]] = {}
    skipped = {id(parameter) for parameter in ignored}
    for module in _managed_modules(roots):
        for name, parameter in parameters_of(module).items():
            if parameter is not None and id(parameter) not in skipped:
                found.setdefault(id(parameter), (parameter, []))[1].append(Location(module, name))
    return list(found.values())


def _placement(
    result: Any, parameter: nn.Parameter, default: DataParallel
) -> tuple[DataParallel, int]:
    """The mesh and the tensor dim that a ``shard_placement_fn`` has chosen."""
    parallel = default
    if result is not None and not isinstance(result, Shard):
        info: Any = getattr(result, "mesh_info", None)
        mesh = info if isinstance(info, DeviceMesh) else getattr(info, "mesh", None)
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(f"Invalid shard_placement_fn result: {result}")
        dims = getattr(info, "dp_mesh_dims", None)
        whole = mesh if info is None or dims is None else info.spmd_mesh
        parallel = data_parallel(whole, dims, "fully_shard", shard=True)
        result = result.placement
    dim = 0 if result is None else result.dim
    if not -parameter.ndim <= dim < parameter.ndim:
        raise ValueError(
            f"Shard dim {dim} is invalid for {parameter.ndim}D tensor: {parameter.shape}"
        )
    return parallel, dim % parameter.ndim


# A module's class is told from another's by identity, so one that modules have isn't made anew.
_classes: Interned[tuple[type, type], type] = Interned("classes of managed modules", 64)


def _no_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def add_mixin(modules: Sequence[nn.Module], mixin: type, prefix: str) -> None:
    """Put ``mixin`` first in the classes of ``modules``."""
    for module in modules:
        cls = type(module)
        new = _classes.get((cls, mixin))
        if new is None:
            body = {"__deepcopy__": _no_deepcopy}
            new = _classes.put((cls, mixin), type(f"{prefix}{cls.__name__}", (mixin, cls), body))
        module.__class__ = new


def check_modules(modules: Any) -> None:
    for module in modules:
        if not isinstance(module, TorchFSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}")
