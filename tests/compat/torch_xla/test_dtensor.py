"""The behaviour that torch_xla's public tests of its DTensor support ask for: ``test/spmd``'s
``test_dtensor_redistribute``, ``test_dtensor_convert_mesh``, ``test_xla_dtensor_placements``,
``test_dtensor_integration`` (with 2 and 3), ``test_xla_dtensor_spec_conversion`` and
``test_xla_sharded_tensor``; and seeds/003's RFC."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import xla_dtensor.compat.torch_xla as torch_xla
import xla_dtensor.compat.torch_xla.distributed.spmd as xs
from tests.compat.torch_xla.models import DEVICES, TwoLayers, mesh_of, tiled
from xla_dtensor.compat.torch_xla import _XLAC
from xla_dtensor.compat.torch_xla.distributed.spmd.api import (
    auto_policy,
    convert_to_xla_mesh,
    convert_to_xla_partition_spec,
    xla_distribute_module,
    xla_distribute_tensor,
)
from xla_dtensor.errors import PlacementError, UnsupportedOpError

spec_of = _XLAC._get_xla_sharding_spec
R = Replicate()


def marked(mesh: xs.Mesh, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    value = torch.randint(0, 100, shape).to(dtype)
    return value, xs.mark_sharding(value.to("xla"), mesh, (0, *[None] * (len(shape) - 1)))


# --- redistribute (8) -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8,), (8, 16), (8, 2, 4)])
def test_redistribute_shapes(shape: tuple[int, ...]) -> None:
    mesh = mesh_of((8,))
    value, x = marked(mesh, *shape)
    moved = x.redistribute(mesh, [Shard(0)])
    assert moved.partition_spec == (0, *[None] * (len(shape) - 1))
    assert f"devices=[{','.join(['8', *['1'] * (len(shape) - 1)])}]" in spec_of(moved)
    assert torch.equal(moved.full_tensor().cpu(), value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_redistribute_dtypes(dtype: torch.dtype) -> None:
    mesh = mesh_of((8,))
    value, x = marked(mesh, 8, 16, dtype=dtype)
    moved = x.redistribute(mesh, [Shard(1)])
    assert moved.partition_spec == (None, 0) and moved.global_tensor.dtype == dtype
    assert torch.equal(moved.cpu(), value)


def test_redistribute_mesh_dims() -> None:
    line, grid = mesh_of((8,)), mesh_of((2, 4))
    _, x = marked(line, 8, 16)
    assert spec_of(x.redistribute(line, [Shard(1)])) == tiled([1, 8])
    value, y = marked(grid, 8, 16)
    moved = y.redistribute(grid, [R, Shard(1)])
    assert moved.partition_spec == (None, 1)
    assert spec_of(moved) == tiled([1, 4], [0, 4, 1, 5, 2, 6, 3, 7], copies=2)
    assert torch.equal(moved.cpu(), value)


def test_redistribute_placements() -> None:
    mesh = mesh_of((8,))
    value, x = marked(mesh, 8, 16)
    expected: dict[Any, Any] = {R: (None, None), Shard(0): (0, None), Shard(1): (None, 0)}
    for placement, spec in expected.items():
        moved = x.redistribute(mesh, [placement])
        assert moved.partition_spec == spec and torch.equal(moved.cpu(), value)
    assert spec_of(x.redistribute(mesh, [R])) == "{replicated}"


def test_redistribute_from_one_mesh_to_another() -> None:
    value, x = marked(mesh_of((8,)), 8, 16)
    moved = x.redistribute(mesh_of((2, 4)), [Shard(1), Shard(0)])
    assert moved.partition_spec == (1, 0) and moved.mesh_shape == (2, 4)
    assert torch.equal(moved.cpu(), value)


def test_redistribute_invalid() -> None:
    mesh = mesh_of((8,))
    _, x = marked(mesh, 8, 16)
    for placements in ([Shard(2)], [Shard(0), Shard(1)], [Partial()]):
        with pytest.raises(PlacementError):  # a ValueError
            x.redistribute(mesh, placements)


def test_operations_on_redistributed() -> None:
    mesh = mesh_of((8,))
    (a, x), (b, y) = marked(mesh, 8, 16), marked(mesh, 8, 16)
    x, y = x.redistribute(mesh, [Shard(0)]), y.redistribute(mesh, [Shard(1)])
    assert torch.equal(torch.relu(x.global_tensor).cpu(), a.relu())
    assert torch.equal((x.global_tensor + y.global_tensor).cpu(), a + b)
    assert torch.equal((x.global_tensor * y.global_tensor).cpu(), a * b)


def test_redistribute_async() -> None:
    mesh = mesh_of((2, 4))
    value, x = marked(mesh, 8, 16)
    moved = x.redistribute(mesh, [R, Shard(0)], async_op=True)
    assert moved.partition_spec == (1, None) and moved.global_tensor is not x.global_tensor
    assert torch.equal(moved.cpu(), value)


# --- convert_to_xla_mesh (7) ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8,), (2, 4), (1, 8)])
def test_convert_mesh(shape: tuple[int, ...]) -> None:
    mesh = DeviceMesh("xla", torch.arange(8).reshape(shape))
    found = convert_to_xla_mesh(mesh)
    assert isinstance(found, xs.Mesh) and found.mesh_shape == shape
    assert found.axis_names == mesh.mesh_dim_names and found.device_ids.tolist() == list(range(8))
    assert mesh.size() == len(found.device_ids) and tuple(mesh.mesh.shape) == found.mesh_shape


def test_convert_mesh_names() -> None:
    named = DeviceMesh("xla", list(range(8)), mesh_dim_names=("data_parallel",))
    assert convert_to_xla_mesh(named).axis_names == ("data_parallel",)
    made = init_device_mesh("xla", (2, 4), mesh_dim_names=("x", "y"))
    assert convert_to_xla_mesh(made).axis_names == ("x", "y")


def test_convert_mesh_order() -> None:
    numbers = torch.tensor([[7, 6, 5, 4], [0, 1, 2, 3]])
    assert convert_to_xla_mesh(DeviceMesh("xla", numbers)).device_ids.tolist() == (
        numbers.flatten().tolist()
    )


def test_convert_mesh_without_all_devices() -> None:
    with pytest.raises(AssertionError, match="7 of 8 devices"):
        convert_to_xla_mesh(DeviceMesh("xla", list(range(7))))


def test_convert_placements() -> None:
    value = torch.randn(4, 8, 8)
    assert convert_to_xla_partition_spec(value, [R, Shard(0)]) == (1, None, None)
    assert convert_to_xla_partition_spec(value, [Shard(2), Shard(2)]) == (None, None, (0, 1))
    with pytest.raises(ValueError, match="Unsupported placement"):
        convert_to_xla_partition_spec(value, [Partial(), R])


# --- placements, spec conversion (10 + 2) ---------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements"),
    [
        ((100, 5), (8,), [Shard(0)]),
        ((100, 5), (8,), [Shard(1)]),
        ((10, 5, 3), (8,), [Shard(0)]),
        ((10, 5), (8,), [R]),
        ((10, 5), (2, 4), [Shard(0), Shard(1)]),
        ((10, 5), (2, 4), [Shard(0), R]),
    ],
)
def test_the_spec_of_a_distributed_tensor(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Any]
) -> None:
    mesh = DeviceMesh("xla", torch.arange(8).reshape(mesh_shape))
    value = torch.randn(*shape)
    x = distribute_tensor(value, mesh, placements)
    spec = x._spec
    assert isinstance(x, DTensor) and isinstance(x, xs.XLAShardedTensor)
    assert spec.mesh.device_type == "xla" and spec.mesh.shape == mesh.shape
    assert spec.mesh.size() == 8 and spec.placements == x.placements == tuple(placements)
    assert spec.tensor_meta.shape == value.shape and spec.tensor_meta.dtype == value.dtype
    assert x._spec is spec  # the same each time


def test_a_tensor_gets_a_sharding_from_outside() -> None:
    wrap = xs.wrap_as_sharded_tensor
    value = torch.randn(100, 5)
    x = wrap(value.to("xla"), mesh_shape=(8,), partition_spec=(0, None))
    assert isinstance(x, xs.XLAShardedTensor)
    assert x.mesh_shape == (8,) and x.partition_spec == (0, None)
    before = x._spec
    y = wrap(x, mesh_shape=(2, 4), partition_spec=(0, None))
    assert y._spec is not before and y._spec.mesh.shape == (2, 4)
    z = wrap(y, mesh_shape=(2, 4), partition_spec=(0, 1))
    assert z.partition_spec == (0, 1) and z._spec.placements[1].dim == 1
    assert torch.equal(z.cpu(), value)
    assert xs.wrap_if_sharded(z) is z and xs.unwrap_sharded_tensor(z) is z


def test_results_have_placements() -> None:
    """torch_xla raises here: its results don't know their sharding."""
    x = distribute_tensor(torch.randn(8, 4), mesh_of((8,)), [Shard(0)])
    assert (x + x)._spec.placements == (Shard(0),) and (x + x).partition_spec == (0, None)


def test_placements_of_a_tensor_that_is_not_sharded() -> None:
    with pytest.raises(AttributeError, match="placements"):
        _ = torch.ones(8, device="xla").placements


# --- integration (3 + 1 + 1), and the RFC ---------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [True, False])
def test_distribute_tensor(requires_grad: bool) -> None:
    mesh = init_device_mesh("xla", (8,))
    value = torch.randn(24, 3, requires_grad=requires_grad, device=torch_xla.device())
    x = distribute_tensor(value, mesh, [Shard(0)])
    assert type(x).__name__ == "XLAShardedTensor" and x.sharding_spec == tiled([8, 1])
    assert x.global_tensor.size() == (24, 3) and x.local_shards[0].data.size() == (3, 3)
    assert x.global_tensor.requires_grad is requires_grad and x.is_leaf


def test_xla_distribute_tensor_is_in_place() -> None:
    mesh = init_device_mesh("xla", (8,))
    layer = nn.Linear(16, 8).to("xla")
    value = layer.weight.detach().cpu()
    assert xla_distribute_tensor(layer.weight, mesh, [Shard(0)]) is layer.weight
    assert spec_of(layer.weight) == tiled([8, 1]) and torch.equal(layer.weight.cpu(), value)
    on_cpu = torch.randn(8)
    assert xla_distribute_tensor(on_cpu, mesh).placements == (R,) and type(on_cpu) is torch.Tensor


def test_xla_distribute_module() -> None:
    mesh = init_device_mesh("xla", (8,))
    plain = TwoLayers()
    model = copy.deepcopy(plain).to("xla")

    def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            for parameter in module.parameters():
                xla_distribute_tensor(parameter, mesh, [Shard(0)])

    assert xla_distribute_module(model, mesh, shard) is model
    assert spec_of(model.fc1.weight) == tiled([8, 1]) and spec_of(model.fc2.weight) != ""
    data = torch.randn(8, 16)
    for module, x in ((plain, data), (model, data.to("xla"))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model.fc1.weight.cpu(), plain.fc1.weight)
    assert spec_of(model.fc1.weight) == tiled([8, 1])


def test_xla_distribute_module_functions() -> None:
    mesh = init_device_mesh("xla", (8,))

    def shard_input(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(xla_distribute_tensor(x, mesh, [Shard(0)]) for x in inputs)

    def whole(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.full_tensor()

    model = xla_distribute_module(nn.Linear(4, 4).to("xla"), mesh, None, shard_input, whole)
    x = torch.randn(8, 4).to("xla")
    out = model(x)
    assert spec_of(x) == tiled([8, 1]) and not isinstance(out, xs.XLAShardedTensor)
    with pytest.raises(ValueError, match="should take in 3 arguments"):
        xla_distribute_module(model, mesh, None, lambda x: x)
    with pytest.raises(UnsupportedOpError, match="auto-sharding"):
        xla_distribute_module(model, mesh, auto_policy)


def test_the_rfc() -> None:
    mesh = DeviceMesh("xla", list(range(DEVICES)))
    big = torch.randn(80, 11)
    x = distribute_tensor(big, mesh, [Shard(0)])
    assert torch.equal(x.redistribute(placements=[R]).cpu(), big)
    assert torch.equal(x.full_tensor().cpu(), big) and x.device_mesh == mesh
    makers: Any = torch.distributed.tensor
    for name in ("zeros", "ones", "empty", "rand", "randn"):
        made = getattr(makers, name)(x.size(), device_mesh=mesh, placements=x.placements)
        assert made.placements == x.placements and made.shape == x.shape
    assert makers.full((4,), 2.0, device_mesh=mesh, placements=[R]).cpu().tolist() == [2] * 4
    grid = init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    assert grid["dp"].size() == 2 and grid["tp"]._get_root_mesh() == grid
    assert grid["dp"].mesh.tolist() == [0, 4]
