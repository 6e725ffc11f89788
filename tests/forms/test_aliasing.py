"""Views and in-place writes on sharded tensors, against the same program on CPU torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

pytestmark = pytest.mark.one_in(2)  # each variant compiles programs of its own

Program = Callable[[torch.Tensor], object]

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: x[:, 1:3],
    "strided_slice": lambda x: x[1::2, ::3],
    "select": lambda x: x[2],
    "transpose": lambda x: x.t(),
    "view": lambda x: x.view(3, 2, 5),
    "flatten": lambda x: x.view(-1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "expand_of_one": lambda x: x.unsqueeze(0).expand(1, 6, 5),
    "diagonal": lambda x: x.diagonal(),
    "split": lambda x: x.split(4)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "unbind": lambda x: x.unbind(1)[3],
    "as_strided": lambda x: x.as_strided((2, 3), (7, 2), 1),
    "unfold": lambda x: x.unfold(0, 2, 2),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "view_of_view": lambda x: x.t()[1:4].unsqueeze(-1)[0],
    "view_of_view_of_view": lambda x: x.view(2, 15)[1].view(3, 5)[:, 2:],
}


def both(mesh: DeviceMesh, program: Program) -> None:
    """Run ``program`` on a (6, 5) tensor on the CPU and on the mesh; compare what it returns."""
    start = torch.arange(30.0).view(6, 5)
    placements = [Replicate()] * mesh.ndim
    placements[-1], placements[0] = Shard(1), Shard(0)
    expected = program(start.clone())
    actual = program(distribute_tensor(start, mesh, placements))
    for e, a in zip(expected, actual, strict=True):
        if isinstance(e, torch.Tensor):
            torch.testing.assert_close(a.detach().cpu(), e.detach())
            assert a.dtype == e.dtype
        else:
            assert a == e


@pytest.mark.parametrize("view", list(VIEWS))
def test_writes_go_both_ways(mesh_2x4: DeviceMesh, view: str) -> None:
    def program(x: torch.Tensor) -> list:
        v = VIEWS[view](x)
        before = v.clone()
        x.mul_(2)  # the view sees it
        seen = v.clone()
        v.add_(100)  # and so does the base
        v.copy_(v + torch.ones(v.shape))
        x[0] = -1
        return [before, seen, v, x, v.shape, v.stride(), v.storage_offset(), x._version]

    both(mesh_2x4, program)


@pytest.mark.parametrize("shape", ["8", "2x2x2", "1"])
def test_assignments(shape: str) -> None:
    from tests.conftest import make_mesh

    def program(x: torch.Tensor) -> list:
        x[:, 1:3] = torch.full((6, 2), 7.0)
        x[4] = x[0]
        x[1:3, 2:] *= -1
        x[x > 20] = 0
        x[torch.tensor([0, 5]), torch.tensor([1, 4])] = 9
        x.t()[0].zero_()
        x.masked_fill_(x == 7, 70).clamp_(max=60)
        row = x[3]
        row += 1
        return [x, row]

    both(make_mesh(shape), program)


def test_in_place_keeps_the_dtype(mesh_2x4: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> list:
        n = x.to(torch.int64)
        n.add_(1).mul_(3)
        n //= 2
        half = x.to(torch.bfloat16)
        half.add_(0.3)
        n[0] = 2.9
        return [n, half]

    both(mesh_2x4, program)


def test_out_arguments(mesh_2x4: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> list:
        out = torch.zeros_like(x)
        result = torch.add(x, x, out=out)
        torch.exp(x / 10, out=out[:]) if x.device.type == "cpu" else torch.exp(x / 10, out=out)
        return [out, result is out]

    both(mesh_2x4, program)


def test_gradients_through_writes_to_views(mesh_2x4: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> list:
        leaf = x.detach().clone().requires_grad_()
        y = leaf * 1
        y[1:3] *= leaf[3:5]
        y.t()[2] = leaf[:, 0] ** 2
        y.view(-1)[::7].sin_()
        (y * y).sum().backward()
        return [y, leaf.grad]

    both(mesh_2x4, program)


def test_as_strided_looks_at_memory(mesh_2x4: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> list:
        transposed = x.t().clone(memory_format=torch.preserve_format)
        part = x[2:, 1:]
        return [
            transposed.stride(),
            transposed.as_strided((4, 3), (7, 2), 1),
            part.as_strided((2, 2), (5, 1)),  # from the offset of the view
            part.as_strided((2, 2), (5, 1), 0),
            x.t()[1:].as_strided((3,), (2,)),
        ]

    both(mesh_2x4, program)


def test_autograd_notices_overwritten_values(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()]).requires_grad_()
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)
    parameter = nn.Parameter(x.detach().clone())
    with torch.no_grad():
        parameter.mul_(3)
        parameter[2:4] = 0
    assert parameter.tolist() == [3, 3, 0, 0, 3, 3, 3, 3]
    assert parameter._version == 2


def test_expanded_memory_can_not_be_written(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(4, 1), mesh_2x4, [Shard(0), Replicate()])
    with pytest.raises(RuntimeError):
        x.expand(4, 3).add_(1)


def test_data_can_be_assigned(mesh_2x4: DeviceMesh) -> None:
    parameter = nn.Parameter(distribute_tensor(torch.ones(8), mesh_2x4, [Replicate(), Shard(0)]))
    value = distribute_tensor(torch.arange(8.0), mesh_2x4, [Shard(0), Replicate()])
    parameter.data = value
    assert parameter.placements == value.placements
    value.mul_(2)  # one storage
    assert parameter.tolist() == [2.0 * i for i in range(8)]
    (parameter * parameter).sum().backward()
    assert parameter.grad.tolist() == [4.0 * i for i in range(8)]
    assert parameter.grad.placements == value.placements


def test_modules_convert_their_parameters(mesh_2x4: DeviceMesh) -> None:
    module = nn.Linear(4, 8)
    xd.distribute_module(module, mesh_2x4)
    expected = [p.detach().bfloat16().double() for p in nn.Linear(4, 8).parameters()]
    for parameter, value in zip(module.parameters(), expected, strict=True):
        parameter.data.copy_(value)
    module.bfloat16().double()
    for parameter, value in zip(module.parameters(), expected, strict=True):
        assert parameter.dtype is torch.float64
        assert torch.equal(parameter.detach().cpu(), value)
    assert all(
        type(p) is nn.Parameter and p.device.type == "cpu" for p in module.cpu().parameters()
    )


RESHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
    "squeeze_dims": lambda x: x.unsqueeze_(0).squeeze_((0, 1)),
    "as_strided_": lambda x: x.as_strided_((2, 3), (7, 2), 1),
    "resize_less": lambda x: x.resize_(2, 3),
    "resize_as_": lambda x: x.resize_as_(torch.empty(5, 6, device=x.device)),
    "set_": lambda x: x.set_(x[1:3, 1:]),
    "set_strided": lambda x: x.set_(x, 3, (2, 4), (10, 1)),
}


@pytest.mark.parametrize("name", list(RESHAPES))
def test_a_tensor_that_changes_shape(mesh_2x4: DeviceMesh, name: str) -> None:
    """It stays a view of the same memory, and other views of it stay what they were."""

    def program(x: torch.Tensor) -> list:
        before = x.view(-1)
        same = RESHAPES[name](x)
        x.add_(100)
        before[4] = -1.0
        return [same is x, tuple(x.shape), x.stride(), x.storage_offset(), x, before, before.shape]

    both(mesh_2x4, program)


def test_resize_to_more(mesh_2x4: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> list:
        y = x.clone()
        y.resize_(8, 7).view(-1)[30:] = 7.0
        empty = torch.empty_like(x).resize_(0)
        empty.resize_(4, 2).copy_(x[:4, :2])
        nothing = x.clone().set_()
        return [y, empty, nothing.shape]

    both(mesh_2x4, program)
    x = distribute_tensor(torch.ones(4, 1), mesh_2x4, [Shard(0), Replicate()])
    view = x[1:]
    with pytest.raises(xd.UnsupportedOpError, match=r"share the memory.*make a new tensor"):
        x.resize_(8, 2)
    assert view.shape == (3, 1)
    with pytest.raises(xd.UnsupportedOpError, match=r"use x\.set_\(other_tensor\)"):
        x.set_(torch.ones(3).untyped_storage())


def test_changed_shape_in_autograd(mesh_2x4: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> list:
        x.requires_grad_()
        y = x * x
        version = y._version
        y.t_().unsqueeze_(0)
        (y * torch.arange(5.0, device=x.device)[:, None]).sum().backward()
        return [x.grad, y._version > version, y.grad_fn is not None]

    both(mesh_2x4, program)


def test_changed_shape_in_a_compiled_step(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.arange(6.0).view(2, 3), mesh_2x4, [Shard(0), Replicate()])
    step = xd.compile(lambda x: (x * 2).t_().unsqueeze_(0))
    assert step(x).shape == (1, 3, 2)
    torch.testing.assert_close(step(x).cpu(), torch.arange(6.0).view(2, 3).t()[None] * 2)
    with pytest.raises(xd.UnsupportedOpError, match="from outside of it"):
        xd.compile(lambda x: x.t_())(x)
    assert x.shape == (2, 3)


@pytest.mark.parametrize("shape", [(0,), (2, 2), (6, 5)])
def test_out_is_resized(mesh_2x4: DeviceMesh, shape: tuple[int, ...]) -> None:
    def program(x: torch.Tensor) -> list:
        out = torch.empty(shape, device=x.device)
        result = torch.mul(x, 3, out=out)
        values, indices = torch.empty(0, device=x.device), torch.empty(0, device=x.device).long()
        torch.sort(x, 1, True, out=(values, indices))
        return [out, result is out, values, indices]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "An output with one or more elements was resized")
        both(mesh_2x4, program)


def test_unsafe_views_are_views(mesh_2x4: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> list:
        x.unsafe_split(2)[1].zero_()
        x.unsafe_chunk(2, 1)[0].add_(1)
        torch.ops.aten._unsafe_view(x, [30])[3] = 50.0
        return [x]

    both(mesh_2x4, program)


def test_filling_an_expanded_tensor(mesh_2x4: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> list:
        x[0].expand(3, 5).fill_(4)
        x[:, :1].expand(2, 6, 5).zero_()
        return [x]

    both(mesh_2x4, program)
    x = distribute_tensor(torch.ones(4, 1), mesh_2x4, [Shard(0), Replicate()])
    with pytest.raises(RuntimeError, match="single memory location"):
        x.expand(4, 3).add_(1)


def test_complex_views(mesh_2x4: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> list:
        pairs = x[:, :4].reshape(6, 2, 2).contiguous()
        z = torch.view_as_complex(pairs)
        z *= 1j
        torch.view_as_real(z)[..., 0] += 1
        return [pairs, z, z.real, z.imag, z.conj() * z]

    both(mesh_2x4, program)


def test_inference_mode(mesh_2x4: DeviceMesh) -> None:
    def program(x: torch.Tensor) -> list:
        with torch.inference_mode():
            y = x * 2
            y[0].add_(1)
            row = x[1]  # an ordinary tensor
            row.mul_(3)
            kinds = [y.is_inference(), y[0].is_inference(), row.is_inference(), x.is_inference()]
        # Views of it are as it is, wherever they are made.
        for view in (y[0], y.view(-1), y.t(), y.view_as(y), y.split(1)[0]):
            kinds += [view.is_inference(), view._is_view()]
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                view.add_(1)
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            y.add_(1)
        with pytest.raises(RuntimeError, match="do not track version counter"):
            assert y._version
        z = x.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            z * y
        return [y, row, x, x._version, *kinds]

    both(mesh_2x4, program)
