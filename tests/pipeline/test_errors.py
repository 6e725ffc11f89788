"""Bad input, and the order of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd
from tests.pipeline.harness import DIM, mesh_of, parts, stages_of, where
from xla_dtensor.pipeline.order import BACKWARD, FORWARD, Action, merged
from xla_dtensor.pipeline.transfer import to_stage

mse = nn.functional.mse_loss


def pipeline(
    count: int = 2, n_microbatches: int = 2, **options: Any
) -> xd.pipeline.PipelineSchedule:
    stages = stages_of(parts(count), xd.pipeline.stage_meshes(mesh_of(count, 2)))
    return xd.pipeline.PipelineSchedule(ScheduleGPipe, stages, n_microbatches, mse, **options)


def test_stage_meshes() -> None:
    mesh = mesh_of(2, 2, 2)
    assert [m.mesh.tolist() for m in xd.pipeline.stage_meshes(mesh)] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]
    by_tp = xd.pipeline.stage_meshes(mesh, "tp")
    assert [m.mesh_dim_names for m in by_tp] == [("pp", "dp")] * 2
    assert [m.mesh.tolist() for m in by_tp] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    (first, _) = xd.pipeline.stage_meshes(mesh_of(2))
    assert first.mesh_dim_names == ("pp",) and first.mesh.tolist() == [0]
    with pytest.raises(xd.MeshDimError, match="no mesh dim 'ep'"):
        xd.pipeline.stage_meshes(mesh, "ep")
    with pytest.raises(xd.MeshError, match="leaves out devices"):
        xd.pipeline.stage_meshes(mesh["pp", "dp"])
    with pytest.raises(xd.MeshError, match="mesh_dim_names"):
        xd.pipeline.stage_meshes(xd.init_device_mesh("xla", (2, 2)))


def test_a_stage_on_a_wrong_mesh() -> None:
    meshes = xd.pipeline.stage_meshes(mesh_of(2, 2))
    module = xd.distribute_module(nn.Linear(DIM, DIM), meshes[0])
    with pytest.raises(xd.MeshMismatchError, match=r"PipelineStage 1: 'weight' .*devices \[0, 1\]"):
        xd.pipeline.PipelineStage(module, 1, 2, meshes[1])
    with pytest.raises(xd.PipelineError, match="'weight' is on the cpu device"):
        xd.pipeline.PipelineStage(nn.Linear(2, 2), 0, 2, meshes[0])
    with pytest.raises(xd.PipelineError, match="'weight' is on the meta device"):
        xd.pipeline.PipelineStage(nn.Linear(2, 2, device="meta"), 0, 2, meshes[0])
    with pytest.raises(xd.MeshError, match="stage_meshes"):
        xd.pipeline.PipelineStage(nn.Linear(2, 2).to("xla"), 0, 2, mesh_of(2, 2)["dp"])
    with pytest.raises(ValueError, match="one of 0 to 1"):
        xd.pipeline.PipelineStage(nn.Linear(2, 2).to("xla"), 2, 2, meshes[0])


def test_a_module_on_no_mesh_goes_to_the_stages() -> None:
    mesh = xd.pipeline.stage_meshes(mesh_of(2, 2))[1]
    stage = xd.pipeline.PipelineStage(nn.Linear(2, 2).to("xla"), 0, 1, mesh)
    devices = stage.submod.weight._storage_.array.sharding.device_set
    assert sorted(d.id for d in devices) == [2, 3]


def test_stages_that_are_no_pipeline() -> None:
    meshes = xd.pipeline.stage_meshes(mesh_of(2, 2))
    stages = stages_of(parts(2), meshes)
    for wrong in (stages[:1], [stages[0], stages[0]], []):
        with pytest.raises(xd.PipelineError, match="all stages of one pipeline"):
            xd.pipeline.PipelineSchedule(ScheduleGPipe, wrong, 2)
    with pytest.raises(xd.PipelineError, match=r"no xla_dtensor\.pipeline\.PipelineStage"):
        xd.pipeline.PipelineSchedule(ScheduleGPipe, [PipelineStage.__new__(PipelineStage)], 2)  # type: ignore[list-item]
    with pytest.raises(xd.PipelineError, match="the class of a schedule"):
        xd.pipeline.PipelineSchedule("1F1B", stages, 2)
    with pytest.raises(xd.PipelineError, match="1 or more"):
        xd.pipeline.PipelineSchedule(ScheduleGPipe, stages, 0)
    with pytest.raises(ValueError, match="must be greater"):  # torch's
        xd.pipeline.PipelineSchedule(Schedule1F1B, stages, 1)


def test_stages_where_the_schedule_has_others() -> None:
    meshes = xd.pipeline.stage_meshes(mesh_of(2, 2))
    loop, v = (stages_of(parts(4), where(style, 4, meshes)) for style in ("loop", "v"))
    with pytest.raises(xd.PipelineError, match="one stage for each coordinate"):
        xd.pipeline.PipelineSchedule(Schedule1F1B, loop, 4)
    with pytest.raises(xd.PipelineError, match=r"\[0, 1, 1, 0\] .* they are on \[0, 1, 0, 1\]"):
        xd.pipeline.PipelineSchedule(ScheduleZBVZeroBubble, loop, 4)
    with pytest.raises(xd.PipelineError, match=r"\[0, 1, 0, 1\] .* they are on \[0, 1, 1, 0\]"):
        xd.pipeline.PipelineSchedule(ScheduleInterleaved1F1B, v, 4)
    overlapping = [DeviceMesh("xla", ids, mesh_dim_names=("dp",)) for ids in ([0, 1], [1, 2])]
    with pytest.raises(xd.PipelineError, match="the same devices or none in common"):
        xd.pipeline.PipelineSchedule(ScheduleGPipe, stages_of(parts(2), overlapping), 2)


def test_batches_that_do_not_divide() -> None:
    four = pipeline(n_microbatches=4)
    x, y = torch.randn(6, DIM), torch.randn(6, DIM)
    with pytest.raises(xd.PipelineError, match=r"argument 0 .* size 6 doesn't divide into 4"):
        four.step(x, target=y)
    on = four._stages[0].mesh
    with pytest.raises(xd.PipelineError, match="on each of 2 devices"):
        four.step(distribute_tensor(torch.randn(12, DIM), on, [Shard(0)]), target=y)
    with pytest.raises(xd.PipelineError, match="the target of shape"):
        four.step(torch.randn(8, DIM), target=y)
    with pytest.raises(xd.PipelineError, match=r"argument 0 of shape \[0, 8\]: an empty batch"):
        four.step(x[:0], target=y[:0])
    with pytest.raises(xd.PipelineError, match="without dims"):
        four.step(torch.tensor(1.0), target=y)


def test_losses_and_targets_that_are_missing() -> None:
    x, y = torch.randn(4, DIM), torch.randn(4, DIM)
    with pytest.raises(xd.PipelineError, match="needs target="):
        pipeline().step(x)
    without = xd.pipeline.PipelineSchedule(ScheduleGPipe, pipeline()._stages, 2)
    with pytest.raises(xd.PipelineError, match="no loss function"):
        without.step(x, losses=[])
    with pytest.raises(xd.PipelineError, match="no loss function"):
        without.step(x, target=y)
    with torch.no_grad(), pytest.raises(RuntimeError, match="eval"):
        pipeline().step(x, target=y)


def test_outputs_that_are_no_tensors() -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"x": x}

    meshes = xd.pipeline.stage_meshes(mesh_of(2))
    stages = [xd.pipeline.PipelineStage(Wrong(), i, 2, on) for i, on in enumerate(meshes)]
    with pytest.raises(xd.PipelineError, match="stage 0 gave a dict as output 0"):
        xd.pipeline.PipelineSchedule(ScheduleGPipe, stages, 2).step(torch.ones(2, 2))


def test_activations_that_do_not_fit_the_next_mesh() -> None:
    first, second = (
        DeviceMesh("xla", ids, mesh_dim_names=(name,))
        for ids, name in (([0, 1], "dp"), ([2, 3], "tp"))
    )
    stages = [
        xd.pipeline.PipelineStage(nn.Identity(), i, 2, on) for i, on in enumerate((first, second))
    ]
    made = xd.pipeline.PipelineSchedule(ScheduleGPipe, stages, 1)
    with pytest.raises(xd.MeshMismatchError, match=r"output 0 of stage 0: .* has no dim 'dp'"):
        made.step(distribute_tensor(torch.ones(4), first, [Shard(0)]))
    own = xd.from_device_values([torch.ones(4), torch.ones(4)], first)
    with pytest.raises(xd.MeshMismatchError, match="varies along 'dp'"):
        made.step(own)


def test_compiled_stages_have_one_backward() -> None:
    meshes = where("loop", 4, xd.pipeline.stage_meshes(mesh_of(2)))
    stages = stages_of(parts(4), meshes, compile=True)
    with pytest.raises(xd.PipelineError, match="stage 0 is compiled"):
        xd.pipeline.PipelineSchedule(ScheduleInterleavedZeroBubble, stages, 4, mse)


# --- the order -----------------------------------------------------------------------------------


def most_in_flight(order: list[Action], stage: int) -> int:
    """The most microbatches whose activations a stage has at a time."""
    most = now = 0
    for action in order:
        if action.stage == stage:
            now += {FORWARD: 1, BACKWARD: -1}.get(action.kind, 0)
            most = max(most, now)
    return most


def test_1f1b_keeps_as_many_activations_as_stages_follow() -> None:
    stages = stages_of(parts(4), xd.pipeline.stage_meshes(mesh_of(4)))
    for schedule, wanted in ((Schedule1F1B, [4, 3, 2, 1]), (ScheduleGPipe, [8, 8, 8, 8])):
        order = xd.pipeline.PipelineSchedule(schedule, stages, 8, mse).order
        assert [most_in_flight(order, i) for i in range(4)] == wanted


def test_the_order_of_gpipe() -> None:
    order = pipeline().order
    assert [str(a) for a in order] == [
        "forward of microbatch 0 in stage 0",
        "forward of microbatch 0 in stage 1",
        "forward of microbatch 1 in stage 0",
        "forward of microbatch 1 in stage 1",
        "backward of microbatch 0 in stage 1",
        "backward of microbatch 0 in stage 0",
        "backward of microbatch 1 in stage 1",
        "backward of microbatch 1 in stage 0",
        "reduction of gradients in stage 1",
        "reduction of gradients in stage 0",
    ]


def test_schedules_that_cannot_be() -> None:
    f, b = (lambda s, m=0: Action(FORWARD, s, m)), (lambda s, m=0: Action(BACKWARD, s, m))
    with pytest.raises(
        xd.PipelineError, match=r"can't go on: .*forward of microbatch 0 in stage 1"
    ):
        merged([[b(0), f(0)], [f(1), b(1)]], 2, 1)
    with pytest.raises(xd.PipelineError, match="leaves out the forward of microbatch 1 in stage 0"):
        merged([[f(0), b(0)]], 1, 2)
    with pytest.raises(xd.PipelineError, match="twice"):
        merged([[f(0), f(0)]], 1, 1)
    with pytest.raises(xd.PipelineError, match="exactly once"):
        merged([[f(0)]], 1, 1)


def test_a_schedule_of_ones_own() -> None:
    class Backwards(ScheduleGPipe):
        """The last microbatch first."""

        def _step_microbatches(self, arg_mbs: Any = None, *args: Any, **kwargs: Any) -> None:
            stage = self._stage
            for i in reversed(range(self._n_microbatches)):
                stage.forward_one_chunk(i, (), {})
            for i in range(self._n_microbatches):
                stage.backward_one_chunk(i, loss=None)

    stages = stages_of(parts(2), xd.pipeline.stage_meshes(mesh_of(2)))
    made = xd.pipeline.PipelineSchedule(Backwards, stages, 2)
    x = torch.randn(4, DIM)
    assert [a.microbatch for a in made.order if a.kind == FORWARD and a.stage == 0] == [1, 0]
    out: Any = made.step(x)
    expected = nn.Sequential(*parts(2))(x)
    torch.testing.assert_close(out.full_tensor().cpu(), expected)


def test_axes_go_by_their_place() -> None:
    """What has cut a stage's devices first has named their axes, perhaps the other way round: each
    device's value goes to the device with its place all the same."""
    first, second = xd.pipeline.stage_meshes(
        xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("pp", "world"))
    )
    for names in (("tp", "dp"), ("dp", "tp")):
        cut = first._unflatten(0, (2, 2), names)
        x = torch.arange(2.0)
        xd.from_device_values(list(x), cut[names[1]])  # makes the axes, named by the first
    dp_tp = second._unflatten(0, (2, 2), ("dp", "tp"))
    xd.from_device_values(list(x), dp_tp["tp"])
    for dim in ("dp", "tp"):
        here, there = (xd.from_device_values(list(x), m[dim]) for m in (cut, dp_tp))
        moved = to_stage(here, second, "the target")
        assert torch.equal(torch.stack(moved.local_values()), torch.stack(there.local_values()))
        assert (moved - there).abs().sum().local_values()[0] == 0
