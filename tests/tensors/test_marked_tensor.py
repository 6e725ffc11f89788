"""`MarkedTensor`: what has become sharded in place is a sharded tensor to everything."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.tensors.marked_tensor import MarkedTensor, shard_in_place, unshard_in_place

R = Replicate()


@pytest.fixture
def mesh() -> DeviceMesh:
    return xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))


def marked(value: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> Any:
    x = value.detach().to("xla").requires_grad_(value.requires_grad)
    with torch.no_grad():
        shard_in_place(x, distribute_tensor(x.detach(), mesh, placements or [Shard(0), R]))
    return x


def test_it_is_a_sharded_tensor(mesh: DeviceMesh) -> None:
    value = torch.randn(8, 4)
    x = marked(value, mesh)
    assert type(x) is MarkedTensor and isinstance(x, xd.XLAShardedTensor)
    assert not isinstance(x, xd.XLATensor)
    assert x.device_mesh == mesh and x.placements == (Shard(0), R)
    assert x.layout == xd.Layout.from_device_mesh(mesh)("dp", "None")
    assert torch.equal(x.full_tensor().cpu(), value) and torch.equal(x.cpu(), value)
    assert torch.equal(x.local_shards[4].data, value[4:]) and x.local_shards[5].replica == 1
    assert x.to_local().shape == (4, 4) and x.to_local() is x.to_local()
    assert x.redistribute(placements=[R, Shard(1)]).placements == (R, Shard(1))
    assert type(x * 2) is xd.XLAShardedTensor and (x * 2).placements == (Shard(0), R)
    assert "placements" in repr(x) and not isinstance(torch.ones(3, device="xla"), DTensor)


def test_its_results_are_those_of_a_sharded_tensor(mesh: DeviceMesh) -> None:
    value, other = torch.randn(8, 4, requires_grad=True), torch.randn(4, 8)
    x = marked(value, mesh)
    ours = distribute_tensor(other, mesh, [R, Shard(1)])
    (x @ ours).relu().sum().backward()
    (value @ other).relu().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), value.grad)
    assert x.grad.placements == (Shard(0), R)
    with torch.no_grad():
        x -= 0.1 * x.grad
        value -= 0.1 * value.grad  # type: ignore[operator]
    torch.testing.assert_close(x.detach().cpu(), value.detach())
    norm: Any = nn.utils.clip_grad_norm_([x], 0.1)
    torch.testing.assert_close(norm.full_tensor().cpu(), nn.utils.clip_grad_norm_([value], 0.1))


def test_torchs_functions(mesh: DeviceMesh) -> None:
    value = torch.randn(8, 4)
    x = marked(value, mesh)
    assert distribute_tensor(x, mesh, [Shard(0), R]) is x
    with pytest.raises(ValueError, match="use redistribute"):
        distribute_tensor(x, mesh, [R, R])
    with pytest.raises(RuntimeError, match="local_tensor argument only accepts"):
        DTensor.from_local(x, mesh, [Shard(0), R])
    module = nn.Linear(4, 8).to("xla")
    weight = module.weight
    shard_in_place(weight, distribute_tensor(weight.detach(), mesh, [Shard(0), R]))
    xd.distribute_module(module, mesh)
    assert module.weight is weight and weight.placements == (Shard(0), R)
    assert module.bias.placements == (R, R)  # type: ignore[attr-defined]
    assert next(iter(xd.data.device_loader([x], mesh, [R, R]))).placements == (R, R)


def test_copies(mesh: DeviceMesh, tmp_path: Path) -> None:
    x = marked(torch.randn(8, 4), mesh)
    x.mine = "a mark"
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(x),
        pickle.loads(pickle.dumps(x)),
        torch.load(buffer, weights_only=False),
    ]
    for other in copies:
        assert type(other) is xd.XLAShardedTensor and other.placements == x.placements
        assert torch.equal(other.cpu(), x.cpu()) and other.mine == "a mark"
    module, other = nn.Linear(4, 8, device="xla"), nn.Linear(4, 8, device="xla")
    shard_in_place(module.weight, distribute_tensor(x.detach().cpu(), mesh, [Shard(0), R]))
    xd.checkpoint.save_safetensors(module.state_dict(), tmp_path)
    xd.checkpoint.load_safetensors(other, tmp_path)
    assert torch.equal(other.weight.cpu(), x.cpu())


def test_compiled_steps(mesh: DeviceMesh) -> None:
    value = torch.randn(8, 4)
    x = marked(value, mesh)
    step = xd.compile(lambda y: (x * y, x.add_(1)))
    for i in range(2):
        product, _ = step(x.detach())
        torch.testing.assert_close(product.cpu(), (value + i) * (value + i))
    assert step.compilations == 1
    torch.testing.assert_close(x.cpu(), value + 2)
    # Sharded or not is another program.
    y = torch.randn(8, 4, device="xla")
    double = xd.compile(lambda: y * 2)
    before = double()
    shard_in_place(y, distribute_tensor(y.detach(), mesh, [Shard(0), R]))
    assert torch.equal(double().cpu(), before.cpu()) and double().placements == (Shard(0), R)
    assert double.compilations == 2


def test_the_way_back(mesh: DeviceMesh) -> None:
    value = torch.randn(8, 4, requires_grad=True)
    x = marked(value, mesh)
    (x * 3).sum().backward()
    whole = x.detach().clone().full_tensor().clone()
    unshard_in_place(x, whole)
    assert type(x) is xd.XLATensor and not hasattr(x, "placements")
    x.grad = None
    (x * 3).sum().backward()
    assert type(x.grad) is xd.XLATensor and x.grad.cpu().eq(3).all()
    assert torch.equal(x.detach().cpu(), value.detach())
