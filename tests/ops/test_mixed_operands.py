"""Sharded tensors together with Python numbers, CPU tensors, 0-d tensors and per-device tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.ops.harness import close

R = Replicate()
DTYPES = [
    torch.bool,
    torch.int32,
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
NUMBERS: list[Any] = [-3, 0.5, True, 1.5 + 2j]
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "sub": operator.sub,
    "pow": operator.pow,
    "lt": operator.lt,
    "eq": operator.eq,
    "and": operator.and_,
}


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(1, 6, shape).to(dtype)


def same_as_cpu(function: Callable[..., Any], wanted_of: Any, actual_of: Any) -> None:
    """Both raise, or give the same dtype, shape and value."""
    try:
        wanted = function(*wanted_of)
    except NotImplementedError:
        return  # a kernel that the CPU lacks
    except RuntimeError:
        with pytest.raises(RuntimeError):
            function(*actual_of)
        return
    actual = function(*actual_of)
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
    close(actual.detach().cpu(), wanted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", list(OPERATORS))
def test_numbers(mesh_2x4: DeviceMesh, name: str) -> None:
    function = OPERATORS[name]
    for dtype in [*DTYPES[::2], torch.int64]:
        x = sample(dtype, 3, 4)
        sharded = distribute_tensor(x, mesh_2x4, [Shard(0), Shard(1)])
        for number in NUMBERS:
            if name == "pow" and dtype is torch.bool and number is True:
                continue  # torch's meta kernel, which decides here, says int64, the CPU's bool
            same_as_cpu(function, (x, number), (sharded, number))
            if number is not True and name not in ("pow", "mod", "lt", "eq"):
                same_as_cpu(function, (number, x), (number, sharded))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("zero_dim_dtype", DTYPES, ids=str)
def test_0d_tensors_promote_by_category(mesh_2x4: DeviceMesh, zero_dim_dtype: torch.dtype) -> None:
    scalar = sample(zero_dim_dtype)
    scalars = [scalar, distribute_tensor(scalar, mesh_2x4, [R, Partial()]), scalar.to("xla")]
    for i, dtype in enumerate(DTYPES):
        x = sample(dtype, 3, 4)
        sharded = distribute_tensor(x, mesh_2x4, [R, Shard(0)])
        if {dtype, zero_dim_dtype} == {torch.float16, torch.complex64}:
            continue  # complex32: XLA has no such type
        # The kinds in turn: each dtype meets two of them.
        same_as_cpu(torch.add, (x, scalar), (sharded, scalars[i % 3]))
        same_as_cpu(torch.mul, (scalar, x), (scalars[(i + 1) % 3], sharded))


def operands(mesh: DeviceMesh, value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same value in each of the forms that mix."""
    yield value
    yield value.to("xla")
    yield distribute_tensor(value, mesh, [Shard(0), R]).full_tensor()
    yield distribute_tensor(value, mesh, [R, Shard(0)])
    yield distribute_tensor(value, mesh, [Shard(0), Partial()])


MIXED: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "reversed_sub": lambda x, y: y - x,
    "matmul": lambda x, y: x @ y.t(),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([y, x]),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 1.5),
    "index_rows": lambda x, y: x[y[:, 0].abs().long()],
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "mul_": lambda x, y: x.clone().mul_(y),
    "add_row": lambda x, y: x.clone().add_(y[0]),
    "copy_": lambda x, y: x.clone().copy_(y),
    "set_rows": lambda x, y: _set_rows(x.clone(), y),
    "foreach": lambda x, y: torch._foreach_mul([x, x], [y, y])[1],
}


def _set_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[1:3] = y[1:3]
    return x


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", list(MIXED))
def test_tensors_of_other_kinds(mesh_2x4: DeviceMesh, name: str) -> None:
    function = MIXED[name]
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    want = function(x, y)
    sharded = distribute_tensor(x, mesh_2x4, [Shard(1), Shard(0)])
    for other in operands(mesh_2x4, y):
        if name == "foreach" and other.device.type == "cpu":
            continue  # torch itself asks foreach lists to be on one device
        result = function(sharded, other)
        assert type(result) is xd.XLAShardedTensor
        assert result.device_mesh == mesh_2x4
        close(result.cpu(), want, what=f"{type(other).__name__} on {other.device}")


@pytest.mark.parametrize("kind", range(1, 5))
def test_gradients_reach_operands_of_other_kinds(mesh_2x4: DeviceMesh, kind: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    (x.exp() * y).sin().sum().backward()
    sharded = distribute_tensor(x.detach(), mesh_2x4, [Shard(1), Shard(0)]).requires_grad_()
    other = list(operands(mesh_2x4, y.detach()))[kind].requires_grad_()
    (sharded.exp() * other).sin().sum().backward()
    assert sharded.grad is not None and other.grad is not None
    assert sharded.grad.placements == sharded.placements
    assert other.grad.device == other.device and other.grad.shape == other.shape
    assert x.grad is not None and y.grad is not None
    close(sharded.grad.cpu(), x.grad)
    close(other.grad.cpu(), y.grad)


def test_a_cpu_leaf_among_the_operands_is_refused(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(6, 4), mesh_2x4, [Shard(0), R])
    with pytest.raises(xd.UnsupportedOpError, match="requires grad"):
        x * torch.ones(4, requires_grad=True)


def test_operands_that_torch_refuses(mesh_2x4: DeviceMesh) -> None:
    for x in (torch.ones(6, 6), distribute_tensor(torch.ones(6, 6), mesh_2x4, [Shard(0), R])):
        with pytest.raises(RuntimeError, match="same dtype"):
            x @ x.double()
        with pytest.raises(RuntimeError, match="dtypes match"):
            x.index_put_((torch.tensor([0, 1]),), x[:2].double())
        with pytest.raises(RuntimeError, match="negative integer powers"):
            x.long() ** -1
        with pytest.raises(RuntimeError, match="Subtraction"):
            x.bool() - x.bool()
        with pytest.raises(RuntimeError):
            x + x[:4]


def test_copies_between_devices(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.zeros(6, 4), mesh_2x4, [Shard(0), R])
    value = torch.arange(24.0, dtype=torch.float64).view(4, 6).t()
    assert x.copy_(value) is x  # another dtype, another stride
    close(x.cpu(), value.float())
    host = torch.zeros(4, 6, dtype=torch.int32).t()
    host.copy_(x + 0.5)
    close(host, value.int())
    host[1:3].copy_(x[:2])  # between views
    close(host[1:3], value[:2].int())
    x[2].copy_(torch.tensor(7.0))  # broadcast
    close(x[2].cpu(), torch.full((4,), 7.0))
    close(x.cpu()[3], value[3].float())


def test_host_memory_may_change_after_a_copy(mesh_2x4: DeviceMesh) -> None:
    source = torch.ones(8, 8)
    x = distribute_tensor(source, mesh_2x4, [Shard(0), R])
    y = torch.zeros_like(x).copy_(source)
    z = torch.zeros_like(x).add_(source)
    host = x.cpu()
    source.zero_()
    x.add_(1)
    for tensor in (y, z):
        close(tensor.cpu(), torch.ones(8, 8))
    close(host, torch.ones(8, 8))
    host.zero_()
    close(x.cpu(), torch.full((8, 8), 2.0))


def test_a_cpu_tensor_cannot_take_an_in_place_result(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(6, 4), mesh_2x4, [Shard(0), R])
    host = torch.ones(6, 4)
    with pytest.raises(RuntimeError):
        host.add_(x)
    close(host, torch.ones(6, 4))


def test_full_tensor_is_a_copy(mesh_2x4: DeviceMesh) -> None:
    for placements in ([Shard(0), R], [R, R]):
        x = distribute_tensor(torch.ones(6, 4), mesh_2x4, placements)
        full = x.full_tensor()
        x.add_(1)
        close(full.cpu(), torch.ones(6, 4))
        full.mul_(5)
        close(x.cpu(), torch.full((6, 4), 2.0))


def test_redistribute_is_a_copy(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(6, 4), mesh_2x4, [Shard(0), R])
    for placements in ([Shard(0), R], [R, R], [R, Shard(1)]):
        y = x.redistribute(placements=placements)
        y.add_(1)
        close(x.cpu(), torch.ones(6, 4), what=f"source after a write to {placements}")
        close(y.cpu(), torch.full((6, 4), 2.0))
