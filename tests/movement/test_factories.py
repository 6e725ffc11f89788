"""torch.distributed.tensor's factories, distribute_tensor and distribute_module on xla meshes."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import pytest
import torch
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import tests.conftest as shared
import xla_dtensor as xd
from tests.torch_layouts import all_placements, expected_indices
from xla_dtensor.base.random import rng
from xla_dtensor.movement import factories

pytestmark = pytest.mark.one_in(2)  # each variant compiles programs of its own

R, S = Replicate(), Shard

EVEN, UNEVEN = (8, 16), (9, 7)
DETERMINISTIC = {
    "zeros": torch.zeros,
    "ones": torch.ones,
    "full": functools.partial(torch.full, fill_value=2.5),
}


def make(name: str, shape: tuple[int, ...], **kwargs: Any) -> DTensor:
    if name == "full":
        return dt.full(shape, 2.5, **kwargs)
    return getattr(dt, name)(shape, **kwargs)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_values(name: str, mesh: DeviceMesh) -> None:
    for shape in (EVEN, UNEVEN):
        expected = DETERMINISTIC[name](shape)
        layouts = list(all_placements(mesh.shape, 2))
        for placements in layouts[:: max(1, len(layouts) // 6)]:
            x = make(name, shape, device_mesh=mesh, placements=placements)
            assert type(x) is xd.XLAShardedTensor
            assert (x.placements, x.dtype, x.requires_grad) == (placements, torch.float32, False)
            assert x.stride() == expected.stride()
            indices = expected_indices(shape, tuple(mesh.shape), placements)
            for shard, index in zip(x.local_shards, indices, strict=True):
                assert shard.index == index
                assert torch.equal(shard.data, expected[index])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
def test_dtypes(dtype: torch.dtype, mesh_2x4: DeviceMesh) -> None:
    kwargs: dict[str, Any] = {"device_mesh": mesh_2x4, "placements": [S(0), R], "dtype": dtype}
    for x, expected in [
        (dt.zeros(5, **kwargs), torch.zeros(5, dtype=dtype)),
        (dt.ones(5, **kwargs), torch.ones(5, dtype=dtype)),
        (dt.full((5,), 3, **kwargs), torch.full((5,), 3, dtype=dtype)),
    ]:
        assert x.dtype == dtype
        assert torch.equal(x.cpu(), expected)
    assert dt.empty(5, **kwargs).dtype == dtype


@pytest.mark.parametrize("value", [7, 2**53 + 1, 2.5, True, 1 + 2j], ids=str)
def test_full_takes_its_values_dtype(value: Any, mesh_2x4: DeviceMesh) -> None:
    x = dt.full((3,), value, device_mesh=mesh_2x4)
    assert x.dtype == torch.full((3,), value).dtype
    assert torch.equal(x.cpu(), torch.full((3,), value))


def test_arguments(mesh_2x4: DeviceMesh) -> None:
    assert dt.zeros(3, 4, device_mesh=mesh_2x4).shape == (3, 4)
    assert dt.zeros([3, 4], device_mesh=mesh_2x4).placements == (R, R)
    assert dt.ones((), device_mesh=mesh_2x4).item() == 1
    assert dt.empty(0, 3, device_mesh=mesh_2x4, placements=[S(0), S(1)]).numel() == 0
    leaf = dt.ones(3, device_mesh=mesh_2x4, placements=[S(-1), R], requires_grad=True)
    assert (leaf.requires_grad, leaf.is_leaf, leaf.placements) == (True, True, (S(0), R))
    (leaf * leaf).sum().backward()
    assert leaf.grad.placements == (S(0), R)
    assert leaf.grad.tolist() == [2, 2, 2]
    with mesh_2x4:
        assert dt.ones(3).device_mesh == mesh_2x4
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert dt.ones(3, device_mesh=mesh_2x4).dtype == torch.float64
        assert dt.randn(3, device_mesh=mesh_2x4).dtype == torch.float64
    finally:
        torch.set_default_dtype(old)
    zeros = dt.zeros(4, device_mesh=mesh_2x4, placements=[Partial(), S(0)])
    assert (zeros.placements, zeros.tolist()) == ((Partial(), S(0)), [0] * 4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "shape"),
    [("rand", EVEN), ("rand", UNEVEN), ("randn", EVEN), ("randn", UNEVEN)],
)
def test_random_numbers_depend_on_seed_and_position_alone(
    name: str, shape: tuple[int, ...]
) -> None:
    def values(mesh: DeviceMesh, placements: tuple[Placement, ...], seed: int = 5) -> torch.Tensor:
        torch.manual_seed(seed)
        return make(name, shape, device_mesh=mesh, placements=placements).cpu()

    reference = values(shared.make_mesh("1"), (R,))
    torch.manual_seed(5)
    assert torch.equal(getattr(torch, name)(shape, device="xla").cpu(), reference)
    for mesh_name in shared.MESHES:
        mesh = shared.make_mesh(mesh_name)
        layouts = list(all_placements(mesh.shape, 2))
        for placements in layouts[:: max(1, len(layouts) // 5)]:
            assert torch.equal(values(mesh, placements), reference), (mesh, placements)
    other = DeviceMesh("xla", [5, 2, 7])
    assert torch.equal(values(other, (S(1),)), reference)
    assert torch.equal(values(shared.make_mesh("2x4")["tp"], (S(0),)), reference)
    assert not torch.equal(values(other, (R,), seed=6), reference)


@pytest.mark.parametrize("name", ["rand", "randn"])
def test_consecutive_random_tensors_differ(name: str, mesh_2x4: DeviceMesh) -> None:
    def two() -> list[torch.Tensor]:
        kwargs: dict[str, Any] = {"device_mesh": mesh_2x4, "placements": [S(0), S(1)]}
        return [make(name, EVEN, **kwargs).cpu() for _ in range(2)]

    torch.manual_seed(1)
    first = two()
    torch.manual_seed(1)
    again = two()
    assert torch.equal(torch.stack(first), torch.stack(again))
    numbers = torch.cat([t.flatten() for t in first])
    assert len(numbers.unique()) == len(numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_moments(dtype: torch.dtype, mesh_2x4: DeviceMesh) -> None:
    kwargs: dict[str, Any] = {"device_mesh": mesh_2x4, "placements": [S(0), S(1)], "dtype": dtype}
    n = 250_000
    normal = dt.randn(500, 500, **kwargs).cpu().double().flatten()
    uniform = dt.rand(500, 500, **kwargs).cpu().double().flatten()
    error = 5 / math.sqrt(n)
    assert abs(normal.mean()) < error
    assert abs(normal.var() - 1) < math.sqrt(2) * error
    assert abs((normal**3).mean()) < math.sqrt(15) * error
    assert abs((normal**4).mean() - 3) < math.sqrt(96) * error
    rounding = float(torch.finfo(dtype).eps)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < error / math.sqrt(12) + rounding
    assert abs(uniform.var() - 1 / 12) < error / math.sqrt(180) + rounding
    # Neighbours, and the same place on neighbouring devices, are independent.
    for shift in (1, 125, 500):
        product = (normal * normal.roll(shift)).mean()
        assert abs(product) < error


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "full", "rand", "randn"])
@pytest.mark.parametrize("shape", [(1024, 512), (1027, 513)], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "placements",
    [(S(0), S(1)), (S(0), S(0)), (_StridedShard(1, split_factor=4), S(1)), (R, S(1))],
    ids=str,
)
def test_made_shard_by_shard(
    name: str,
    shape: tuple[int, int],
    placements: tuple[Placement, ...],
    mesh_2x4: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No device and no host ever holds more than a few times a shard."""
    factories._makers.clear()
    monkeypatch.setattr(
        "xla_dtensor.forms.host_values.to_devices", lambda *args: pytest.fail("on the host")
    )
    monkeypatch.setattr(jax, "device_put", lambda *args, **kwargs: pytest.fail("on the host"))
    x = make(name, shape, device_mesh=mesh_2x4, placements=placements)
    monkeypatch.undo()
    sizes = [math.ceil(n / p) for n, p in zip(shape, _pieces(placements), strict=True)]
    for shard in x.jax_array.addressable_shards:
        assert shard.data.shape == tuple(sizes)
    factories._makers.clear()
    programs: list[Any] = []
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda *a, **k: programs.append(jit(*a, **k)) or programs[-1])
    make(name, shape, device_mesh=mesh_2x4, placements=placements)
    monkeypatch.undo()
    (program,) = programs
    with jax.enable_x64(True):
        compiled = program.lower(rng.words(), 2.5 if name == "full" else None).compile()
    memory = compiled.memory_analysis()
    shard_bytes = 4 * math.prod(sizes)
    assert memory.argument_size_in_bytes < 100
    assert memory.output_size_in_bytes <= shard_bytes + 100
    # The generator's intermediate values: a few shards, where the full tensor is 4 or 8.
    assert memory.temp_size_in_bytes <= (3.1 * shard_bytes if name in ("rand", "randn") else 100)
    text = compiled.as_text()
    assert not any(c in text for c in ("all-gather", "all-reduce", "all-to-all", "permute"))


def _pieces(placements: tuple[Placement, ...]) -> list[int]:
    return [
        math.prod(
            n for n, p in zip((2, 4), placements, strict=True) if getattr(p, "dim", None) == d
        )
        for d in range(2)
    ]


@pytest.mark.parametrize("source", ["cpu", "xla", "full_tensor", "other devices", "parameter"])
@pytest.mark.parametrize("shape", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("placements", [(S(0), S(1)), (R, R), (Partial(), S(0))], ids=str)
def test_distribute_tensor(
    source: str, shape: tuple[int, ...], placements: tuple[Placement, ...], mesh_2x4: DeviceMesh
) -> None:
    value = torch.randn(shape)
    original = value.clone()
    tensor = {
        "cpu": lambda: value,
        "xla": lambda: value.to("xla"),
        "full_tensor": lambda: dt.distribute_tensor(value, mesh_2x4, [R, S(0)]).full_tensor(),
        "other devices": lambda: dt.distribute_tensor(
            value, DeviceMesh("xla", [6, 1])
        ).full_tensor(),
        "parameter": lambda: nn.Parameter(value),
    }[source]()
    x = dt.distribute_tensor(tensor, mesh_2x4, placements)
    assert type(x) is xd.XLAShardedTensor
    assert (x.placements, x.device_mesh, x.is_leaf) == (placements, mesh_2x4, True)
    assert x.requires_grad == tensor.requires_grad == (source == "parameter")
    assert torch.equal(x.detach().cpu(), value)
    with torch.no_grad():  # each has memory of its own
        tensor.add_(1)
        assert torch.equal(x.cpu(), original)
        x.zero_()
        assert torch.equal(tensor.cpu(), original + 1)


def test_distribute_tensor_again(mesh_2x4: DeviceMesh) -> None:
    x = dt.distribute_tensor(torch.ones(8), mesh_2x4, [S(0), R])
    assert dt.distribute_tensor(x, mesh_2x4, [S(0), R]) is x
    assert dt.distribute_tensor(x, mesh_2x4, [S(-1), R]) is x


def test_distribute_tensor_keeps_requires_grad(mesh_2x4: DeviceMesh) -> None:
    x = dt.distribute_tensor(torch.ones(5, requires_grad=True), mesh_2x4, [S(0), R])
    assert x.requires_grad
    (x * 3).sum().backward()
    assert (x.grad.placements, x.grad.tolist()) == ((S(0), R), [3] * 5)
    assert not dt.distribute_tensor(torch.arange(3), mesh_2x4).requires_grad
    with mesh_2x4:
        assert dt.distribute_tensor(torch.arange(3)).placements == (R, R)
    assert xd.distribute_tensor(torch.arange(3), mesh_2x4).tolist() == [0, 1, 2]
    assert dt.distribute_tensor(torch.arange(3), mesh_2x4, src_data_rank=None).tolist() == [0, 1, 2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4, bias=False)
        self.last.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def test_distribute_module_replicates(mesh_2x4: DeviceMesh) -> None:
    module = Net()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    assert dt.distribute_module(module, mesh_2x4) is module
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert isinstance(tensor, xd.XLAShardedTensor), name
        assert tensor.placements == (R, R)
        assert torch.equal(tensor.detach().cpu(), before[name])
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())
    assert not module.last.weight.requires_grad
    assert module.first.weight.requires_grad


def test_distribute_module_with_functions(mesh_2x4: DeviceMesh) -> None:
    calls: list[Any] = []

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        calls.append((name, type(module).__name__, mesh == mesh_2x4))
        if name == "first":
            for key, parameter in module._parameters.items():
                sharded = dt.distribute_tensor(parameter.data, mesh, [R, S(0)])
                module.register_parameter(key, nn.Parameter(sharded))

    def inputs(module: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
        assert module is net
        return (dt.distribute_tensor(args[0], mesh, [S(0), R]),)

    def outputs(module: nn.Module, out: Any, mesh: DeviceMesh) -> Any:
        assert (module is net, mesh) == (True, mesh_2x4)
        return out.full_tensor().cpu()

    reference, net = Net(), Net()
    net.load_state_dict(reference.state_dict())
    dt.distribute_module(net, mesh_2x4, partition, inputs, outputs)
    assert calls == [
        ("", "Net", True),
        ("first", "Linear", True),
        ("norm", "BatchNorm1d", True),
        ("last", "Linear", True),
    ]
    assert net.first.weight.placements == (R, S(0))
    assert net.norm.weight.placements == net.norm.running_mean.placements == (R, R)
    x = torch.randn(8, 6)
    out, expected = net(x), reference(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert net.first.weight.grad.placements == (R, S(0))
    torch.testing.assert_close(
        net.first.weight.grad.cpu(), reference.first.weight.grad, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(net.norm.running_var.cpu(), reference.norm.running_var)
    assert net.norm.num_batches_tracked.item() == 1


def test_distribute_module_with_torchs_older_signature(mesh_2x4: DeviceMesh) -> None:
    net = nn.Linear(3, 3)
    with pytest.warns(FutureWarning, match="Deprecating input_fn that takes two arguments"):
        dt.distribute_module(
            net, mesh_2x4, input_fn=lambda args, mesh: (dt.distribute_tensor(args[0], mesh),)
        )
    assert isinstance(net(torch.ones(2, 3)), DTensor)
    with pytest.raises(ValueError, match="output_fn should take in 3 arguments, but got 1"):
        dt.distribute_module(nn.Linear(2, 2), mesh_2x4, output_fn=lambda out: out)


def test_distribute_module_twice(mesh_2x4: DeviceMesh) -> None:
    net = dt.distribute_module(nn.Linear(3, 3), mesh_2x4)
    with pytest.raises(RuntimeError, match="should only be called once on a module"):
        dt.distribute_module(net, mesh_2x4)


def test_from_local_replicates(mesh_2x4: DeviceMesh) -> None:
    local = torch.ones(3, device="xla", requires_grad=True)
    x = DTensor.from_local(local * 2, mesh_2x4, [R, R])
    assert (type(x), x.placements, x.shape) == (xd.XLAShardedTensor, (R, R), (3,))
    (x.to_local() * x).sum().backward()
    assert local.grad.tolist() == [8, 8, 8]


@pytest.mark.parametrize("placements", [[S(0)], [S(1)], [R]])
def test_distribute_tensor_of_one_value_per_group(placements: Any) -> None:
    """Each data-parallel rank's own batch, dealt out along the other dim."""
    mesh = shared.make_mesh("2x4")
    values = [torch.randn(8, 4) for _ in range(2)]
    x = xd.from_device_values(values, mesh["dp"])
    dealt = xd.distribute_tensor(x, mesh["tp"], placements)
    assert dealt.placements == tuple(placements) and dealt.shape == (8, 4)
    found = dealt.full_tensor().local_values()
    for device in range(8):
        torch.testing.assert_close(found[device // (8 // len(found))], values[device // 4])
    if placements == [S(0)]:
        assert torch.equal(dealt.to_local().local_values()[6], values[1][4:6])
    leaf = xd.distribute_tensor(x.requires_grad_(), mesh["tp"], placements)
    assert leaf.is_leaf and leaf.requires_grad


def test_distribute_tensor_of_one_value_per_device() -> None:
    mesh = shared.make_mesh("2x4")
    x = xd.from_device_values([torch.ones(8, 8) * i for i in range(8)], mesh, ["tp"])
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(0)]):
        with pytest.raises(xd.PerDeviceValueError, match=r"varies along \['tp'\].*from_local"):
            xd.distribute_tensor(x, mesh, placements)
