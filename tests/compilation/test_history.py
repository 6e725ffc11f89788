"""Results of a compiled step whose backward pass is started outside: gradients as under torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

Place = Callable[[torch.Tensor], torch.Tensor]
Compile = Callable[..., Any]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameter(place: Place, seed: int, *shape: int) -> nn.Parameter:
    return nn.Parameter(place(numbers(seed, *shape)))


def skip_connection(place: Place, compile: Compile) -> list[Any]:
    """Two arguments, of which one is computed from the other."""
    w = parameter(place, 0, 4, 4)
    head = compile(lambda h, more: (h @ w * more).sum())
    x = place(numbers(1, 8, 4)).requires_grad_()
    for _ in range(2):
        h = x * 2
        head(h, h.tanh()).backward()
    return [x.grad, w.grad]


def view_of_the_other_argument(place: Place, compile: Compile) -> list[Any]:
    f = compile(lambda a, b: (a[:, :2] * b).sum())
    x = place(numbers(1, 8, 4)).requires_grad_()
    f(x, x[:, :2]).backward()
    return [x.grad]


def cell_used_again(place: Place, compile: Compile) -> list[Any]:
    w = parameter(place, 0, 4, 4)
    cell = compile(lambda h: torch.tanh(h @ w))
    h = place(numbers(1, 8, 4))
    for _ in range(3):
        h = cell(h)
    h.sum().backward()
    return [w.grad]


def unused_result(place: Place, compile: Compile) -> list[Any]:
    a, b = parameter(place, 0, 4, 4), parameter(place, 1, 4, 4)
    f = compile(lambda x: (x @ a, x @ b))
    for _ in range(2):
        f(place(numbers(2, 8, 4)))[0].sum().backward()
    return [a.grad, b.grad]


def parameter_returned(place: Place, compile: Compile) -> list[Any]:
    w = parameter(place, 0, 4, 4)
    f = compile(lambda x: ((x @ w).sum(), w))
    loss, same = f(place(numbers(1, 8, 4)))
    (loss + same.square().sum()).backward()
    return [w.grad, same is w]


def result_written(place: Place, compile: Compile) -> list[Any]:
    w = parameter(place, 0, 4, 4)
    f = compile(lambda x: x @ w)
    y = f(place(numbers(1, 8, 4)))
    y += 1
    y.square().sum().backward()
    return [w.grad]


def one_tensor_twice(place: Place, compile: Compile) -> list[Any]:
    w = parameter(place, 0, 4, 4)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x @ w
        return [y, y]

    first, second = compile(function)(place(numbers(1, 8, 4)))
    (first.sum() + second.square().sum()).backward()
    return [w.grad, first is second]


PROGRAMS = (
    *(skip_connection, view_of_the_other_argument, cell_used_again, unused_result),
    *(parameter_returned, result_written, one_tensor_twice),
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_as_torch(mesh_2x4: DeviceMesh, program: Callable[[Place, Compile], list[Any]]) -> None:
    expected = program(lambda t: t.clone(), lambda f: f)
    placed = lambda t: distribute_tensor(t, mesh_2x4, [Shard(0), Replicate()])
    for actual, right in zip(program(placed, xd.compile), expected, strict=True):
        if isinstance(right, torch.Tensor):
            torch.testing.assert_close(actual.cpu(), right, rtol=1e-4, atol=1e-5)
        else:
            assert actual is right or actual == right


def test_a_second_derivative_is_refused(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()]).requires_grad_()
    y = xd.compile(lambda x: x.pow(3).sum())(x)
    with pytest.raises(RuntimeError, match="create_graph=True goes through a compiled step"):
        torch.autograd.grad(y, x, create_graph=True)


def test_a_second_backward_needs_the_graph(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()]).requires_grad_()
    f = xd.compile(lambda x: x.pow(2).sum())
    y = f(x)
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad is not None and x.grad.cpu().tolist() == [4.0] * 8
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


class Bag(dict):
    """A dict that torch's pytree doesn't know."""


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale = 2.0

    def scaled(self) -> torch.Tensor:
        return self.x * self.scale


class Made:
    """Made inside of a step; reads a global when it is."""

    def __init__(self) -> None:
        self.scale = SCALE


SCALE = 2.0


def test_arguments_of_classes_of_ones_own(
    mesh_2x4: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()])
    step = xd.compile(lambda bag: bag["x"] * bag["n"])
    assert step(Bag(x=x, n=2.0)).sum().item() == 16.0
    assert step(Bag(x=x * 2, n=3.0)).sum().item() == 48.0
    scaled = xd.compile(lambda batch: batch.scaled())
    assert scaled(Batch(x)).sum().item() == 16.0
    monkeypatch.setattr(Batch, "scale", 3.0)
    assert scaled(Batch(x)).sum().item() == 24.0


def test_what_a_constructor_reads(mesh_2x4: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()])
    step = xd.compile(lambda x: x * Made().scale)
    assert step(x).sum().item() == 16.0
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    assert step(x).sum().item() == 24.0
