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
from tests import launch
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
    "the grid's other way round": lambda: sharded((4, 2)),
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
        ("grid", "the grid's other way round"),
    ],
)
def test_resharding(saved: str, loaded: str, tmp_path: Path) -> None:
    one, other = KINDS[saved](), KINDS[loaded]()
    before = spec_of(other.fc1.weight)
    save_and_load(one, other, tmp_path)
    assert spec_of(other.fc1.weight) == before


def save_and_load(one: nn.Module, other: nn.Module, folder: Path) -> None:
    """What ``one`` has comes into ``other``."""
    dcp.save(
        one.state_dict(),
        storage_writer=dcp.FileSystemWriter(folder),
        planner=SPMDSavePlanner(),
        no_dist=True,
    )
    assert not equal(one, other)
    dcp.load(
        other.state_dict(),
        storage_reader=dcp.FileSystemReader(folder),
        planner=SPMDLoadPlanner(),
        no_dist=True,
    )
    assert equal(one, other)


def test_sizes_that_do_not_divide(tmp_path: Path) -> None:
    models = [nn.Linear(127, 63).to("xla") for _ in range(2)]
    for model, spec in zip(models, ((0, None), (None, 0)), strict=True):
        xs.mark_sharding(model.weight, mesh_of((8,)), spec)
    save_and_load(*models, tmp_path)


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


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_models_with_optimizers(optimizer_class: Any, tmp_path: Path) -> None:
    """And plain values, nested."""
    chkpt = manager(tmp_path)
    model = sharded()
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    model(torch.ones(4, 16, device="xla")).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 10}
    assert chkpt.save(10, state)
    other = sharded()
    fresh = prime_optimizer(optimizer_class(other.parameters(), lr=0.01))
    into: dict[str, Any] = {"model": other.state_dict(), "optim": fresh.state_dict(), "step": 0}
    chkpt.restore(10, into)
    fresh.load_state_dict(into["optim"])
    assert equal(model, other) and into["step"] == 10
    of_weights = [o.state[m.fc1.weight] for o, m in ((optimizer, model), (fresh, other))]
    assert of_weights[0].keys() == of_weights[1].keys()
    for name, value in of_weights[0].items():
        if isinstance(value, torch.Tensor):
            assert value.cpu().abs().sum() > 0 and torch.equal(
                value.cpu(), of_weights[1][name].cpu()
            )
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


def names_of(planner: Any) -> tuple[set[str], set[str]]:
    return set(planner.sharded_state_dict), set(planner.unsharded_state_dict)


# ``fc2.weight`` is marked, and whole on every device.
SEPARATED = {"fc1.weight"}, {"fc1.bias", "fc2.weight", "fc2.bias"}


def test_a_save_planner_by_itself() -> None:
    model = sharded()
    planner = SPMDSavePlanner()
    planner.set_up_planner(model.state_dict(), True)
    assert names_of(planner) == SEPARATED
    items = planner.create_local_plan().items
    by_name = [item for item in items if item.index.fqn == "fc1.weight"]
    assert len(by_name) == 8 and len(items) == 8 + 3
    weight = model.fc1.weight.detach().cpu()
    for item in by_name:
        (_, first), (_, width) = item.index.offset, item.tensor_data.chunk.sizes
        assert torch.equal(planner.resolve_data(item), weight[:, first : first + width])
    nested = SPMDSavePlanner()
    nested.set_up_planner({"model": {"weight": model.fc1.weight}, "step": 3}, True)
    assert names_of(nested) == ({"model.weight"}, {"step"})


def test_a_load_planner_by_itself(tmp_path: Path) -> None:
    """A tensor keeps its value until all of its parts have come."""
    model = sharded()
    dcp.save(TwoLayers().state_dict(), checkpoint_id=tmp_path, no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    planner = SPMDLoadPlanner()
    planner.set_up_planner(model.state_dict(), metadata, True)
    assert names_of(planner) == SEPARATED
    items = planner.create_local_plan().items
    of_weight = [item for item in items if item.dest_index.fqn == "fc1.weight"]
    assert len(of_weight) == 8 and len(items) == 8 + 3
    before = model.fc1.weight.detach().cpu()
    for i, item in enumerate(of_weight):
        assert torch.equal(model.fc1.weight.cpu(), before)
        part = planner.resolve_tensor(item)
        part.fill_(float(i))
        planner.commit_tensor(item, part)
    expected = torch.arange(8.0).repeat_interleave(2).expand(8, 16)
    assert torch.equal(model.fc1.weight.cpu(), expected)
    assert spec_of(model.fc1.weight) == tiled([1, 8])


@pytest.mark.slow
def test_several_processes(tmp_path: Path) -> None:
    command = ["-m", "tests.compat.torch_xla.programs_checkpoint", str(tmp_path)]
    outputs = launch.succeeded(launch.run(command, 2, 150, {"JAX_PLATFORMS": "cpu"}))
    assert all(output.rstrip().endswith("all of it") for output in outputs)
