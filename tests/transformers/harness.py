"""An architecture's loss and gradients on a mesh, compared with CPU torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.transformers.architectures import Architecture

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


@dataclass
class Difference:
    """How far a run is from CPU torch's.

    Attributes:
        loss: of the loss, absolute.
        gradient: of any parameter's gradient, the largest absolute difference over the largest
            absolute value, or over a thousandth of the largest in the model if that is more (the
            gradient of a bias of keys is 0 but for rounding).
        where: the parameter of that.
        sharded: how many parameters lie in parts, and of how many.
    """

    loss: float
    gradient: float
    where: str
    sharded: tuple[int, int]


def on_cpu(architecture: Architecture) -> Result:
    model = architecture.make()
    loss = model(**architecture.batch()).loss
    loss.backward()
    return loss.detach(), gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole(value: torch.Tensor) -> torch.Tensor:
    """The one value of a tensor, on the CPU. What an all-reduce has written into a view counts as
    varying still; then all devices have to have the same."""
    value = value.detach()
    if isinstance(value, xd.XLATensor) and value.varying:
        first, *others = value.local_values()
        assert all(torch.equal(first, other) for other in others)
        return first
    return (value.full_tensor() if isinstance(value, xd.XLAShardedTensor) else value).cpu()


def by_size(architecture: Architecture, mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Any]]:
    """Parameters cut by their size over all of a ("dp", "tp") mesh, the batch over "dp"."""
    model = xd.parallel.shard_by_size(architecture.make(), mesh, least=256)
    layout = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    batch = architecture.batch().items()
    return model, {name: distribute_tensor(value, mesh, layout) for name, value in batch}


def by_plan(architecture: Architecture, mesh: DeviceMesh) -> tuple[nn.Module, dict[str, Any]]:
    """transformers' own plan for the class, applied by transformers (what ``tp_plan="auto"`` of
    ``from_pretrained`` does with a checkpoint)."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model: Any = architecture.make().to("xla")
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    # `from_pretrained` does it before weights are shared, and ties them after it.
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    apply_tensor_parallelism(model, mesh, {n: style for n, style in plan.items() if n in names})
    model.tie_weights()
    batch = {name: value.to("xla") for name, value in architecture.batch().items()}
    # The first forward registers hooks on parameters, which no compiled step may leave behind.
    model(**batch)
    return model, batch


def has_plan(architecture: Architecture) -> bool:
    model: Any = architecture.make()
    return bool(model.tp_plan)


def run(model: nn.Module, batch: dict[str, Any], *, compiled: bool = True) -> Result:
    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    loss = (xd.compile(step) if compiled else step)(batch)
    return whole(loss), gradients(model)


def difference(found: Result, wanted: Result, model: nn.Module) -> Difference:
    assert set(found[1]) == set(wanted[1]), set(found[1]) ^ set(wanted[1])
    worst, where = 0.0, ""
    largest = max(gradient.abs().max().item() for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        scale = max(gradient.abs().max().item(), largest / 1000)
        off = (found[1][name] - gradient).abs().max().item() / scale
        if not off <= worst:  # also if it is no number
            worst, where = off, name
    parameters = list(model.parameters())
    parts = sum(any(not p.is_replicate() for p in getattr(q, "placements", ())) for q in parameters)
    loss = abs(found[0].item() - wanted[0].item())
    return Difference(loss, worst, where, (parts, len(parameters)))
