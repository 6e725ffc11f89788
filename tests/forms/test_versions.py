"""A tensor that gets other memory: nothing that was computed from the old one is used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import xla_dtensor as xd

SWAPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "data": lambda x, new: setattr(x, "data", new),
    "set_": lambda x, new: x.set_(new),
    "set_ strided": lambda x, new: x.set_(new, 0, new.shape, new.stride()),
    "data of a view": lambda x, new: setattr(x, "data", new[:]),
    "data, then a write": lambda x, new: (setattr(x, "data", new * 2), x.mul_(0.5)),
}


def sharded(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(value, mesh, [Shard(0), Replicate()])


def gathered(x: torch.Tensor) -> torch.Tensor:
    """The whole value, from what the devices hold."""
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements).full_tensor().cpu()


@pytest.mark.parametrize("swap", list(SWAPS))
@pytest.mark.parametrize("written", [0, 1, 2])
def test_to_local_after_a_swap(mesh_2x4: DeviceMesh, swap: str, written: int) -> None:
    old, new = torch.ones(4, 2), torch.arange(8.0).view(4, 2)
    x = sharded(old, mesh_2x4)
    other = sharded(new, mesh_2x4)
    for _ in range(written):
        x.mul_(1)
    assert x.to_local().local_values()[0].tolist() == [[1.0, 1.0]] * 2
    SWAPS[swap](x, other)
    expected = old.clone()
    SWAPS[swap](expected, new)
    local = x.to_local()
    assert gathered(x).tolist() == expected.tolist()
    # And what is written goes to the new memory.
    local.fill_(7)
    assert x.cpu().tolist() == [[7.0, 7.0]] * 4


def test_a_swap_for_another_part_of_the_same_memory(mesh_2x4: DeviceMesh) -> None:
    base = sharded(torch.arange(16.0).view(8, 2), mesh_2x4)
    x = base[:4]
    gathered(x)
    for part in (base[4:], base[2:6], base[:4]):
        x.data = part
        assert gathered(x).tolist() == part.cpu().tolist()


class Double(xd.DFunction):
    _op_name = "versions_double"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_a_custom_function_after_a_swap(mesh_2x4: DeviceMesh, own_ops: None) -> None:
    xd.DistributedOp("versions_double", rule="a b -> a b")
    x = sharded(torch.ones(4, 2), mesh_2x4)
    assert Double.apply(x).cpu().tolist() == [[2.0, 2.0]] * 4
    x.data = sharded(torch.zeros(4, 2), mesh_2x4)
    assert Double.apply(x).cpu().tolist() == [[0.0, 0.0]] * 4


def test_versions_name_a_storage_and_its_value(mesh_2x4: DeviceMesh) -> None:
    x, y = (sharded(torch.ones(4, 2), mesh_2x4) for _ in range(2))
    seen = [x._storage_.version, y._storage_.version]
    for tensor in (x, y, x, y):
        tensor.add_(1)
        seen.append(tensor._storage_.version)
    step = xd.compile(lambda t: t.mul_(2))
    for tensor in (x, y):
        step(tensor)
        seen.append(tensor._storage_.version)
    assert len(set(seen)) == len(seen)


def make_step(fails: list[bool]) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        if fails[0]:
            raise ValueError("in the trace")
        return x.to_local().sum()

    return step


def test_a_trace_that_fails_leaves_no_version_of_its_own(mesh_2x4: DeviceMesh) -> None:
    x = sharded(torch.ones(4, 2), mesh_2x4)
    before = x.to_local()
    with pytest.raises(ValueError, match="in the trace"):
        xd.compile(make_step([True]))(x)
    assert x.to_local().local_values()[0].tolist() == before.local_values()[0].tolist()


def fully_sharded(mesh: DeviceMesh, reshard: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(4, 4, bias=False)
    model = nn.Linear(4, 4, bias=False)
    model.load_state_dict(plain.state_dict())
    xd.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return plain, model


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("change", ["data", "load_state_dict", "set_"])
def test_fully_shard_uses_the_weights_that_are_there(
    mesh_2x4: DeviceMesh, change: str, reshard: bool
) -> None:
    mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("dp",))
    plain, model = fully_sharded(mesh, reshard)
    inputs = torch.arange(8.0).view(2, 4)
    x = inputs.to("xla")
    earlier = model(x)  # its graph stays alive, and in it the whole weights
    torch.testing.assert_close(earlier.detach().cpu(), plain(inputs).detach())
    model.reshard()
    weight = model.weight
    for factor in (0.0, 2.0, 3.0):
        new = torch.full((4, 4), factor)
        if change == "load_state_dict":
            state = {"weight": distribute_tensor(new, mesh, [Shard(0)])}
            model.load_state_dict(state, assign=True)
        elif change == "set_":
            with torch.no_grad():
                weight.set_(distribute_tensor(new, mesh, [Shard(0)]))
        else:
            weight.data = distribute_tensor(new, mesh, [Shard(0)])
        with torch.no_grad():
            plain.weight.copy_(new)
        out = model(x)
        torch.testing.assert_close(out.detach().cpu(), plain(inputs).detach())
        out.sum().backward()
        model.reshard()
    # Assigning puts a new parameter in place, without a gradient.
    expected = inputs.sum(0).expand(4, 4) * (1 if change == "load_state_dict" else 3)
    torch.testing.assert_close(model.weight.grad.full_tensor().cpu(), expected)
    assert earlier.requires_grad
