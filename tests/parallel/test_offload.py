"""Parameters, gradients and optimizer state in the host's memory: the numbers are CPU torch's, and
JAX says where the arrays are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.parallel.harness import EPS
from tests.planning.tpus import needs_libtpu
from xla_dtensor.errors import MeshError, UnsupportedOpError
from xla_dtensor.mesh.memories import check_host_memory

HOST = "pinned_host"
DEVICES, LOCAL = 8, 2


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 5))


def batches() -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randn(LOCAL, 12) for _ in range(DEVICES)]


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    model = model_of()
    for layer in (model[0], model[2]):
        xd.fully_shard(layer, mesh=mesh, **options)
    return xd.fully_shard(model, mesh=mesh, **options)


def memory(tensor: Any) -> str:
    return tensor._storage_.array.sharding.memory_kind


def train(model: nn.Module, optimizer: Any) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.fixture
def mesh() -> DeviceMesh:
    return make_mesh("8")


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """CPU torch's parameters after three steps on the whole batch."""
    model, x = model_of(), torch.cat(batches())
    step = train(model, torch.optim.AdamW(model.parameters(), lr=0.1, eps=EPS))
    for _ in range(3):
        step(x)
    return [p.detach() for p in model.parameters()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("parameters", [False, True])
def test_training_is_torchs(
    parameters: bool, compiled: bool, mesh: DeviceMesh, expected: list[torch.Tensor]
) -> None:
    options = {"offload_policy": CPUOffloadPolicy()} if parameters else {}
    model = sharded(mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=EPS)
    if not parameters:
        assert xd.parallel.offload_state(xd.parallel.offload_state(optimizer)) is optimizer
    step = train(model, optimizer)
    step = xd.compile(step) if compiled else step
    x = xd.from_device_values(batches(), mesh)
    for _ in range(3):
        step(x)
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.full_tensor().detach().cpu(), theirs)
        assert memory(ours) == (HOST if parameters else "device")
        state = optimizer.state[ours]
        assert memory(state["exp_avg"]) == memory(state["exp_avg_sq"]) == HOST
    if compiled:
        assert step.traces == step.compilations == 1


def test_gradients_rest_there_too(mesh: DeviceMesh) -> None:
    model, plain = sharded(mesh, offload_policy=CPUOffloadPolicy()), model_of()
    for _ in range(2):  # the second is added to the first
        model(xd.from_device_values(batches(), mesh)).square().mean().backward()
        plain(torch.cat(batches())).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert memory(ours.grad) == HOST
        torch.testing.assert_close(ours.grad.full_tensor().cpu(), theirs.grad)
    model.zero_grad()
    step = xd.compile(lambda x: model(x).square().mean().backward())
    step(xd.from_device_values(batches(), mesh))
    step(xd.from_device_values(batches(), mesh))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert memory(ours.grad) == HOST
        torch.testing.assert_close(ours.grad.full_tensor().cpu(), theirs.grad)


def test_what_is_done_with_one_that_rests(mesh: DeviceMesh) -> None:
    model, plain = sharded(mesh, offload_policy=CPUOffloadPolicy()), model_of()
    ours, theirs = model[0].weight, plain[0].weight
    assert ours.device.type == "xla" and memory(ours) == HOST
    assert memory(torch.zeros_like(ours)) == HOST  # like the one that it is made of
    assert memory(ours + 1) == memory(ours.detach().clone() * 2) == "device"
    torch.testing.assert_close((ours + 1).full_tensor().detach().cpu(), theirs.detach() + 1)
    with torch.no_grad():
        for x in (ours, theirs):
            x.mul_(2)
            x[1:3].zero_()
            x.copy_(x + x.t().mean())
    assert memory(ours) == HOST
    torch.testing.assert_close(ours.full_tensor().detach().cpu(), theirs.detach())
    moved = ours.redistribute(mesh, [xd.Replicate()]).to_local()
    torch.testing.assert_close(moved.detach().cpu(), theirs.detach())


def test_states_come_back_where_they_were(mesh: DeviceMesh) -> None:
    model = sharded(mesh, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=EPS)
    train(model, optimizer)(xd.from_device_values(batches(), mesh))
    saved = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    other = sharded(mesh, offload_policy=CPUOffloadPolicy())
    other.load_state_dict(model.state_dict())
    for name, value in other.state_dict().items():
        assert memory(value) == HOST
        torch.testing.assert_close(value.full_tensor().cpu(), saved[name])
    again = xd.parallel.offload_state(torch.optim.AdamW(other.parameters(), lr=0.1))
    again.load_state_dict(optimizer.state_dict())
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        moment, before = again.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"]
        assert memory(moment) == HOST
        torch.testing.assert_close(moment.full_tensor().cpu(), before.full_tensor().cpu())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_from_meta_and_a_checkpoint(mesh: DeviceMesh, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(12, 10)
    xd.fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="xla")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    other = xd.fully_shard(nn.Linear(12, 10), mesh=mesh, offload_policy=CPUOffloadPolicy())
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    for parameter in (*model.parameters(), *other.parameters()):
        assert memory(parameter) == HOST
        torch.testing.assert_close(
            parameter.full_tensor().detach().cpu(), torch.full(parameter.shape, 0.25)
        )


def test_state_that_is_there_moves(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=EPS)
    step = train(model, optimizer)
    step(xd.from_device_values(batches(), mesh))
    moment = optimizer.state[model[0].weight]["exp_avg"]
    before = moment.full_tensor().cpu()
    xd.parallel.offload_state(optimizer)
    after = optimizer.state[model[0].weight]["exp_avg"]
    assert memory(moment) == "device" and memory(after) == HOST
    torch.testing.assert_close(after.full_tensor().cpu(), before)


def test_what_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(MeshError, match="on no mesh"):
        xd.parallel.offload_state(torch.optim.SGD(nn.Linear(2, 2).to("xla").parameters()))
    kinds = [SimpleNamespace(kind="device")]
    device = SimpleNamespace(device_kind="NPU", addressable_memories=lambda: kinds)
    devices = SimpleNamespace(flat=[device])
    frame = SimpleNamespace(jax_mesh=SimpleNamespace(devices=devices))
    with pytest.raises(UnsupportedOpError, match="NPU devices reach no memory of the host"):
        check_host_memory(frame, "fully_shard")
    with mock.patch(
        "xla_dtensor.parallel.fully_shard.check_host_memory", side_effect=UnsupportedOpError
    ):
        model = model_of()
        with pytest.raises(UnsupportedOpError):
            xd.fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        assert isinstance(model[0].weight, nn.Parameter)  # and is as it was
        assert not isinstance(model[0].weight, xd.XLAShardedTensor)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("parameters", [False, True])
def test_the_program_for_tpus_has_it_in_the_hosts_memory(parameters: bool) -> None:
    """Per device an eighth of the parameters, and of their two moments."""
    with xd.abstract("v5e:2x4"):
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        options = {"offload_policy": CPUOffloadPolicy()} if parameters else {}
        xd.fully_shard(model, mesh=mesh, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        if not parameters:
            xd.parallel.offload_state(optimizer)
        x = xd.distribute_tensor(torch.randn(64, 256), mesh, [xd.Shard(0)])
        found = xd.plan(train(model, optimizer), x).memory
    own = 4 * (2 * 256 * 512 + 512 + 256) // 8
    assert found.host == pytest.approx((3 if parameters else 2) * own, rel=0.05)
    assert found.arguments is not None and found.outputs is not None
    inputs = 64 * 256 * 4 // 8
    assert found.arguments == pytest.approx(inputs + (0 if parameters else own), rel=0.1, abs=4096)
