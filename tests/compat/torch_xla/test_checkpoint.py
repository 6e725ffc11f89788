"""The behaviour that torch_xla's public ``test/spmd/test_xla_distributed_checkpoint.py`` asks
for."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import xla_dtensor.compat.torch_xla.distributed.spmd as xs
from tests.compat.torch_xla.models import TwoLayers, mesh_of, tiled
from xla_dtensor.compat.torch_xla import _XLAC
from xla_dtensor.compat.torch_xla.experimental.distributed_checkpoint import (
    CheckpointManager,
    SPMDLoadPlanner,
    SPMDSavePlanner,
    prime_optimizer,
)
from xla_dtensor.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

spec_of = _XLAC._get_xla_sharding_spec


def sharded(mesh_shape: tuple[int, ...] = (1, 8)) -> TwoLayers:
    model = TwoLayers().to("xla")
    mesh = mesh_of(mesh_shape)
    xs.mark_sharding(model.fc1.weight, mesh, (0, 1))
    xs.mark_sharding(model.fc2.weight, mesh, (None, None))
    return model


def manager(folder: Path, **kwargs: Any) -> CheckpointManager:
    settings = {"save_interval": 10, "chkpt_on_preemption": False, **kwargs}
    return CheckpointManager(folder, **settings)


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


# --- resharding (5) -------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "whole": lambda: TwoLayers().to("xla"),
    "columns": lambda: sharded((1, 8)),
    "rows": lambda: sharded((8, 1)),
    "grid": lambda: sharded((2, 4)),
    "cpu": TwoLayers,
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("whole", "columns"),
        ("columns", "whole"),
        ("grid", "rows"),
        ("columns", "cpu"),
        ("cpu", "grid"),
    ],
)
def test_resharding(saved: str, loaded: str, tmp_path: Path) -> None:
    one, other = KINDS[saved](), KINDS[loaded]()
    before = spec_of(other.fc1.weight)
    dcp.save(
        one.state_dict(),
        storage_writer=dcp.FileSystemWriter(tmp_path),
        planner=SPMDSavePlanner(),
        no_dist=True,
    )
    assert not equal(one, other)
    state = other.state_dict()
    dcp.load(
        state,
        storage_reader=dcp.FileSystemReader(tmp_path),
        planner=SPMDLoadPlanner(),
        no_dist=True,
    )
    assert equal(one, other) and spec_of(other.fc1.weight) == before


def test_a_sharded_weight_is_saved_in_pieces(tmp_path: Path) -> None:
    model = sharded()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    pieces: Any = {name: len(entry.chunks) for name, entry in metadata.items()}
    assert pieces == {"fc1.weight": 8, "fc1.bias": 1, "fc2.weight": 1, "fc2.bias": 1}


# --- the manager ----------------------------------------------------------------------------------


def test_saving_and_restoring(tmp_path: Path) -> None:
    chkpt = manager(tmp_path)
    one, other = sharded(), sharded((2, 4))
    assert chkpt.save(0, one.state_dict())
    assert not equal(one, other)
    random = torch.get_rng_state()
    chkpt.restore(0, other.state_dict())
    assert equal(one, other)
    assert spec_of(other.fc1.weight) == tiled([2, 4])  # in its own layout
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(CheckpointError):
        chkpt.restore(10, other.state_dict())
    chkpt.close()


def test_nested_state_with_plain_values(tmp_path: Path) -> None:
    chkpt = manager(tmp_path)
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 16, device="xla")).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 10}
    assert chkpt.save(10, state)
    other = sharded()
    fresh = prime_optimizer(torch.optim.AdamW(other.parameters()))
    into: dict[str, Any] = {"model": other.state_dict(), "optim": fresh.state_dict(), "step": 0}
    chkpt.restore(10, into)
    fresh.load_state_dict(into["optim"])
    assert equal(model, other) and into["step"] == 10
    moments = [o.state[m.fc1.weight]["exp_avg"] for o, m in ((optimizer, model), (fresh, other))]
    assert torch.equal(*(moment.cpu() for moment in moments)) and moments[1].cpu().abs().sum() > 0
    chkpt.close()


def test_step_tracking(tmp_path: Path) -> None:
    chkpt = manager(tmp_path)
    state = {"x": xs.mark_sharding(torch.ones(8, device="xla"), mesh_of((8,)), (0,))}
    assert chkpt.all_steps() == []
    for step in range(1, 10):
        assert not chkpt.save(step, state) and not chkpt.save_async(step, state)
    assert chkpt.all_steps() == []
    for step in range(0, 40, 10):
        assert chkpt.save(step, state)
        assert chkpt.all_steps() == list(range(0, step + 1, 10))
    assert chkpt.save(43, state, force=True) and chkpt.all_steps()[-1] == 43
    chkpt.close()


def test_max_to_keep(tmp_path: Path) -> None:
    state = {"x": torch.ones(8, device="xla")}
    chkpt = manager(tmp_path, max_to_keep=2)
    for step, left in ((10, {10}), (20, {10, 20}), (30, {20, 30}), (10, {30, 10})):
        assert chkpt.save(step, state)  # the oldest by when it was saved goes
        assert set(chkpt.all_steps()) == left
    chkpt.close()
    chkpt = manager(tmp_path, max_to_keep=2)
    assert chkpt.save(20, state) and set(chkpt.all_steps()) == {10, 20}
    chkpt.close()


def test_saving_again_replaces(tmp_path: Path) -> None:
    chkpt = manager(tmp_path)
    for value in (1.0, 2.0):
        assert chkpt.save(10, {"x": torch.full((4,), value, device="xla")})
    into = {"x": torch.zeros(4, device="xla")}
    chkpt.restore(10, into)
    assert into["x"].tolist() == [2.0] * 4 and chkpt.all_steps() == [10]
    chkpt.close()


def test_async(tmp_path: Path) -> None:
    chkpt = manager(tmp_path)
    x = torch.ones(8, device="xla")
    for step in range(0, 30, 10):
        assert chkpt.save_async(step, {"x": x})
        x += 1  # the copy was taken
    chkpt.join()
    assert chkpt.all_steps() == [0, 10, 20]
    for step, value in ((0, 1.0), (20, 3.0)):
        into = {"x": torch.zeros(8, device="xla")}
        chkpt.restore(step, into)
        assert into["x"].tolist() == [value] * 8
    chkpt.close()


def test_preemption(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    chkpt = manager(tmp_path, save_interval=100, chkpt_on_preemption=True)
    state = {"x": torch.ones(8, device="xla")}
    for step in range(1, 10):
        assert not chkpt.save(step, state) and not chkpt.reached_preemption(step)
    os.kill(os.getpid(), signal.SIGTERM)
    assert chkpt.save(10, state) and chkpt.reached_preemption(10)
    assert chkpt.all_steps() == [10]
    chkpt.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_prime_optimizer() -> None:
    model = nn.Linear(4, 4).to("xla")
    before = model.weight.detach().cpu()
    optimizer = prime_optimizer(torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.1))
    assert torch.equal(model.weight.cpu(), before) and optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[model.weight]["exp_avg"].cpu().eq(0).all()
    assert model.weight.grad is None


def test_a_wrong_interval(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        CheckpointManager(tmp_path, save_interval=0)


# --- the planners ---------------------------------------------------------------------------------


def test_planners_have_an_item_per_shard(tmp_path: Path) -> None:
    """Of a sharded tensor one per device, of others one; an item's data is its shard's."""
    model = sharded()
    shards: Any = model.fc1.weight
    plans: list[Any] = []

    class Saving(SPMDSavePlanner):
        def create_local_plan(self) -> Any:
            plans.append(super().create_local_plan())
            return plans[-1]

        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            if write_item.index.fqn == "fc1.weight":
                (start,) = {write_item.index.offset[1]}
                wanted = shards.local_shards[start // 2].data
                assert torch.equal(data, wanted)
            return data

    class Loading(SPMDLoadPlanner):
        def create_local_plan(self) -> Any:
            plans.append(super().create_local_plan())
            return plans[-1]

    dcp.save(model.state_dict(), checkpoint_id=tmp_path, planner=Saving(), no_dist=True)
    names = [item.index.fqn for item in plans[0].items]
    assert names.count("fc1.weight") == 8 and len(names) == 8 + 3

    whole, other = TwoLayers().to("xla"), sharded()
    before = other.fc1.weight.detach().cpu()
    dcp.save(whole.state_dict(), checkpoint_id=tmp_path / "whole", no_dist=True)
    dcp.load(other.state_dict(), checkpoint_id=tmp_path / "whole", planner=Loading(), no_dist=True)
    names = [item.dest_index.fqn for item in plans[1].items]
    assert names.count("fc1.weight") == 8 and len(names) == 8 + 3
    assert not torch.equal(other.fc1.weight.cpu(), before) and equal(whole, other)
