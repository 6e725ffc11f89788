"""`parallelize`: a model and its optimizer by one config, as Paddle's function of this name."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer

from xla_dtensor.errors import MeshDimError, UnsupportedOpError
from xla_dtensor.mesh import get_mesh
from xla_dtensor.parallel.fully_shard import fully_shard
from xla_dtensor.parallel.replicate import replicate
from xla_dtensor.parallel.zero import zero

_KNOWN = {"dp_config", "mp_config", "pp_config"}


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    mesh: DeviceMesh | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, Optimizer | None]:
    """Tensor and data parallelism of a model, and of its optimizer, by one config.

    Args:
        model: changed in place, and brought to the devices.
        optimizer: of the model's parameters, before it has taken a step; its parameters become
            those of the parallel model.
        mesh: an xla mesh with a dim "dp", and one "mp" or "tp" for tensor parallelism; by default
            the current one (`set_mesh`).
        config: ``dp_config``, a dict: ``sharding_level`` 0 (everything whole: `replicate`), 1 or 2
            (`zero`) or 3 (`fully_shard`); ``mp_config``, a dict: ``parallelize_plan``, torch's
            styles by the names of modules, in which ``*`` stands for any name.

    Returns:
        ``model`` and ``optimizer``. The model takes a batch of each device's own, or a global one,
        as `replicate` and `fully_shard` say.

    Raises:
        ValueError: a part of the config that isn't known, or a pattern that no module has.
        MeshDimError: the mesh lacks a dim.
        UnsupportedOpError: ``pp_config``; or an optimizer that has a state.

    Example::

        import torch, xla_dtensor as xd
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "mp"))
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        config = {"dp_config": {"sharding_level": 1}, "mp_config": {"parallelize_plan": plan}}
        model, optimizer = xd.parallel.parallelize(model, optimizer, mesh, config)
        batch = xd.from_device_values([torch.ones(2, 8), torch.zeros(2, 8)], mesh["dp"])
        model(batch).square().mean().backward()
        optimizer.step()
        assert len(optimizer.state[model[0].weight]["exp_avg"].placements) == 2
    """
    given = dict(config or {})
    unknown = sorted(set(given) - _KNOWN)
    if unknown:
        raise ValueError(f"parallelize(config={unknown}): it knows {sorted(_KNOWN)}")
    if given.get("pp_config"):
        raise UnsupportedOpError(
            "parallelize(pp_config=...): it doesn't cut models; give each stage's module to "
            "xla_dtensor.pipeline.PipelineStage, and parallelize the stages one by one"
        )
    if optimizer is not None and any(optimizer.state.values()):
        raise UnsupportedOpError(
            "parallelize: the optimizer has a state already; call it before the first step, and "
            "load the state after it (optimizer.load_state_dict)"
        )
    mesh = mesh or get_mesh()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    level = (given.get("dp_config") or {}).get("sharding_level", 0)
    plan = (given.get("mp_config") or {}).get("parallelize_plan")
    if level not in (0, 1, 2, 3):
        raise ValueError(f"parallelize(sharding_level={level}): 0, 1, 2 or 3")
    data_parallel = mesh[_dim(mesh, "dp")]
    tensor_parallel = mesh[_dim(mesh, "mp", "tp")] if plan else None
    model.to("xla")
    if plan:
        _check_plan(model, plan)
        parallelize_module(model, tensor_parallel, dict(plan))
    parallel: Any = fully_shard if level == 3 else replicate
    parallel(model, mesh=data_parallel)
    if optimizer is not None:
        now = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [now[names[id(p)]] if id(p) in names else p for p in group["params"]]
        if level in (1, 2):
            zero(optimizer, data_parallel, stage=level)
    return model, optimizer


def _dim(mesh: DeviceMesh, *names: str) -> str:
    for name in names:
        if name in (mesh.mesh_dim_names or ()):
            return name
    raise MeshDimError(
        f"parallelize: {mesh!r} has no dim {' or '.join(map(repr, names))}; its dims are "
        f"{mesh.mesh_dim_names}"
    )


def _check_plan(model: nn.Module, plan: Mapping[str, Any]) -> None:
    """torch warns of a name that no module has, and goes on."""
    for pattern in plan:
        if not _matches(model, pattern.split(".")):
            raise ValueError(
                f"parallelize: no module of {type(model).__name__} is called {pattern!r}"
            )


def _matches(module: nn.Module, pattern: list[str]) -> bool:
    first, *rest = pattern
    found = [child for name, child in module.named_children() if not first or fnmatch(name, first)]
    return any(not rest or _matches(child, rest) for child in found) or pattern == [""]
