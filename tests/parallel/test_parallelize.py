"""``xd.parallel.parallelize``: a model and its optimizer by one config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import xla_dtensor as xd
from tests.parallel.harness import (
    averaged_gradients,
    batches,
    check_parameters,
    loss_of,
    per_device,
    reference,
)
from xla_dtensor.errors import MeshDimError, UnsupportedOpError


@pytest.fixture
def mesh() -> DeviceMesh:
    return xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("dp", "mp"))


def plan() -> dict[str, Any]:
    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_levels(level: int, mesh: DeviceMesh) -> None:
    model, expected = reference(), reference()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wanted = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    config = {
        "dp_config": {"sharding_level": level},
        "mp_config": {"parallelize_plan": plan()},
    }
    found, same = xd.parallel.parallelize(model, optimizer, mesh, config)
    assert found is model and same is optimizer
    for seed in range(2):
        inputs = batches(4, seed=seed)
        loss_of(model(per_device(inputs, mesh, ["dp"]))).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged_gradients(expected, inputs)
        wanted.step()
        wanted.zero_grad()
    check_parameters(model, expected)
    up = model.blocks[0].up.weight
    assert up.placements[-1] == Shard(0)  # type: ignore[union-attr]
    state = optimizer.state[up]["momentum_buffer"]
    assert len(state.placements) == (1 if level == 0 else 2)


def test_the_current_mesh_and_no_optimizer(mesh: DeviceMesh) -> None:
    model, expected = reference(), reference()
    xd.set_mesh(mesh)
    try:
        xd.parallel.parallelize(model, config={})
    finally:
        xd.set_mesh(None)
    inputs = batches(4)
    loss_of(model(per_device(inputs, mesh, ["dp"]))).backward()
    averaged_gradients(expected, inputs)
    weight, wanted = model.out.weight, expected.out.weight
    torch.testing.assert_close(weight.grad.cpu(), wanted.grad)  # type: ignore[union-attr]


def test_errors(mesh: DeviceMesh) -> None:
    model = reference()
    before = dict(model.named_parameters())
    used = torch.optim.AdamW(model.parameters())
    loss_of(model(torch.ones(2, 4))).backward()
    used.step()
    named: dict[str, Any] = {"mp_config": {"parallelize_plan": {"layers.*.up": ColwiseParallel()}}}
    line = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
    for error, said, arguments in (
        (ValueError, "it knows", (None, mesh, {"sharding": 1})),
        (ValueError, "0, 1, 2 or 3", (None, mesh, {"dp_config": {"sharding_level": 4}})),
        (UnsupportedOpError, "PipelineStage", (None, mesh, {"pp_config": {"split_spec": "x"}})),
        (UnsupportedOpError, "has a state", (used, mesh, {})),
        (MeshDimError, "'mp' or 'tp'", (None, line, {"mp_config": {"parallelize_plan": plan()}})),
    ):
        with pytest.raises(error, match=said):
            xd.parallel.parallelize(model, *arguments)  # type: ignore[arg-type]
        assert dict(model.named_parameters()) == before
        assert next(model.parameters()).device.type == "cpu"
    with pytest.raises(ValueError, match="is called"):
        xd.parallel.parallelize(model, None, mesh, named)
