"""XLAShardedTensor: one logical tensor, as a DTensor, a Python value and a file."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import tests.conftest as shared
import xla_dtensor as xd
from tests.torch_layouts import expected_indices

R, S = Replicate(), Shard


LAYOUTS: list[tuple[Placement, ...]] = [
    (R, R),
    (S(0), S(1)),
    (S(1), S(1)),
    (_StridedShard(0, split_factor=4), S(0)),
    (Partial(), S(0)),
]


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_what_a_dtensor_has(mesh_2x4: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    value = torch.randn(5, 6)
    x = distribute_tensor(value, mesh_2x4, placements)
    assert isinstance(x, DTensor)
    assert isinstance(x, xd.XLAShardedTensor)
    assert x.device_mesh == mesh_2x4
    assert x.placements == placements
    assert x.device == torch.device("xla:0")
    assert (x.shape, x.stride(), x.dtype) == (value.shape, value.stride(), value.dtype)
    assert (x.ndim, x.numel(), x.is_leaf, x.requires_grad) == (2, 30, True, False)
    spec = x._spec
    assert (spec.mesh, spec.placements) == (mesh_2x4, placements)
    assert spec.tensor_meta.shape == value.shape
    assert spec.tensor_meta.stride == value.stride()
    assert spec.tensor_meta.dtype == value.dtype


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(6, 5).T,
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(6, 8)[:, ::2],
    ],
    ids=["transposed", "channels_last", "expanded", "strided"],
)
def test_strides_are_those_of_a_copy(mesh_2x4: DeviceMesh, value: torch.Tensor) -> None:
    x = distribute_tensor(value, mesh_2x4, [S(0), S(1)])
    assert x.stride() == torch.empty_like(value).stride()
    assert torch.equal(x.full_tensor().cpu(), value)
    assert x.full_tensor().stride() == x.stride()
    for shard in x.local_shards:
        assert torch.equal(shard.data, value[shard.index])


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(8, 16), (5, 6)], ids=["even", "uneven"])
def test_local_shards(
    mesh_2x4: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> None:
    value = torch.randn(shape)
    shards = distribute_tensor(value, mesh_2x4, placements).local_shards
    assert [s.device for s in shards] == list(range(8))
    assert [s.index for s in shards] == expected_indices(shape, (2, 4), placements)
    assert all(torch.equal(s.data, value[s.index]) for s in shards)
    shards[0].data.zero_()  # a copy
    assert torch.equal(distribute_tensor(value, mesh_2x4, placements).full_tensor().cpu(), value)


def test_local_shards_of_a_view(mesh_2x4: DeviceMesh) -> None:
    value = torch.randn(8, 6)
    view = distribute_tensor(value, mesh_2x4, [S(0), R]).T[1:5]
    for shard in view.local_shards:
        assert torch.equal(shard.data, value.T[1:5][shard.index])


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(8, 16), (5, 6)], ids=["even", "uneven"])
def test_full_tensor(
    mesh_2x4: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> None:
    value, weight = torch.randn(shape), torch.randn(shape)
    x = distribute_tensor(value, mesh_2x4, placements).requires_grad_()
    full = x.full_tensor()
    assert type(full) is xd.XLATensor
    assert not isinstance(full, DTensor)
    assert full.device == torch.device("xla:0")
    assert torch.equal(full.detach().cpu(), value)
    assert len(full.jax_array.devices()) == 8
    assert full.jax_array.sharding.is_fully_replicated
    (full * weight).sum().backward()
    assert x.grad is not None
    assert x.grad.placements == tuple(R if isinstance(p, Partial) else p for p in placements)
    torch.testing.assert_close(x.grad.full_tensor().cpu(), weight)
    (first,) = torch.autograd.grad((x.full_tensor() ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second.full_tensor().cpu(), 6 * value)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("source", [(S(0), R), (R, R), (R, S(0))], ids=str)
@pytest.mark.parametrize(
    "grad_placements",
    [
        None,
        (R, R),
        (Partial(), R),
        (Partial(), Partial()),
        (R, Partial("avg")),
        (Partial("max"), Partial("max")),
        (R, Partial("product")),
    ],
    ids=str,
)
def test_grad_placements(
    source: tuple[Placement, ...], grad_placements: tuple[Placement, ...] | None
) -> None:
    """The truth is torch's DTensor on eight ranks, each with its own value."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def gradient(device_type: str) -> DTensor:
        value, weight = torch.arange(1.0, 9), torch.linspace(-1, 1, 8)
        mesh = xd.init_device_mesh(device_type, (2, 4))
        x = distribute_tensor(value, mesh, source).requires_grad_()
        (x.full_tensor(grad_placements=grad_placements) * weight).sum().backward()
        assert isinstance(x.grad, DTensor)
        return x.grad

    ours = gradient("xla")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with LocalTensorMode(8):
            torchs = gradient("cpu")
            expected = torchs.full_tensor().reconcile()
    finally:
        dist.destroy_process_group()
    assert ours.placements == torchs.placements
    torch.testing.assert_close(ours.full_tensor().cpu(), expected)


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_values_in_python(mesh_2x4: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    value = torch.randn(5, 6)
    x = distribute_tensor(value, mesh_2x4, placements)
    host = x.cpu()
    assert type(host) is torch.Tensor
    assert host.device.type == "cpu"
    assert torch.equal(host, value)
    assert torch.equal(x.to("cpu"), value)
    assert np.array_equal(x.numpy(), value.numpy())
    assert np.array_equal(x.full_tensor().numpy(), value.numpy())
    assert np.array_equal(np.asarray(x), value.numpy())
    assert x.tolist() == value.tolist()
    assert x.sum().item() == pytest.approx(value.sum().item(), rel=1e-5)
    assert x[2, 3].item() == value[2, 3].item()
    assert float(x[0, 0]) == float(value[0, 0])
    assert bool(x[0, 0] > -100)
    assert len(x) == 5


def test_values_of_scalars(mesh_2x4: DeviceMesh) -> None:
    for value in (torch.tensor(2**53 + 1), torch.tensor(True), torch.tensor(1.5 - 2j)):
        x = distribute_tensor(value, mesh_2x4)
        assert (x.item(), x.tolist()) == (value.item(), value.tolist())
    with pytest.raises(RuntimeError, match=r"a Tensor with 2 elements cannot be converted to Scal"):
        distribute_tensor(torch.ones(2), mesh_2x4).item()


def test_numpy_of_what_requires_grad(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(3), mesh_2x4).requires_grad_()
    with pytest.raises(RuntimeError, match=r"use tensor\.detach\(\)\.numpy\(\)"):
        x.numpy()
    assert x.numpy(force=True).tolist() == [1, 1, 1]
    assert x.tolist() == [1, 1, 1]


def test_cpu_is_differentiable(mesh_2x4: DeviceMesh) -> None:
    weight = torch.randn(5)
    x = distribute_tensor(torch.randn(5), mesh_2x4, [S(0), R]).requires_grad_()
    (x.cpu() * weight).sum().backward()
    assert x.grad is not None
    assert x.grad.placements == (S(0), R)
    assert torch.equal(x.grad.cpu(), weight)


def test_parameters(mesh_2x4: DeviceMesh) -> None:
    value = torch.randn(5, 6)
    parameter = nn.Parameter(distribute_tensor(value, mesh_2x4, [S(0), S(1)]))
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, xd.XLAShardedTensor)
    assert (parameter.requires_grad, parameter.is_leaf) == (True, True)
    assert parameter.placements == (S(0), S(1))
    module = nn.Module()
    module.weight = parameter
    assert dict(module.named_parameters())["weight"] is parameter
    module.load_state_dict({"weight": distribute_tensor(value + 1, mesh_2x4, [S(0), S(1)])})
    assert torch.equal(module.weight.detach().cpu(), value + 1)
    module.zero_grad()
    (parameter * parameter).sum().backward()
    assert parameter.grad.placements == (S(0), S(1))
    torch.testing.assert_close(parameter.grad.cpu(), 2 * (value + 1))
    assert not nn.Parameter(parameter.detach(), requires_grad=False).requires_grad


def test_a_leafs_gradient_is_sharded_as_the_leaf(mesh_2x4: DeviceMesh) -> None:
    """By its rule the gradient of a matmul's weight is Partial over the batch's mesh dim."""
    inputs, weight = torch.randn(8, 4), torch.randn(4, 8)
    for placements in [(S(0), S(1)), (R, S(1)), (S(1), R), (S(0), S(0))]:
        w = nn.Parameter(distribute_tensor(weight, mesh_2x4, placements))
        x = distribute_tensor(inputs, mesh_2x4, [S(0), R])
        (x @ w).sum().backward()
        assert w.grad.placements == placements
        torch.testing.assert_close(w.grad.cpu(), inputs.T @ torch.ones(8, 8))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_deepcopy(mesh_2x4: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    value = torch.randn(5, 6)
    x = nn.Parameter(distribute_tensor(value, mesh_2x4, placements))
    x.grad = distribute_tensor(value * 2, mesh_2x4, placements)
    x.note = ["kept"]
    other = copy.deepcopy(x)
    assert isinstance(other, nn.Parameter)
    assert (type(other), other.placements, other.device_mesh) == (type(x), placements, mesh_2x4)
    assert other.requires_grad
    assert (other.note, other.note is x.note) == (["kept"], False)
    assert torch.equal(other.grad.cpu(), value * 2)
    with torch.no_grad():
        other.add_(1)
        other.grad.zero_()
    assert torch.equal(x.detach().cpu(), value)
    assert torch.equal(other.detach().cpu(), value + 1)
    assert torch.equal(x.grad.cpu(), value * 2)


def test_deepcopy_of_tied_parameters(mesh_2x4: DeviceMesh) -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh_2x4))
    one, two = copy.deepcopy(nn.ModuleList([first, second]))
    assert one.weight is two.weight
    with pytest.raises(RuntimeError, match=r"only tensors created by the user .* detach\(\)"):
        copy.deepcopy(first.weight * 2)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_save_and_load(
    mesh_2x4: DeviceMesh, placements: tuple[Placement, ...], weights_only: bool
) -> None:
    value = torch.randn(6, 5).T
    x = distribute_tensor(value, mesh_2x4, placements)
    file = io.BytesIO()
    torch.save({"x": x, "p": nn.Parameter(x), "full": x.full_tensor()}, file)
    assert value.numpy().tobytes() in file.getvalue() or value.T.numpy().tobytes() in (
        file.getvalue()
    )
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    y = loaded["x"]
    assert (type(y), y.placements, y.device_mesh) == (type(x), placements, mesh_2x4)
    assert (y.stride(), y.requires_grad) == (x.stride(), False)
    assert torch.equal(y.cpu(), value)
    assert isinstance(loaded["p"], nn.Parameter)
    assert loaded["p"].requires_grad
    assert type(loaded["full"]) is xd.XLATensor
    assert torch.equal(loaded["full"].cpu(), value)
    assert torch.equal(pickle.loads(pickle.dumps(x)).cpu(), value)


@pytest.mark.slow
def test_load_in_a_fresh_process(mesh_2x4: DeviceMesh, tmp_path: object) -> None:
    """On a submesh; nothing but xla_dtensor is imported there."""
    mesh = mesh_2x4["tp", "dp"]
    x = distribute_tensor(torch.arange(6.0), mesh, [_StridedShard(0, split_factor=2), S(0)])
    path = f"{tmp_path}/x.pt"
    torch.save(x, path)
    code = f"import torch, xla_dtensor; x = torch.load({path!r}); print(x, x.tolist())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert out.stdout.strip() == f"{x} {list(map(float, range(6)))}"


def test_inplace_keeps_the_layout(mesh_2x4: DeviceMesh) -> None:
    value = torch.randn(5, 6)
    x = distribute_tensor(value, mesh_2x4, [S(0), R])
    before = x
    x += 1
    x.mul_(distribute_tensor(value, mesh_2x4, [R, S(1)]))
    assert x is before
    assert x.placements == (S(0), R)
    torch.testing.assert_close(x.cpu(), (value + 1) * value)


@pytest.mark.parametrize("mesh_name", list(shared.MESHES))
def test_on_every_mesh(mesh_name: str) -> None:
    mesh = shared.make_mesh(mesh_name)
    a, b = torch.randn(9, 6), torch.randn(6, 7)
    x = distribute_tensor(a, mesh, [S(0), *[R] * (mesh.ndim - 1)]).requires_grad_()
    y = distribute_tensor(b, mesh, [*[R] * (mesh.ndim - 1), S(1)]).requires_grad_()
    torch.softmax(x @ y, 1).square().sum().backward()
    ra, rb = a.clone().requires_grad_(), b.clone().requires_grad_()
    torch.softmax(ra @ rb, 1).square().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), ra.grad)
    torch.testing.assert_close(y.grad.cpu(), rb.grad)


@pytest.mark.parametrize("history", [False, True])
def test_gradients_land_however_they_come(mesh_2x4: DeviceMesh, history: bool) -> None:
    factor = torch.randn(8, 8)
    leaf = distribute_tensor(torch.randn(8, 8), mesh_2x4, [S(0), R]).requires_grad_()
    factors = [distribute_tensor(factor, mesh_2x4, p) for p in ((R, R), (S(1), S(0)), (S(0), R))]
    for _ in range(2):  # what the first ones have shown is remembered
        for other in factors:
            for out, expected in (
                ((leaf * other).sum(), factor),
                ((leaf.sum(0) * other[0]).sum(), factor[:1].expand(8, 8)),
            ):
                (grad,) = torch.autograd.grad(out, leaf, create_graph=history)
                assert grad.placements == (S(0), R)
                assert torch.equal(grad.full_tensor().detach().cpu(), expected)
