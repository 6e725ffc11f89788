"""An optimizer's state from a file of whole tensors, for parameters that lie in parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
X = torch.arange(48.0).reshape(6, 8).sin()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 6)


def step(made: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = made(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, xd.XLAShardedTensor) else value).detach().cpu()


def sharded(made: nn.Module, way: str, mesh: DeviceMesh) -> nn.Module:
    if way == "fully_shard":
        xd.fully_shard(made, mesh=mesh["dp"])
        return made
    return xd.parallel.shard_by_size(made, mesh, least=4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["fully_shard", "by size"])
def test_it_lies_as_the_parameter(
    mesh_2x4: DeviceMesh, way: str, name: str, compiled: bool
) -> None:
    """The state of CPU torch's run, and the same numbers after it; twice from one file."""
    expected = model()
    wanted = OPTIMIZERS[name](expected.parameters())
    step(expected, wanted, X)
    # (A copy each time: torch keeps the counter of steps that it is given, and counts it up.)
    file = copy.deepcopy(wanted.state_dict())
    made = sharded(copy.deepcopy(expected), way, mesh_2x4)
    optimizer = OPTIMIZERS[name](made.parameters())
    call = xd.compile(step) if compiled else step
    inputs = X.to("xla")
    for _ in range(2):
        before = copy.deepcopy(made.state_dict())
        optimizer.load_state_dict(copy.deepcopy(file))
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.ndim:
                    assert value.placements == parameter.placements
        call(made, optimizer, inputs)
        made.load_state_dict(before)
    optimizer.load_state_dict(copy.deepcopy(file))
    for _ in range(3):
        loss = call(made, optimizer, inputs)
        torch.testing.assert_close(full(loss), step(expected, wanted, X))
    for a, b in zip(made.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(full(a), b.detach(), rtol=1e-5, atol=1e-6)


def test_what_lies_in_parts_stays_so(mesh_2x4: DeviceMesh) -> None:
    made = sharded(model(), "by size", mesh_2x4)
    optimizer = OPTIMIZERS["adamw"](made.parameters())
    step(made, optimizer, X.to("xla"))
    before = optimizer.state[made.weight]["exp_avg"].clone()
    optimizer.load_state_dict(optimizer.state_dict())
    after = optimizer.state[made.weight]["exp_avg"]
    assert after.placements == before.placements
    assert torch.equal(after.full_tensor(), before.full_tensor())


def test_a_lower_precision_is_the_parameters_again(mesh_2x4: DeviceMesh) -> None:
    """As torch: floating-point state gets the parameter's dtype."""
    made = sharded(model(), "by size", mesh_2x4)
    optimizer = OPTIMIZERS["sgd"](made.parameters())
    whole = [torch.ones(6, 8, dtype=torch.bfloat16), torch.ones(6)]
    file = optimizer.state_dict()
    file["state"] = {i: {"momentum_buffer": value} for i, value in enumerate(whole)}
    optimizer.load_state_dict(copy.deepcopy(file))
    found = optimizer.state[made.weight]["momentum_buffer"]
    assert found.dtype == torch.float32 and torch.equal(full(found), torch.ones(6, 8))
