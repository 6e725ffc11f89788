"""``to_local``, ``from_local``, and operations on what each device holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import xla_dtensor as xd
from tests.conftest import make_mesh

R = Replicate()
LAYOUTS: list[tuple[str, tuple[Placement, ...]]] = [
    ("8", (Shard(0),)),
    ("8", (Shard(1),)),
    ("2x4", (Shard(0), Shard(1))),
    ("2x4", (Shard(1), Shard(0))),
    ("2x4", (Shard(0), Shard(0))),
    ("2x4", (R, Shard(0))),
    ("2x4", (Shard(1), R)),
    ("2x2x2", (Shard(1), R, Shard(0))),
    ("1", (Shard(0),)),
    ("2x4", (R, R)),
]


def parts(value: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> list:
    """What each device holds, in row-major order, cut with torch.chunk as torch's DTensor does."""
    result = []
    for coordinate in itertools.product(*map(range, mesh.shape)):
        part = value
        for dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                part = part.chunk(mesh.size(dim), placement.dim)[coordinate[dim]]
        result.append(part)
    return result


def check(actual: xd.XLATensor, expected: Sequence[torch.Tensor]) -> None:
    """The value on every device."""
    values = actual.detach().local_values()
    if len(values) == 1:  # a tensor of the default device
        values = values * len(expected)
    for i, (a, e) in enumerate(zip(values, expected, strict=True)):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5, msg=lambda m, i=i: f"{i}: {m}")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh_name, placements", LAYOUTS)
def test_there_and_back(mesh_name: str, placements: tuple[Placement, ...]) -> None:
    mesh = make_mesh(mesh_name)
    value = torch.randn(8, 16)
    x = distribute_tensor(value, mesh, placements)
    local = x.to_local()
    assert type(local) is xd.XLATensor
    expected = parts(value, mesh, placements)
    assert local.shape == expected[0].shape and local.is_contiguous()
    check(local, expected)
    check(local.sin().sum(0), [e.sin().sum(0) for e in expected])
    back = DTensor.from_local(local * 3, mesh, placements)
    assert (back.shape, back.stride(), back.placements) == (x.shape, x.stride(), placements)
    torch.testing.assert_close(back.full_tensor().cpu(), value * 3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mesh_name, placements", LAYOUTS)
def test_memory_is_shared(mesh_name: str, placements: tuple[Placement, ...]) -> None:
    mesh = make_mesh(mesh_name)
    value = torch.randn(8, 16)
    x = distribute_tensor(value, mesh, placements)
    local = x.to_local()
    assert x.to_local() is local
    x.mul_(2)
    check(local, parts(value * 2, mesh, placements))
    local.t()[0].zero_()
    expected = [p.clone() for p in parts(value * 2, mesh, placements)]
    for part in expected:
        part[:, 0] = 0
    check(local, expected)
    assert x.placements == placements
    check(x.to_local(), expected)
    again = DTensor.from_local(local, mesh, placements)
    again.add_(1)
    check(x.to_local(), [e + 1 for e in expected])


def test_the_same_object_until_a_write(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(8, 16), mesh_2x4, [Shard(0), Shard(1)]).requires_grad_()
    local = x.to_local()
    assert x.to_local() is local
    with torch.no_grad():
        assert x.to_local() is not local  # without history
        x.add_(1)
    assert x.to_local() is not local


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min"])
def test_partial(mesh_2x4: DeviceMesh, reduce_op: str) -> None:
    values = [torch.randn(4, 2) for _ in range(8)]
    local = xd.from_device_values(values, mesh_2x4)
    x = DTensor.from_local(local, mesh_2x4, [Partial(reduce_op), Shard(1)])
    reduce = {
        "sum": lambda a, b: a + b,
        "avg": lambda a, b: (a + b) / 2,
        "max": torch.maximum,
        "min": torch.minimum,
    }[reduce_op]
    pieces = [reduce(values[i], values[4 + i]) for i in range(4)]
    assert x.shape == (4, 8)
    check(x.to_local(), values)  # still unreduced
    torch.testing.assert_close(x.full_tensor().cpu(), torch.cat(pieces, 1))
    moved = x.redistribute(placements=[Shard(0), Shard(1)])
    torch.testing.assert_close(moved.full_tensor().cpu(), torch.cat(pieces, 1))


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max"])
def test_local_part_of_a_reduced_partial(mesh_2x4: DeviceMesh, reduce_op: str) -> None:
    """A rule's ``Partial`` has no parts; the local tensors are some that reduce to the value."""
    x = distribute_tensor(torch.randn(4, 8), mesh_2x4, [Partial(reduce_op), Shard(1)])
    back = DTensor.from_local(x.to_local() * 1, mesh_2x4, x.placements)
    torch.testing.assert_close(back.full_tensor().cpu(), x.full_tensor().cpu())


def test_on_a_submesh(mesh_2x4: DeviceMesh) -> None:
    """What varies along dp is sharded along tp."""
    tp = mesh_2x4["tp"]
    batches = [torch.randn(3, 8) for _ in range(2)]
    x = xd.from_device_values([batches[i // 4] for i in range(8)], mesh_2x4, ["dp"])
    assert x.varying == ("dp",)
    weight = torch.randn(8, 4)
    w = distribute_tensor(weight, tp, [Shard(1)]).requires_grad_()
    y = DTensor.from_local(x, tp, [R]) @ w
    assert y.placements == (Shard(1),) and y.device_mesh == tp
    products = [b @ weight for b in batches]
    check(y.to_local(), [products[i // 4][:, i % 4 : i % 4 + 1] for i in range(8)])
    check(y.full_tensor(), [products[i // 4] for i in range(8)])
    rows = y.redistribute(placements=[R]).to_local()
    check(rows, [products[i // 4] for i in range(8)])
    y.full_tensor().square().sum().backward()
    assert w.grad is not None and w.grad.placements == (Shard(1),)
    grads = [2 * b.t() @ p for b, p in zip(batches, products, strict=True)]
    check(w.grad.to_local(), [grads[i // 4][:, i % 4 : i % 4 + 1] for i in range(8)])


GRADIENTS: list[tuple[Any, Any, Any]] = [
    # forward placements, grad_placements, factor of the gradient of (local ** 2).sum() per device
    ((Shard(0), Shard(1)), None, 1),
    ((R, Shard(1)), None, 1),
    ((R, Shard(1)), (Partial(), Shard(1)), 2),
    ((R, R), (Partial(), Partial()), 8),
    ((R, R), (Partial("avg"), R), 1),
]


@pytest.mark.parametrize("placements, grad_placements, factor", GRADIENTS)
def test_gradient_of_to_local(
    mesh_2x4: DeviceMesh, placements: Any, grad_placements: Any, factor: int
) -> None:
    value = torch.randn(4, 8)
    x = distribute_tensor(value, mesh_2x4, placements).requires_grad_()
    x.to_local(grad_placements=grad_placements).square().sum().backward()
    assert x.grad is not None and x.grad.placements == placements
    torch.testing.assert_close(x.grad.full_tensor().cpu(), 2 * value * factor)


def test_gradient_that_differs_where_the_tensor_does_not(mesh_2x4: DeviceMesh) -> None:
    scales = [torch.tensor(float(i)) for i in range(8)]
    scale = xd.from_device_values(scales, mesh_2x4)
    x = distribute_tensor(torch.ones(4), mesh_2x4, [R, R]).requires_grad_()
    with pytest.raises(xd.UnsupportedOpError, match=r"differs from device to device along 'dp'.*"):
        (x.to_local() * scale).sum().backward()
    (x.to_local(grad_placements=[Partial(), Partial()]) * scale).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.full_tensor().cpu(), torch.full((4,), 28.0))


@pytest.mark.parametrize(
    "placements", [(Shard(0), Shard(1)), (Partial(), Shard(0)), (Partial(), R)]
)
def test_gradient_of_from_local(mesh_2x4: DeviceMesh, placements: Any) -> None:
    """Of a part of a sum it is the gradient of the sum."""
    values = [torch.randn(4, 8) for _ in range(8)]
    if R in placements:
        values = [values[i // 4] for i in range(8)]
    local = xd.from_device_values(values, mesh_2x4, ["dp"] if R in placements else None)
    local.requires_grad_()
    x = DTensor.from_local(local, mesh_2x4, placements)
    (x.full_tensor() ** 2).sum().backward()
    assert local.grad is not None and local.grad.shape == local.shape
    grad = 2 * x.detach().full_tensor().cpu()
    cut = [R if isinstance(p, Partial) else p for p in placements]
    check(local.grad, parts(grad, mesh_2x4, cut))


LOCAL_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x, y: x @ y.t(),
    "broadcast": lambda x, y: x + y[0],
    "softmax": lambda x, y: (x * y).softmax(-1),
    "layer_norm": lambda x, y: F.layer_norm(x, x.shape[-1:], y[0]),
    "cat": lambda x, y: torch.cat([x, y, x], 1),
    "index": lambda x, y: x[y[:, 0].argsort()],
    "sort": lambda x, y: x.sort(-1).values + y,
    "where": lambda x, y: torch.where(x > y, x, 2 * y),
    "cumsum": lambda x, y: x.cumsum(0) * y,
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "views": lambda x, y: x.view(2, 2, 4)[1].t() @ y[:2],
    "cholesky": lambda x, y: torch.linalg.cholesky(
        x @ x.t() + y.square().sum() * torch.eye(4, device=x.device)
    ),
    "conv": lambda x, y: F.conv1d(x[None], y[:, :, None]),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None]),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(LOCAL_OPS))
def test_operations(mesh_2x4: DeviceMesh, name: str) -> None:
    """Each device computes on its own values, between tensors that vary along different dims."""
    function = LOCAL_OPS[name]
    xs, ys = [torch.randn(4, 4) for _ in range(2)], [torch.randn(4, 4) for _ in range(4)]
    xs = [x.repeat(1, 1) for x in xs]
    x = xd.from_device_values([xs[i // 4] for i in range(8)], mesh_2x4, ["dp"]).requires_grad_()
    y = xd.from_device_values([ys[i % 4] for i in range(8)], mesh_2x4, ["tp"]).requires_grad_()
    result = function(x, y)
    assert result.varying == ("dp", "tp")
    expected, gx, gy = [], [], []
    for i in range(8):
        a, b = xs[i // 4].clone().requires_grad_(), ys[i % 4].clone().requires_grad_()
        out = function(a, b)
        out.square().sum().backward()
        expected.append(out.detach())
        gx.append(a.grad if a.grad is not None else torch.zeros_like(a))
        gy.append(b.grad if b.grad is not None else torch.zeros_like(b))
    check(result, expected)
    result.square().sum().backward()
    assert x.grad is not None
    check(x.grad, gx)
    if y.grad is not None:
        check(y.grad, gy)


def test_writes_and_views(mesh_2x4: DeviceMesh) -> None:
    values = [torch.randn(4, 4) for _ in range(8)]
    x = xd.from_device_values(values, mesh_2x4)
    plain = torch.zeros(4, 4, device="xla")
    view = plain[1:3]
    assert plain.varying == ()
    view.copy_(x[:2])
    assert plain.varying == view.varying == ("dp", "tp")
    expected = [torch.zeros(4, 4).index_copy(0, torch.tensor([1, 2]), v[:2]) for v in values]
    check(plain, expected)
    plain.t_().add_(x)
    check(view, [(e.t() + v).t()[1:3] for e, v in zip(expected, values, strict=True)])
    torch.mul(x, 2, out=plain)
    check(plain, [2 * v for v in values])


def test_random_numbers(mesh_2x4: DeviceMesh) -> None:
    x = xd.from_device_values([torch.ones(64)] * 8, mesh_2x4, ["dp"])
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(F.dropout(x, 0.5).local_values() + torch.rand_like(x).local_values())
    for a, b in zip(*draws, strict=True):
        assert torch.equal(a, b)
    masks = draws[0][:8]
    assert not torch.equal(masks[0], masks[4])  # other devices along dp draw others
    assert all(torch.equal(masks[0], m) for m in masks[:4])
    assert torch.rand(3, device="xla").varying == ()


def test_in_a_compiled_step(mesh_2x4: DeviceMesh) -> None:
    value = torch.randn(8, 16)
    x = distribute_tensor(value, mesh_2x4, [Shard(0), Shard(1)])
    weight = torch.nn.Parameter(torch.randn(4, 4).to("xla"))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @xd.compile
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        local = x.to_local()
        y = local @ weight
        loss = DTensor.from_local(y.square().sum(), mesh_2x4, [Partial(), Partial()]).full_tensor()
        loss.backward()
        weight.grad = DTensor.from_local(
            weight.grad, mesh_2x4, [Partial(), Partial()]
        ).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        return loss, y

    reference = weight.detach().cpu().clone().requires_grad_()
    cut = parts(value, mesh_2x4, (Shard(0), Shard(1)))
    for _ in range(2):
        total = sum((p @ reference).square().sum() for p in cut)
        loss, y = step(x)
        check(y, [p @ reference.detach() for p in cut])
        torch.testing.assert_close(loss.cpu(), total.detach())
        (grad,) = torch.autograd.grad(total, reference)
        with torch.no_grad():
            reference -= 0.1 * grad
        torch.testing.assert_close(weight.detach().cpu(), reference.detach(), rtol=1e-4, atol=1e-4)
    assert len(step.compiled_programs()) == 1


ERRORS: dict[str, tuple[Callable[[Any, DeviceMesh], Any], type, str]] = {
    "cpu": (lambda x, m: x.cpu(), xd.PerDeviceValueError, "local_values"),
    "item": (lambda x, m: x.sum().item(), xd.PerDeviceValueError, "varies along"),
    "bool": (lambda x, m: bool(x.sum() > 0), xd.PerDeviceValueError, "varies along"),
    "nonzero": (lambda x, m: x.nonzero(), xd.PerDeviceValueError, "the shape of aten::nonzero"),
    "replicate": (
        lambda x, m: DTensor.from_local(x, m, [R, Shard(0)]),
        xd.UnsupportedOpError,
        r"along 'dp', where the placement is Replicate\(\).*run_check=True",
    ),
    "mixed": (
        lambda x, m: x + distribute_tensor(torch.ones(4, 4), m, [R, R]),
        xd.UnsupportedOpError,
        "one value per device, or a part of one value",
    ),
    "uneven": (
        lambda x, m: distribute_tensor(torch.ones(5, 4), m, [Shard(0), R]).to_local(),
        xd.UnsupportedOpError,
        "dim 0 of size 5 doesn't divide by 2",
    ),
    "shape": (
        lambda x, m: DTensor.from_local(x, m, [Shard(0), Shard(1)], shape=(9, 16), stride=(16, 1)),
        xd.UnsupportedOpError,
        "dim 0 of size 9 doesn't divide by 2",
    ),
    "other_shape": (
        lambda x, m: DTensor.from_local(
            x, m, [Shard(0), R], run_check=True, shape=(4, 4), stride=(4, 1)
        ),
        xd.PlacementError,
        r"would hold \[2, 4\], the local tensor is \[4, 4\]",
    ),
    "shape_alone": (
        lambda x, m: DTensor.from_local(x, m, [Shard(0), Shard(1)], shape=(8, 16)),
        RuntimeError,
        "both shape and stride",
    ),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_errors(mesh_2x4: DeviceMesh, name: str) -> None:
    function, kind, message = ERRORS[name]
    x = xd.from_device_values([torch.randn(4, 4) for _ in range(8)], mesh_2x4)
    with pytest.raises(kind, match=message):
        function(x, mesh_2x4)


def test_run_check_takes_coordinate_0(mesh_2x4: DeviceMesh) -> None:
    values = [torch.randn(4, 4) for _ in range(8)]
    x = xd.from_device_values(values, mesh_2x4)
    y = DTensor.from_local(x, mesh_2x4, [R, Shard(0)], run_check=True)
    torch.testing.assert_close(y.full_tensor().cpu(), torch.cat(values[:4]))


def test_repr(mesh_2x4: DeviceMesh) -> None:
    x = xd.from_device_values([torch.randn(4, 4) for _ in range(8)], mesh_2x4, ["tp"])
    assert repr(x) == (
        "XLATensor(shape=[4, 4], dtype=torch.float32, varying along tp, device='xla:0')"
    )


def test_repr_of_a_sharded_tensor_that_varies(mesh_2x4: DeviceMesh) -> None:
    own = xd.from_device_values([torch.ones(2), torch.zeros(2)], mesh_2x4["dp"])
    x = DTensor.from_local(own, mesh_2x4["tp"], [Shard(0)])
    assert "dtype=torch.float32, varying along dp, device_mesh=" in repr(x)
