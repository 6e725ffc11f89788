"""torch's state-dict helpers on models of xla tensors, and checkpoints of what they give."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd
from tests.checkpoint.layouts import same, value_of
from tests.conftest import make_mesh

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Model = tuple[nn.Module, torch.optim.Optimizer]


def build(mesh: str | None, seed: int) -> Model:
    """A model and its optimizer; on a mesh, fully sharded or cut by hand, or on the CPU."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6))
    if mesh is not None and "x" in mesh:
        on = make_mesh(mesh)
        for module in model:
            for name, p in list(module.named_parameters()):
                placed = [Shard(0), Shard(p.ndim - 1)]
                setattr(module, name, nn.Parameter(distribute_tensor(p.data, on, placed)))
    elif mesh is not None:
        xd.fully_shard(model, mesh=make_mesh(mesh))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(pair: Model, steps: int = 2) -> list[float]:
    model, optimizer = pair
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    x = x if next(model.parameters()).device.type == "cpu" else x.to("xla")
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach().cpu()) if not hasattr(loss, "varying") else 0.0)
    return losses


def everything(pair: Model) -> dict[str, torch.Tensor]:
    """All tensors of a model and its optimizer, on the CPU."""
    model, optimizer = pair
    found = {name: value_of(p) for name, p in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            found[f"{name}.{key}"] = value_of(value)
    return found


def assert_same(one: Model, other: Model) -> None:
    expected, found = everything(one), everything(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert same(found[name], value), name


@pytest.fixture(scope="module")
def trained() -> dict[str, Model]:
    made = {name: build(name, 1) for name in ("2x4", "8")}
    for pair in made.values():
        train(pair)
    return made


@pytest.mark.one_in(6)
@pytest.mark.parametrize("target", ["8", "2x4", "5", None])
@pytest.mark.parametrize("source", ["2x4", "8"])
def test_a_state_goes_onto_other_meshes(
    tmp_path: Path, trained: dict[str, Model], source: str, target: str | None
) -> None:
    """Model and optimizer, by torch's helpers, also onto plain CPU torch."""
    model, optimizer = trained[source]
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    pair = build(target, 2)
    model_state, optimizer_state = get_state_dict(*pair)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(*pair, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same(trained[source], pair)
    assert pair[1].param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("source", ["2x4", "8", None])
def test_full_state_on_the_host_and_back(
    trained: dict[str, Model], source: str | None, broadcast: bool
) -> None:
    if source is None:
        pair = build(None, 1)
        train(pair)
    else:
        pair = trained[source]
    get = StateDictOptions(full_state_dict=True, cpu_offload=True)
    put = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    model_state = get_model_state_dict(pair[0], options=get)
    optimizer_state = get_optimizer_state_dict(*pair, options=get)
    tensors = [
        *model_state.values(),
        *(t for p in optimizer_state["state"].values() for t in p.values()),
    ]
    assert all(type(t) is torch.Tensor and t.device.type == "cpu" for t in tensors)
    other = build("2x4", 3)
    set_model_state_dict(other[0], copy.deepcopy(model_state), options=put)
    set_optimizer_state_dict(*other, copy.deepcopy(optimizer_state), options=put)
    assert_same(pair, other)


def test_broadcasting_in_the_default_group(trained: dict[str, Model]) -> None:
    state = get_model_state_dict(trained["2x4"][0], options=StateDictOptions(full_state_dict=True))
    other = build("8", 3)
    torch.distributed.init_process_group("xla")
    try:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other[0], dict(state), options=options)
    finally:
        torch.distributed.destroy_process_group()
    for name, value in trained["2x4"][0].state_dict().items():
        assert same(value_of(other[0].state_dict()[name]), value_of(value))


def test_flattened_optimizer_state(tmp_path: Path, trained: dict[str, Model]) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(*trained["2x4"], options=options)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    pair = build("8", 2)
    set_model_state_dict(
        pair[0],
        get_model_state_dict(trained["2x4"][0], options=StateDictOptions(full_state_dict=True)),
        options=StateDictOptions(full_state_dict=True),
    )
    state = get_optimizer_state_dict(*pair, options=options)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(*pair, state, options=options)
    assert_same(trained["2x4"], pair)


def test_sharded_state_on_the_host(trained: dict[str, Model]) -> None:
    """``cpu_offload`` alone: torch keeps shards, one process has them all."""
    state = get_model_state_dict(trained["2x4"][0], options=StateDictOptions(cpu_offload=True))
    for name, value in trained["2x4"][0].state_dict().items():
        assert state[name].device.type == "cpu" and same(state[name], value_of(value))


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    pair = build("2x4", 1)
    train(pair)
    before = dict(zip(("model", "optimizer"), get_state_dict(*pair), strict=True))
    dcp.save(before, checkpoint_id=tmp_path, no_dist=True)
    train(pair)
    again = build("2x4", 2)
    state = dict(zip(("model", "optimizer"), get_state_dict(*again), strict=True))
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(*again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(again)
    assert_same(pair, again)
