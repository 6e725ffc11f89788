"""One optimizer and one clipping for all stages, and compiled stages: as CPU torch trains."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd
from tests.pipeline.harness import DIM, mesh_of, parameters, parts, stages_of, where, whole
from xla_dtensor.integration.optimizers.optimizer_steps import _updating

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "adamw, a loop": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


def train(
    pipeline: xd.pipeline.PipelineSchedule,
    optimizer: torch.optim.Optimizer,
    own: list[nn.Parameter],
    mesh: Any,
    steps: int,
    **clipping: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    losses, norms = [], []
    for seed in range(steps):
        x, y = batch(seed)
        found: list[Any] = []
        given = [distribute_tensor(v, mesh, [Shard(0)]) for v in (x, y)]
        pipeline.step(given[0], target=given[1], losses=found)
        norms.append(whole(nn.utils.clip_grad_norm_(own, 0.1, **clipping)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack([whole(loss) for loss in found]).mean())
    return losses, norms


def train_on_cpu(
    modules: list[nn.Module], optimizer: torch.optim.Optimizer, steps: int, **clipping: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = nn.Sequential(*modules)
    losses, norms = [], []
    for seed in range(steps):
        x, y = batch(seed)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, **clipping))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, norms


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, DIM, generator=generator)
    return x, x.flip(-1).sin()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_optimizer_for_all_stages(name: str) -> None:
    modules = parts(4)
    meshes = where("loop", 4, xd.pipeline.stage_meshes(mesh_of(2, 2)))
    stages = stages_of(modules, meshes)
    pipeline = xd.pipeline.PipelineSchedule(
        ScheduleInterleaved1F1B, stages, 2, nn.functional.mse_loss
    )
    own = parameters(stages)
    found = train(pipeline, OPTIMIZERS[name](own), own, meshes[0], 3)
    on_cpu = [p for module in modules for p in module.parameters()]
    wanted = train_on_cpu(modules, OPTIMIZERS[name](on_cpu), 3)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    for ours, theirs in zip(own, on_cpu, strict=True):
        torch.testing.assert_close(whole(ours), theirs.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "clipping", [{"foreach": False}, {"norm_type": float("inf")}, {"foreach": True}]
)
def test_clip_grad_norm(clipping: dict[str, Any]) -> None:
    modules = parts(2)
    meshes = xd.pipeline.stage_meshes(mesh_of(2, 2, 2))
    stages = stages_of(modules, meshes)
    torch.manual_seed(3)
    on_cpu = [p for module in modules for p in module.parameters()]
    own = parameters(stages)
    for i, (ours, theirs) in enumerate(zip(own, on_cpu, strict=True)):
        theirs.grad = torch.randn_like(theirs)
        mesh = ours.device_mesh
        # Of one norm some gradients are whole, some sharded, some on a part of their mesh.
        on = (mesh, mesh["dp"], mesh["tp"])[i % 3]
        ours.grad = distribute_tensor(theirs.grad, on, [Shard(0)] * on.ndim).clone()
    found = nn.utils.clip_grad_norm_(own, 0.5, **clipping)
    wanted = nn.utils.clip_grad_norm_(on_cpu, 0.5, **clipping)
    torch.testing.assert_close(whole(found), wanted)
    for ours, theirs in zip(own, on_cpu, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(whole(ours.grad), theirs.grad)


def test_lists_over_stages() -> None:
    """Moving averages, clipping by value: what is done to lists of all stages' tensors."""
    values = [torch.randn(4, 4) for _ in range(4)]
    meshes = xd.pipeline.stage_meshes(mesh_of(2, 2))
    ours = [distribute_tensor(v, meshes[i % 2], [Shard(0)]) for i, v in enumerate(values)]
    others = [v * 2 for v in ours]
    torch._foreach_lerp_(ours, others, 0.25)
    torch.testing.assert_close([whole(v) for v in ours], [v * 1.25 for v in values])
    sums = torch._foreach_add(ours, others)
    assert [s.device_mesh for s in sums] == [o.device_mesh for o in ours]
    torch.testing.assert_close([whole(v) for v in sums], [v * 3.25 for v in values])
    factor = distribute_tensor(torch.tensor(2.0), meshes[1], [xd.Replicate()])
    torch._foreach_mul_(ours, factor)
    torch.testing.assert_close([whole(v) for v in ours], [v * 2.5 for v in values])
    total = torch.stack([v.square().sum() for v in ours]).sum()
    torch.testing.assert_close(
        whole(total), sum(((v * 2.5).square().sum() for v in values), torch.tensor(0.0))
    )


def test_a_scalar_with_a_gradient_stays() -> None:
    """Its gradient would have to find its way back, which `redistribute` does."""
    a, b = (
        distribute_tensor(torch.randn(4), on, [Shard(0)]).requires_grad_()
        for on in xd.pipeline.stage_meshes(mesh_of(2, 2))
    )
    losses = [a.square().sum(), b.square().sum()]
    with pytest.raises(xd.MeshMismatchError, match="redistribute"):
        losses[0] + losses[1]
    with pytest.raises(xd.MeshMismatchError, match="redistribute"):
        a.detach() + b.detach()
    total = losses[0] + losses[1].redistribute(a.device_mesh, [xd.Replicate()])
    total.backward()
    assert a.grad is not None and b.grad is not None
    torch.testing.assert_close([whole(a.grad), whole(b.grad)], [whole(a) * 2, whole(b) * 2])


def test_a_failed_optimizer_step_is_undone_in_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = parts(2)
    stages = stages_of(modules, xd.pipeline.stage_meshes(mesh_of(2)))
    own = parameters(stages)
    optimizer = torch.optim.SGD(own, lr=1.0)
    for p in own:
        p.grad = torch.ones_like(p)
    before = [whole(p).clone() for p in own]
    module: Any = importlib.import_module("torch.optim.sgd")
    original = module._multi_tensor_sgd.__wrapped__
    calls = []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        original(*args, **kwargs)
        if len(calls) == 2:
            raise OSError("in the second stage")

    monkeypatch.setattr(module, "_multi_tensor_sgd", _updating(failing, of_lists=True))
    with pytest.raises(OSError):
        optimizer.step()
    assert len(calls) == 2
    torch.testing.assert_close([whole(p) for p in own], before)


def test_compiled_stages() -> None:
    modules = parts(4)
    meshes = where("loop", 4, xd.pipeline.stage_meshes(mesh_of(2, 2)))
    stages = stages_of(modules, meshes, compile=True)
    pipeline = xd.pipeline.PipelineSchedule(
        ScheduleInterleaved1F1B, stages, 2, nn.functional.mse_loss
    )
    own = parameters(stages)
    found = train(pipeline, torch.optim.AdamW(own, lr=0.05), own, meshes[0], 4)
    on_cpu = [p for module in modules for p in module.parameters()]
    wanted = train_on_cpu(modules, torch.optim.AdamW(on_cpu, lr=0.05), 4)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    for stage in stages:
        assert stage.compiled is not None and stage.compiled.recompilations == []


@pytest.mark.slow
def test_compiled_stages_under_fully_shard() -> None:
    modules = parts(2)
    meshes = xd.pipeline.stage_meshes(mesh_of(2, 2))

    def lay_out(module: Any, mesh: Any) -> Any:
        return xd.fully_shard(module, mesh=mesh)

    eager, compiled = (stages_of(modules, meshes, lay_out, compile=c) for c in (False, True))
    results = []
    for stages in (eager, compiled):
        pipeline = xd.pipeline.PipelineSchedule(Schedule1F1B, stages, 2, nn.functional.mse_loss)
        own = parameters(stages)
        results.append(train(pipeline, torch.optim.AdamW(own, lr=0.05), own, meshes[0], 3))
    on_cpu = [p for module in modules for p in module.parameters()]
    wanted = train_on_cpu(modules, torch.optim.AdamW(on_cpu, lr=0.05), 3)
    for found in results:
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_a_change_between_steps_is_seen() -> None:
    """A mode, a replaced parameter, a frozen one: eagerly and compiled."""
    modules = parts(2)
    x, y = batch(0)
    on = xd.pipeline.stage_meshes(mesh_of(2))
    for compile in (False, True):
        stages = stages_of(modules, on, compile=compile)
        pipeline = xd.pipeline.PipelineSchedule(Schedule1F1B, stages, 2, nn.functional.mse_loss)
        pipeline.step(x, target=y)
        bias: Any = stages[1].submod.down.bias
        with torch.no_grad():
            bias.fill_(3.0)
        stages[0].submod.up.weight.requires_grad_(False)
        for parameter in parameters(stages):
            parameter.grad = None
        losses: list[Any] = []
        pipeline.step(x, target=y, losses=losses)
        torch.manual_seed(7)
        expected = parts(2)
        with torch.no_grad():
            expected[1].down.bias.fill_(3.0)
        loss = nn.functional.mse_loss(nn.Sequential(*expected)(x), y)
        torch.testing.assert_close(torch.stack([whole(v) for v in losses]).mean(), loss.detach())
        assert stages[0].submod.up.weight.grad is None
        assert stages[0].submod.up.bias.grad is not None
