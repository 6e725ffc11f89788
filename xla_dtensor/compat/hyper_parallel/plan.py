"""``shard_module`` by a ``ShardingPlan``: layouts of parameters, inputs and outputs by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from xla_dtensor.base.torch_private.attributes import parameters_of
from xla_dtensor.compat.hyper_parallel.mesh import distribute_tensor, placements_in
from xla_dtensor.mesh.dim_names import has_placements
from xla_dtensor.mesh.layout import Layout
from xla_dtensor.movement.shared_parameters import share_again, shared_slots


@dataclass
class ShardingPlan:
    """The layouts of a module.

    Attributes:
        plan: of parameters, by their names.
        input_plan: of inputs: by ``"input"``, or ``"module.input"`` of a module inside, a layout, a
            list of one per argument, or a dict by the names of the arguments; None leaves one as it
            is.
        output_plan: of outputs likewise, by ``"output"``.
        return_local_tensor: the names of modules whose outputs become what each device holds.
    """

    plan: Mapping[str, Any] | None = None
    input_plan: Mapping[str, Any] | None = None
    output_plan: Mapping[str, Any] | None = None
    return_local_tensor: Sequence[str] | None = None


def shard_module(model: nn.Module, device_mesh: DeviceMesh, sharding_plan: ShardingPlan) -> Any:
    """Shard a module by a plan. A layout is placements, or per tensor dim the names of mesh dims.

    Args:
        model: changed in place, and brought to the devices.
        device_mesh: an xla mesh.
        sharding_plan: what is laid out how.

    Returns:
        ``model``. Sharded parameters are new objects: make optimizers after it.

    Raises:
        ValueError: the plan names a parameter or a module that there isn't, or something other than
            ``input`` and ``output``.

    Example::

        import torch, xla_dtensor as xd
        from xla_dtensor.compat.hyper_parallel import ShardingPlan, shard_module

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        plan = ShardingPlan({"weight": ("tp", "None")}, {"input": ("dp", "None")})
        layer = shard_module(torch.nn.Linear(4, 8, bias=False), mesh, plan)
        x = xd.distribute_tensor(torch.ones(4, 4), mesh, [xd.Replicate(), xd.Replicate()])
        assert layer(x).placements == (xd.Shard(0), xd.Shard(1))
    """
    modules = dict(model.named_modules())
    model.to("xla")
    shared = shared_slots(model)
    for name, layout in (sharding_plan.plan or {}).items():
        path, _, last = name.rpartition(".")
        owner = modules.get(path)
        parameter = None if owner is None else parameters_of(owner).get(last)
        if parameter is None:
            raise ValueError(f"shard_module: {type(model).__name__} has no parameter {name!r}")
        assert owner is not None
        sharded = distribute_tensor(parameter.detach(), device_mesh, layout)
        owner.register_parameter(last, nn.Parameter(sharded, parameter.requires_grad))
    share_again(shared)
    for what, entries in (
        ("input", sharding_plan.input_plan),
        ("output", sharding_plan.output_plan),
    ):
        for key, layout in (entries or {}).items():
            path, _, last = key.rpartition(".")
            if last != what:
                raise ValueError(f"shard_module: the key {key!r} must end with {what!r}")
            if layout is not None:
                _hook(_module(modules, path, key), what, layout, device_mesh)
    for path in sharding_plan.return_local_tensor or ():
        module = _module(modules, path, path)
        module.register_forward_hook(lambda m, inputs, outputs: _each(outputs, _local))
    return model


def _module(modules: dict[str, nn.Module], path: str, key: str) -> nn.Module:
    if path not in modules:
        raise ValueError(f"shard_module: there is no module {path!r}, which {key!r} is about")
    return modules[path]


def _hook(module: nn.Module, what: str, layout: Any, mesh: DeviceMesh) -> None:
    if what == "output":
        module.register_forward_hook(
            lambda m, inputs, outputs: _laid_out_all(outputs, layout, mesh, "outputs")
        )
        return
    names = list(inspect.signature(module.forward).parameters)

    def before(m: nn.Module, args: Any, kwargs: Any) -> Any:
        if isinstance(layout, Mapping):
            new = tuple(
                _laid_out(x, layout.get(n), mesh) for x, n in zip(args, names, strict=False)
            )
            named = {n: _laid_out(x, layout.get(n), mesh) for n, x in kwargs.items()}
            return new, named
        return tuple(_laid_out_all(args, layout, mesh, "inputs")), kwargs

    module.register_forward_pre_hook(before, with_kwargs=True)


def _is_one(layout: Any) -> bool:
    """Whether this is one layout, and not one per value."""
    if isinstance(layout, Layout):
        return True
    return isinstance(layout, list | tuple) and (
        has_placements(layout) or any(isinstance(entry, str) for entry in layout)
    )


def _laid_out_all(values: Any, layout: Any, mesh: DeviceMesh, what: str) -> Any:
    several = isinstance(values, list | tuple)
    layouts = [layout] if _is_one(layout) else list(layout)
    found = list(values) if several else [values]
    if len(layouts) != len(found):
        raise ValueError(
            f"shard_module: the plan has layouts of {len(layouts)} {what}, and there are "
            f"{len(found)}"
        )
    done = [_laid_out(x, each, mesh) for x, each in zip(found, layouts, strict=True)]
    return tuple(done) if several else done[0]


def _laid_out(value: Any, layout: Any, mesh: DeviceMesh) -> Any:
    if layout is None or not isinstance(value, DTensor):
        return value
    return value.redistribute(mesh, placements_in(layout, mesh, value.ndim))


def _each(value: Any, function: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_each(each, function) for each in value)
    return function(value)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
