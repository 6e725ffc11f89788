"""Results of a compiled step whose backward pass is started outside: gradients as under torch."""

from __future__ import annotations

import dataclasses
import re
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


# --- values that are overwritten between forward and backward ------------------------------------


@torch.no_grad()
def in_place(tensor: torch.Tensor, compile: Compile) -> None:
    tensor.mul_(2)


@torch.no_grad()
def copied(tensor: torch.Tensor, compile: Compile) -> None:
    tensor.copy_(tensor * 2)  # what load_state_dict does


@torch.no_grad()
def through_a_view(tensor: torch.Tensor, compile: Compile) -> None:
    tensor[0].zero_()


def data_in_place(tensor: torch.Tensor, compile: Compile) -> None:
    tensor.data.mul_(2)


def data_assigned(tensor: torch.Tensor, compile: Compile) -> None:
    tensor.data = tensor.detach() * 2


def optimizer(tensor: torch.Tensor, compile: Compile, **options: Any) -> None:
    same = tensor.detach()  # a leaf that shares its version with the tensor
    same.grad = torch.ones_like(same)
    torch.optim.AdamW([same], lr=0.5, **options).step()


def fused_optimizer(tensor: torch.Tensor, compile: Compile) -> None:
    optimizer(tensor, compile, fused=True)


def compiled_optimizer(tensor: torch.Tensor, compile: Compile) -> None:
    same = tensor.detach()
    same.grad = torch.ones_like(same)
    adam = torch.optim.AdamW([same], lr=0.5)
    compile(lambda: adam.step())()


@torch.no_grad()
def donated(tensor: torch.Tensor, compile: Compile) -> None:
    same = tensor.detach()
    compile(lambda: same.mul_(2))()


@torch.no_grad()
def donated_argument(tensor: torch.Tensor, compile: Compile) -> None:
    compile(lambda t: t.mul_(2))(tensor.detach())


def only_read(tensor: torch.Tensor, compile: Compile) -> None:
    """A trace, and a run, that write nothing."""
    compile(lambda t: (t * tensor.detach()).sum())(tensor.detach())


def traced_only(tensor: torch.Tensor, compile: Compile) -> None:
    step = compile(lambda: tensor.detach().mul_(2))
    if isinstance(step, xd.CompiledStep):
        with torch.no_grad():
            step.lower()


WRITES: dict[str, Callable[[torch.Tensor, Compile], None]] = {
    f.__name__: f
    for f in (
        *(in_place, copied, through_a_view, data_in_place, data_assigned, optimizer),
        *(fused_optimizer, compiled_optimizer, donated, donated_argument, only_read, traced_only),
    )
}
# torch doesn't notice these (fused kernels on the CPU count no writes), and computes with the new
# value.
SILENT = {"data_in_place", "data_assigned", "fused_optimizer"}
USES: dict[str, Callable[..., torch.Tensor]] = {
    "needed": lambda x, w, b: (x * w * b).exp(),
    "through_a_residual": lambda x, w, b: ((x + 1) @ w.t() @ b.t()).exp(),
    "not_needed": lambda x, w, b: x + w + b,
}


def gradients(
    place: Place, compile: Compile, use: str, what: str, write: str
) -> list[torch.Tensor] | str:
    """The gradients after a value was overwritten, or the error that says so."""
    w, b = parameter(place, 0, 4, 4), place(numbers(1, 4, 4))
    x = place(numbers(2, 4, 4)).requires_grad_()
    step = compile(lambda x: USES[use](x, w, b))
    step(x)  # a call before, that nobody differentiates
    y = step(x)
    WRITES[write]({"weight": w, "input": x, "buffer": b, "result": y}[what], compile)
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert re.search("modified by an inplace operation|given other memory", str(error)), error
        return "modified"
    assert x.grad is not None and w.grad is not None
    return [x.grad.cpu(), w.grad.cpu()]


@pytest.mark.parametrize("what", ["weight", "input", "buffer", "result"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("use", USES)
@pytest.mark.one_in(3)
def test_overwritten_before_the_backward_pass(
    mesh_2x4: DeviceMesh, use: str, write: str, what: str
) -> None:
    expected = gradients(lambda t: t.clone(), lambda f: f, use, what, write)
    placed = lambda t: distribute_tensor(t, mesh_2x4, [Shard(0), Replicate()])
    actual = gradients(placed, xd.compile, use, what, write)
    if write in SILENT and actual == "modified":
        unwritten = gradients(lambda t: t.clone(), lambda f: f, use, what, "only_read")
        # Raising is for values that matter.
        assert not all(map(torch.equal, unwritten, expected))
    elif isinstance(expected, str) or isinstance(actual, str):
        assert actual == expected
    else:
        for ours, right in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


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


class OutputRecipes:
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
    step = xd.compile(lambda x: x * OutputRecipes().scale)
    assert step(x).sum().item() == 16.0
    monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    assert step(x).sum().item() == 24.0
