"""torch's schedules over stages on their own devices: CPU torch's losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import xla_dtensor as xd
from tests.pipeline.harness import (
    DIM,
    assert_gradients,
    mesh_of,
    parts,
    stages_of,
    where,
    whole,
)

# Schedule, stages, and how they lie on two meshes.
SCHEDULES: dict[str, tuple[Any, int, str]] = {
    "gpipe": (ScheduleGPipe, 2, "loop"),
    "1f1b": (Schedule1F1B, 2, "loop"),
    "interleaved": (ScheduleInterleaved1F1B, 4, "loop"),
    "looped_bfs": (ScheduleLoopedBFS, 4, "loop"),
    "zero_bubble": (ScheduleInterleavedZeroBubble, 4, "loop"),
    "zbv": (ScheduleZBVZeroBubble, 4, "v"),
    "dual_pipe_v": (ScheduleDualPipeV, 4, "v"),
}


def batch(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3, DIM), torch.randn(size, 3, DIM)


def on_cpu(
    modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the loss whose gradients the modules have then."""
    out = nn.Sequential(*modules)(x)
    loss = nn.functional.mse_loss(out, y)
    loss.backward()
    return out.detach(), loss.detach()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", SCHEDULES)
def test_losses_and_gradients(name: str) -> None:
    schedule, count, style = SCHEDULES[name]
    modules = parts(count)
    meshes = where(style, count, xd.pipeline.stage_meshes(mesh_of(2, 2)))
    stages = stages_of(modules, meshes)
    pipeline = xd.pipeline.PipelineSchedule(schedule, stages, 4, nn.functional.mse_loss)
    x, y = batch()
    losses: list[Any] = []
    # Cut over "dp", and then into microbatches: each is a part of the batch on every device.
    given = [distribute_tensor(v, meshes[0], [Shard(0)]) for v in (x, y)]
    out = pipeline.step(given[0], target=given[1], losses=losses)
    wanted, loss = on_cpu(modules, x, y)
    torch.testing.assert_close(whole(out), wanted)
    torch.testing.assert_close(torch.stack([whole(one) for one in losses]).mean(), loss)
    assert_gradients(stages, modules)
    for stage, on in zip(stages, meshes, strict=True):
        for parameter in stage.submod.parameters():
            assert parameter.device_mesh == on and parameter.grad.device_mesh == on


def test_microbatches_of_a_batch_on_the_cpu_are_its_rows() -> None:
    modules = parts(2)
    stages = stages_of(modules, xd.pipeline.stage_meshes(mesh_of(2, 4)))
    pipeline = xd.pipeline.PipelineSchedule(Schedule1F1B, stages, 4, nn.functional.mse_loss)
    x, y = batch()
    losses: list[Any] = ["old"]
    out = pipeline.step(x, target=y, losses=losses)
    wanted, _ = on_cpu(modules, x, y)
    torch.testing.assert_close(whole(out), wanted)
    expected = [
        nn.functional.mse_loss(*rows) for rows in zip(wanted.chunk(4), y.chunk(4), strict=True)
    ]
    torch.testing.assert_close([whole(one) for one in losses], expected)


@pytest.mark.slow
def test_without_other_dims() -> None:
    """A stage on one device."""
    modules = parts(4)
    stages = stages_of(modules, xd.pipeline.stage_meshes(mesh_of(4)))
    pipeline = xd.pipeline.PipelineSchedule(Schedule1F1B, stages, 4, nn.functional.mse_loss)
    x, y = batch()
    pipeline.step(x, target=y)
    on_cpu(modules, x, y)
    assert_gradients(stages, modules)
    ids = [stage.submod.up.weight.device_mesh.mesh.tolist() for stage in stages]
    assert ids == [[0], [1], [2], [3]]


def test_gradients_add_up_without_a_mean() -> None:
    modules = parts(2)
    stages = stages_of(modules, xd.pipeline.stage_meshes(mesh_of(2)))
    pipeline = xd.pipeline.PipelineSchedule(
        ScheduleGPipe, stages, 2, nn.functional.mse_loss, scale_grads=False
    )
    x, y = batch()
    for _ in range(2):  # two steps without zero_grad
        pipeline.step(x, target=y)
    for rows in (*zip(x.chunk(2), y.chunk(2), strict=True),) * 2:
        on_cpu(modules, *rows)
    assert_gradients(stages, modules)


@pytest.mark.parametrize(
    ("schedule", "style", "other"),
    [(ScheduleInterleaved1F1B, "loop", 2), (ScheduleZBVZeroBubble, "v", 3)],
)
def test_a_parameter_of_two_stages(schedule: Any, style: str, other: int) -> None:
    """On one mesh stages may share one; its gradient is divided once, when both are done."""
    expected = parts(4)
    stages = stages_of(expected, where(style, 4, xd.pipeline.stage_meshes(mesh_of(2, 2))))
    for modules in (expected, [stage.submod for stage in stages]):
        first, second = (modules[i].up for i in (0, other))
        second.weight = first.weight  # type: ignore[union-attr]
    x, y = torch.randn(16, DIM), torch.randn(16, DIM)
    xd.pipeline.PipelineSchedule(schedule, stages, 4, nn.functional.mse_loss).step(x, target=y)
    nn.functional.mse_loss(nn.Sequential(*expected)(x), y).backward()
    assert_gradients(stages, expected)


def test_fully_shard_and_tensor_parallelism() -> None:
    """Each device along "dp" has a batch of its own; parameters are sharded over both dims."""
    modules = parts(2)
    meshes = xd.pipeline.stage_meshes(mesh_of(2, 2, 2))

    def lay_out(module: Any, mesh: Any) -> Any:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(module.to("xla"), mesh["tp"], plan)
        return xd.fully_shard(module, mesh=mesh["dp"])

    stages = stages_of(modules, meshes, lay_out)
    pipeline = xd.pipeline.PipelineSchedule(Schedule1F1B, stages, 2, nn.functional.mse_loss)
    own = [batch(4) for _ in range(2)]
    x = xd.from_device_values([x for x, _ in own], meshes[0]["dp"])
    y = xd.from_device_values([y for _, y in own], meshes[1]["dp"])
    losses: list[Any] = []
    pipeline.step(x, target=y, losses=losses)
    wanted = [on_cpu(modules, *each)[1] for each in own]  # the sum over devices
    for module in modules:
        for parameter in module.parameters():
            parameter.grad /= len(own)  # fully_shard's mean
    assert_gradients(stages, modules)
    values = [loss.local_values()[::2] for loss in losses]
    found = [torch.stack([v[i] for v in values]).mean() for i in range(2)]
    torch.testing.assert_close(found, wanted)
    assert stages[1].submod.up.weight.placements[1] == Shard(0)


def test_activations_keep_their_layout() -> None:
    """Nothing is gathered on the way: each device's part goes to the device in its place."""
    seen: list[Any] = []

    class Looking(nn.Module):
        def forward(self, x: Any) -> Any:
            seen.append(x)
            return x * 2

    meshes = xd.pipeline.stage_meshes(mesh_of(2, 2, 2))
    x = distribute_tensor(torch.randn(4, DIM), meshes[0], [Shard(0), Shard(1)])
    stages = [xd.pipeline.PipelineStage(Looking(), i, 2, on) for i, on in enumerate(meshes)]
    xd.pipeline.PipelineSchedule(ScheduleGPipe, stages, 1).step(x)
    assert [t.device_mesh for t in seen] == meshes
    assert [t.placements for t in seen] == [(Shard(0), Shard(1))] * 2
    for before, after in zip(seen[0].local_shards, seen[1].local_shards, strict=True):
        assert torch.equal(torch.as_tensor(before.data) * 2, torch.as_tensor(after.data))


def test_several_tensors_between_stages() -> None:
    """A tuple, of which one is of integers and one gets no gradient."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, DIM)

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = self.table(tokens)
            return x, tokens, x.detach() * 2

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(DIM, 10)

        def forward(
            self, x: torch.Tensor, tokens: torch.Tensor, y: torch.Tensor, scale: float = 1.0
        ) -> torch.Tensor:
            return self.out(x * scale + y) + tokens.unsqueeze(-1)

    torch.manual_seed(1)
    modules: list[nn.Module] = [First(), Second()]
    stages = stages_of(modules, xd.pipeline.stage_meshes(mesh_of(2, 2)))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    tokens, target = torch.randint(10, (4, 3)), torch.randint(10, (4, 3))
    pipeline = xd.pipeline.PipelineSchedule(Schedule1F1B, stages, 2, loss_fn)
    losses: list[Any] = []
    pipeline.step(tokens, target=target, losses=losses)
    wanted = loss_fn(modules[1](*modules[0](tokens)), target)
    wanted.backward()
    torch.testing.assert_close(torch.stack([whole(v) for v in losses]).mean(), wanted.detach())
    assert_gradients(stages, modules)


def test_a_stage_without_gradients() -> None:
    modules = parts(3)
    modules[0].requires_grad_(False)
    stages = stages_of(modules, xd.pipeline.stage_meshes(mesh_of(3)))
    pipeline = xd.pipeline.PipelineSchedule(Schedule1F1B, stages, 3, nn.functional.mse_loss)
    x, y = batch(6)
    pipeline.step(x, target=y)
    on_cpu(modules, x, y)
    assert all(p.grad is None for p in stages[0].submod.parameters())
    assert_gradients(stages[1:], modules[1:])


def test_an_input_that_requires_grad() -> None:
    modules = parts(2)
    stages = stages_of(modules, xd.pipeline.stage_meshes(mesh_of(2)))
    pipeline = xd.pipeline.PipelineSchedule(
        ScheduleGPipe, stages, 2, nn.functional.mse_loss, scale_grads=False
    )
    x, y = batch()
    ours = x.to("xla").requires_grad_()
    pipeline.step(ours, target=y)
    x.requires_grad_()
    for rows in zip(x.chunk(2), y.chunk(2), strict=True):
        on_cpu(modules, *rows)
    torch.testing.assert_close(whole(ours.grad), x.grad)


def test_eval_computes_no_gradients() -> None:
    modules = parts(4)
    stages = stages_of(modules, where("v", 4, xd.pipeline.stage_meshes(mesh_of(2))))
    pipeline = xd.pipeline.PipelineSchedule(
        ScheduleZBVZeroBubble, stages, 4, nn.functional.mse_loss
    )
    x, y = batch()
    losses: list[Any] = []
    with torch.no_grad():
        out = pipeline.eval(x, target=y, losses=losses)
        assert pipeline.eval(x) is not None  # without a target: the outputs alone
    wanted = nn.Sequential(*modules)(x)
    torch.testing.assert_close(whole(out), wanted.detach())
    assert len(losses) == 4 and not any(
        p.grad is not None for s in stages for p in s.submod.parameters()
    )
    pipeline.step(x, target=y)
    on_cpu(modules, x, y)
    assert_gradients(stages, modules)


def test_forward_alone() -> None:
    modules = parts(2)
    stages = stages_of(modules, xd.pipeline.stage_meshes(mesh_of(2, 2)))
    pipeline = xd.pipeline.PipelineSchedule(ScheduleGPipe, stages, 2)
    x, _ = batch()
    out = pipeline.step(x)
    torch.testing.assert_close(whole(out), nn.Sequential(*modules)(x).detach())
    assert pipeline.step(x, return_outputs=False) is None


def test_a_batch_on_the_whole_mesh_goes_to_the_stages() -> None:
    """What a loader has placed on ``mesh["dp"]``, which all stages' devices have."""
    mesh = mesh_of(2, 2, 2)
    modules = parts(2)
    stages = stages_of(modules, xd.pipeline.stage_meshes(mesh))
    pipeline = xd.pipeline.PipelineSchedule(Schedule1F1B, stages, 2, nn.functional.mse_loss)
    x, y = batch()
    given = [distribute_tensor(v, mesh["dp"], [Shard(0)]) for v in (x, y)]
    pipeline.step(given[0], target=given[1])
    on_cpu(modules, x, y)
    assert_gradients(stages, modules)
    whole_mesh = distribute_tensor(x, mesh, [Replicate(), Shard(0), Replicate()])
    torch.testing.assert_close(
        whole(pipeline.eval(whole_mesh)), nn.Sequential(*modules)(x).detach()
    )


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    class Failing(nn.Module):
        fails = True

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise OSError("no more")
            return self.inner(x)

    modules = parts(2)
    stages = stages_of([modules[0], Failing(modules[1])], xd.pipeline.stage_meshes(mesh_of(2)))
    pipeline = xd.pipeline.PipelineSchedule(ScheduleGPipe, stages, 2, nn.functional.mse_loss)
    x, y = batch()
    with pytest.raises(RuntimeError, match="Stage 1") as caught:
        pipeline.step(x, target=y)
    assert isinstance(caught.value.__cause__, OSError)
    Failing.fails = False
    losses: list[Any] = []
    pipeline.step(x, target=y, losses=losses)
    on_cpu(modules, x, y)
    assert len(losses) == 2
    assert_gradients(stages[:1], modules[:1])
