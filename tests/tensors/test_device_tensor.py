"""XLATensor: what each device holds, alone and together with sharded tensors."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import xla_dtensor as xd

pytestmark = pytest.mark.one_in(2)  # each variant compiles programs of its own

R, S = Replicate(), Shard

FACTORIES = {
    "zeros": lambda **k: torch.zeros(2, 3, **k),
    "ones": lambda **k: torch.ones((2, 3), **k),
    "ones int": lambda **k: torch.ones(4, dtype=torch.int64, **k),
    "arange": lambda **k: torch.arange(7, **k),
    "arange from": lambda **k: torch.arange(1, 9, 2, **k),
    "arange float": lambda **k: torch.arange(0, 1, 0.125, **k),
    "full": lambda **k: torch.full((3,), 2.5, **k),
    "full int": lambda **k: torch.full((3,), 7, **k),
    "full bool": lambda **k: torch.full((), True, **k),
    "eye": lambda **k: torch.eye(3, 4, **k),
    "linspace": lambda **k: torch.linspace(-1, 1, 5, **k),
    "tril_indices": lambda **k: torch.tril_indices(3, 3, **k),
    "scalar_tensor": lambda **k: torch.scalar_tensor(3.0, **k),
    "tensor": lambda **k: torch.tensor([[1.0, 2], [3, 4]], **k),
    "tensor int": lambda **k: torch.tensor(2**53 + 1, **k),
    "tensor complex": lambda **k: torch.tensor([1 + 2j], **k),
    "as_tensor": lambda **k: torch.as_tensor([1, 2, 3], **k),
    "empty of no elements": lambda **k: torch.empty(0, 3, **k),
    "zeros float64": lambda **k: torch.zeros(2, dtype=torch.float64, **k),
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_factories(make) -> None:
    expected = make()
    x = make(device="xla")
    assert type(x) is xd.XLATensor
    assert x.device == torch.device("xla:0")
    assert (x.dtype, x.shape, x.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(x.cpu(), expected)
    with torch.device("xla"):
        y = make()
    assert type(y) is xd.XLATensor
    assert torch.equal(y.cpu(), expected)


def test_random_factories() -> None:
    torch.manual_seed(3)
    first = [torch.randn(1000, device="xla"), torch.rand(1000, device="xla")]
    between = torch.randn(1000, device="xla")
    torch.manual_seed(3)
    again = [torch.randn(1000, device="xla"), torch.rand(1000, device="xla")]
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].cpu(), between.cpu())
    normal, uniform = (t.cpu() for t in first)
    assert abs(normal.mean()) < 0.2
    assert abs(normal.std() - 1) < 0.1
    assert 0 <= uniform.min() < 0.05 < 0.95 < uniform.max() < 1
    assert sorted(torch.randperm(20, device="xla").tolist()) == list(range(20))
    assert set(torch.randint(2, 5, (100,), device="xla").tolist()) == {2, 3, 4}


EXACT = {
    torch.bool: [True, False],
    torch.uint8: [0, 255],
    torch.int8: [-128, 127],
    torch.int16: [-(2**15), 2**15 - 1],
    torch.int32: [-(2**31), 2**31 - 1],
    torch.int64: [-(2**63), 2**53 + 1, 2**63 - 1],
    torch.float16: [1 / 3, 30000.0, 6e-8],
    torch.bfloat16: [1 / 3, 1e38, -0.0],
    torch.float32: [1 / 3, 1e38, math.inf, -0.0],
    torch.float64: [1 / 3, 1e300, 1e-300, 1 + 2**-52],
    torch.complex64: [1 / 3 + 2j, -1j],
    torch.complex128: [1 / 3 + 1e-300j, -1j],
}


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_values_are_exact(dtype: torch.dtype) -> None:
    value = torch.tensor(EXACT[dtype], dtype=dtype)
    x = value.to("xla")
    assert (type(x), x.dtype) == (xd.XLATensor, dtype)
    assert torch.equal(x.cpu().view(torch.uint8), value.view(torch.uint8))
    assert x[-1].item() == value[-1].item()
    assert x.tolist() == value.tolist()
    if dtype is torch.bool:
        return
    assert (x + x).dtype == dtype
    torch.testing.assert_close((x + x).cpu(), value + value, rtol=0, atol=0)
    torch.testing.assert_close((x * 3).cpu(), value * 3, rtol=0, atol=0)


@pytest.mark.parametrize("target", [*EXACT, torch.bool], ids=str)
@pytest.mark.parametrize("source", [torch.int64, torch.bfloat16, torch.float64], ids=str)
def test_dtype_conversions(source: torch.dtype, target: torch.dtype) -> None:
    value = torch.tensor([0, 1, 3, 100], dtype=source)
    converted = value.to("xla").to(target)
    assert converted.dtype == target
    assert torch.equal(converted.cpu(), value.to(target))
    assert torch.equal(value.to("xla", target).cpu(), value.to(target))
    assert torch.equal(value.to("xla").to("cpu", target), value.to(target))


def test_subnormal_numbers_are_moved() -> None:
    for dtype, value in [(torch.bfloat16, 1e-40), (torch.float32, 1e-45), (torch.float64, 5e-324)]:
        x = torch.tensor([value, -value], dtype=dtype)
        assert torch.equal(x.to("xla").cpu().view(torch.uint8), x.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_dtypes_that_xla_lacks() -> None:
    with pytest.raises(TypeError, match="complex32 has no XLA counterpart"):
        torch.ones(2, dtype=torch.complex32).to("xla")


def test_moving_does_not_share_memory() -> None:
    value = torch.ones(4)
    x = value.to("xla")
    value.add_(5)
    back = x.cpu()
    back.add_(7)
    assert x.tolist() == [1, 1, 1, 1]
    assert x.to("xla") is x
    y = x.clone()
    y.zero_()
    assert x.tolist() == [1, 1, 1, 1]


def test_strides_survive_the_move() -> None:
    value = torch.randn(3, 4).T
    x = value.to("xla")
    assert (x.stride(), x.is_contiguous()) == (value.stride(), False)
    assert x.cpu().stride() == value.stride()
    assert torch.equal(x.cpu(), value)


def test_repr_shows_values() -> None:
    assert repr(torch.arange(3, device="xla")) == "XLATensor([0, 1, 2], device='xla:0')"
    x = torch.tensor([1.5], device="xla", requires_grad=True)
    assert repr(x) == "XLATensor([1.5000], device='xla:0', requires_grad=True)"


@pytest.mark.parametrize("value", [1.23456, -2, True, 1 + 2j])
@pytest.mark.parametrize("spec", ["", ".3f", ">9", "08.2e", "d", "s"])
def test_formats(value: complex, spec: str, mesh_2x4: DeviceMesh) -> None:
    plain = torch.tensor(value)

    def formatted(x: torch.Tensor) -> str:
        try:
            return format(x, spec)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    expected = formatted(plain)
    assert formatted(plain.to("xla")) == expected
    assert formatted(distribute_tensor(plain, mesh_2x4, [Replicate(), Replicate()])) == expected
    if plain.is_floating_point():
        assert formatted(plain.to("xla").requires_grad_()) == expected


def test_formats_of_what_is_no_number(capsys: pytest.CaptureFixture) -> None:
    x = torch.ones(2, device="xla")
    assert f"{x}" == repr(x)
    for wrong in (x, torch.ones((), device="xla").to("meta")):
        with pytest.raises(TypeError, match="unsupported format string"):
            format(wrong, ".2f")
    xd.compile(lambda x: (print(f"{x.sum()}"), x * 2)[1])(x)
    assert capsys.readouterr().out == "2.0\n"
    with pytest.raises(xd.DataDependentError):
        xd.compile(lambda x: (f"{x.sum():.2f}", x)[1])(x)


LAYOUTS: list[tuple[Placement, ...]] = [(R, R), (S(0), S(1)), (S(1), R), (Partial(), S(0))]
OPERATIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / (b * b + 1),
    "matmul": lambda a, b: a @ b.T,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "maximum": torch.maximum,
}


@pytest.mark.one_in(10)
@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("kind", ["xla", "cpu"])
def test_with_sharded_tensors(
    mesh_2x4: DeviceMesh, kind: str, operation, placements: tuple[Placement, ...]
) -> None:
    """Both ways, with gradients: a per-device (or CPU) tensor joins as if it were replicated."""
    a, b = torch.randn(5, 6), torch.randn(5, 6)
    for flip in (False, True):
        sharded = distribute_tensor(a, mesh_2x4, placements).requires_grad_()
        other = b.to(kind).requires_grad_(kind == "xla")
        ra, rb = a.clone().requires_grad_(), b.clone().requires_grad_()
        result = operation(*((other, sharded) if flip else (sharded, other)))
        expected = operation(*((rb, ra) if flip else (ra, rb)))
        assert type(result) is xd.XLAShardedTensor
        assert result.device_mesh == mesh_2x4
        torch.testing.assert_close(result.full_tensor().cpu(), expected)
        result.square().sum().backward()
        expected.square().sum().backward()
        assert sharded.grad.placements == tuple(
            R if isinstance(p, Partial) else p for p in placements
        )
        torch.testing.assert_close(sharded.grad.cpu(), ra.grad)
        if kind == "xla":
            assert other.grad.device.type == "xla"
            torch.testing.assert_close(other.grad.cpu(), rb.grad)


def test_cpu_tensors_that_require_grad(mesh_2x4: DeviceMesh) -> None:
    """Their gradient is an xla tensor: they must be moved explicitly."""
    leaf = torch.ones(3, requires_grad=True)
    for other in (torch.ones(3, device="xla"), distribute_tensor(torch.ones(3), mesh_2x4)):
        with pytest.raises(xd.UnsupportedOpError, match=r"requires grad.*\.to\('xla'\)"):
            other * leaf


def test_full_tensors_of_different_meshes_join(mesh_2x4: DeviceMesh) -> None:
    full = distribute_tensor(torch.arange(4.0), mesh_2x4, [S(0), R]).full_tensor()
    plain = torch.arange(4.0, device="xla")
    assert (full + plain).tolist() == [0, 2, 4, 6]
    assert (plain * full).tolist() == [0, 1, 4, 9]
    assert (full + distribute_tensor(torch.ones(4), mesh_2x4["tp"], [S(0)])).tolist() == [
        1, 2, 3, 4
    ]  # fmt: skip


def test_inplace_into_a_per_device_tensor(mesh_2x4: DeviceMesh) -> None:
    """A sharded value is written into the whole tensor, not into one device's."""
    x = torch.zeros(4, device="xla")
    alias = x[1:3]
    x.add_(2).mul_(torch.arange(4))
    assert (x.tolist(), alias.tolist()) == ([0, 2, 4, 6], [2, 4])
    alias.zero_()
    assert x.tolist() == [0, 0, 0, 6]
    with torch.no_grad():
        x.copy_(torch.full((4,), 3.0))
    assert x.tolist() == [3, 3, 3, 3]


def test_autograd() -> None:
    value = torch.randn(4, 3)
    x = value.to("xla").requires_grad_()
    y = torch.sin(x @ x.T).sum()
    y.backward()
    r = value.clone().requires_grad_()
    torch.sin(r @ r.T).sum().backward()
    assert type(x.grad) is xd.XLATensor
    torch.testing.assert_close(x.grad.cpu(), r.grad)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second.cpu(), 6 * value)


def test_autograd_across_devices(mesh_2x4: DeviceMesh) -> None:
    """CPU leaf -> per-device -> sharded -> per-device -> CPU, and back."""
    value, weight = torch.randn(5, 6), torch.randn(5, 6)
    leaf = value.clone().requires_grad_()
    sharded = distribute_tensor(torch.ones(5, 6), mesh_2x4, [S(0), S(1)])
    out = ((leaf.to("xla") * sharded).redistribute(placements=[R, S(0)])).full_tensor().cpu()
    (out**2 * weight).sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * value * weight)


def test_modules() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    on_xla = copy.deepcopy(model).to("xla")
    for parameter in on_xla.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, xd.XLATensor)
        assert (parameter.device.type, parameter.requires_grad) == ("xla", True)
    inputs = torch.randn(5, 6)
    for m, x in ((model, inputs), (on_xla, inputs.to("xla"))):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), on_xla.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p)
    assert on_xla.double()[0].weight.dtype is torch.float64
    back = on_xla.float().to("cpu")
    assert type(back[0].weight.data) is torch.Tensor
    with torch.device("xla"):
        assert nn.Linear(2, 2).weight.device.type == "xla"


def test_copies_and_pickles() -> None:
    x = torch.randn(3, 4).T.to("xla").requires_grad_()
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert (type(y), y.requires_grad, y.stride()) == (xd.XLATensor, True, x.stride())
        assert torch.equal(y.detach().cpu(), x.detach().cpu())


def test_the_device_module() -> None:
    assert torch.get_device_module("xla") is torch.xla
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("xla")
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.synchronize()
    assert torch.xla.is_available()
    assert (torch.xla.device_count(), torch.xla.current_device()) == (1, 0)
    assert torch._utils._get_available_device_type() == "xla"
    assert torch.device("xla").type == "xla"


def test_the_generator() -> None:
    torch.manual_seed(7)
    assert torch.xla.initial_seed() == 7
    state = torch.xla.get_rng_state()
    first = torch.randn(5, device="xla")
    assert not torch.equal(torch.xla.get_rng_state(), state)
    torch.xla.set_rng_state(state)
    assert torch.equal(torch.randn(5, device="xla").cpu(), first.cpu())
    torch.xla.manual_seed_all(7)
    assert torch.equal(torch.randn(5, device="xla").cpu(), first.cpu())
    with torch.random.fork_rng(devices=[0], device_type="xla"):
        torch.randn(5, device="xla")
    torch.manual_seed(-1)
    torch.randn(2, device="xla")
    with pytest.raises(ValueError, match="uint8 tensor of 16 elements"):
        torch.xla.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_a_copied_parameter_leaves_its_gradient_behind() -> None:
    """As ``nn.Parameter.__deepcopy__`` does; a plain leaf takes it along."""
    values = torch.ones(8, 4)
    for wrap in (nn.Parameter, torch.Tensor.requires_grad_):
        ours, theirs = wrap(values.to("xla")), wrap(values.clone())
        kept = []
        for leaf in (ours, theirs):
            leaf.sum().backward()
            kept.append(copy.deepcopy(leaf).grad is not None)
        assert kept[0] is kept[1]


def test_conjugates_are_computed() -> None:
    """They have torch's values, and no mark that says they are conjugates."""
    x = torch.tensor([1 + 2j, 3 - 1j])
    ours = x.to("xla").conj()
    assert (ours.is_conj(), x.conj().is_conj()) == (False, True)
    assert ours.cpu().tolist() == x.conj().tolist()
