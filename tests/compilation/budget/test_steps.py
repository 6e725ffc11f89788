"""Compiled steps under a memory budget of activation checkpointing, against CPU torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.conftest import make_mesh

WIDTH, BATCH = 16, 64
BUDGETS = (0.5, 0)

Loss = Callable[[nn.Module, Any], Any]


@contextmanager
def budget(value: float) -> Iterator[None]:
    with functorch.patch(activation_memory_budget=value):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))).sin())


class Stack(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Norms(nn.Module):
    """Statistics that the forward pass moves, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.clone().mul_(2)


def plain(model: nn.Module, x: Any) -> Any:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def twice(model: nn.Module, x: Any) -> Any:
    """Gradients of two batches added up."""
    return plain(model, x) + plain(model, x.sin())


def through_one_graph(model: nn.Module, x: Any) -> Any:
    y = model(x)
    first, second = y.square().mean(), y.sin().sum() / 100
    first.backward(retain_graph=True)
    second.backward()
    return first + second


def of_gradients(model: nn.Module, x: Any) -> Any:
    """The second pass goes through the first."""
    loss = model(x).square().mean()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(g.square().sum() for g in grads)
    (loss + penalty).backward()
    return loss


def with_checkpoints(model: nn.Module, x: Any) -> Any:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    loss = x.square().mean()
    loss.backward()
    return loss


def with_a_loop(model: nn.Module, x: Any) -> Any:
    for block in model.blocks:
        x = block(x)
    with xd.scan_layers():
        for block in model.blocks:
            x = block(x)
    loss = x.square().mean()
    loss.backward()
    return loss


def in_the_step(model: nn.Module, x: Any) -> Any:
    """The setting is changed by the step itself."""
    with functorch.patch(activation_memory_budget=functorch.activation_memory_budget / 2):
        return plain(model, x)


def without_a_loop(model: nn.Module, x: Any) -> Any:
    return plain(model, model(x))


ON_CPU: dict[Loss, Loss] = {with_a_loop: without_a_loop, in_the_step: plain}

CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "stack": (Stack, plain),
    "statistics": (Norms, plain),
    "two passes": (Stack, twice),
    "one graph twice": (Stack, through_one_graph),
    "gradients of gradients": (Stack, of_gradients),
    "checkpoints": (Stack, with_checkpoints),
    "a loop": (Stack, with_a_loop),
    "patched in the step": (Stack, in_the_step),
}


def trained(model: nn.Module, loss: Loss, x: Any, compiled: bool) -> tuple[list[float], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        found = loss(model, x)
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    run = xd.compile(step) if compiled else step
    return [run(x).item() for _ in range(3)], run


def on_mesh(model: nn.Module, layout: str) -> tuple[nn.Module, Any, list[Any]]:
    mesh = make_mesh("2x4")
    model = copy.deepcopy(model)
    if layout == "fully_shard":
        for part in (*model.children(), model):
            if not isinstance(part, nn.ModuleList):
                xd.fully_shard(part, mesh=mesh["tp"])
        return model, mesh["tp"], [Shard(0)]
    distribute_module(model, mesh, _cut if layout == "tp" else None)
    return model, mesh, [Shard(0), Replicate()]


def _cut(name: str, module: nn.Module, mesh: Any) -> None:
    """The columns of the first product, the rows of the second."""
    for key, value in list(module.named_parameters(recurse=False)):
        dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
        dim = dims.get(f"{name.rpartition('.')[2]}.{key}")
        placements = [Replicate(), Replicate() if dim is None else Shard(dim)]
        module.register_parameter(
            key, nn.Parameter(distribute_tensor(value.data, mesh, placements))
        )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *((case, "dp") for case in CASES),
        *(("stack", "tp"), ("two passes", "tp")),
        *(("stack", "fully_shard"), ("statistics", "fully_shard")),
    ],
)
def test_trains_as_cpu_torch(case: str, layout: str) -> None:
    make, loss = CASES[case]
    torch.manual_seed(0)
    model, x = make(), torch.randn(BATCH, WIDTH)
    reference = copy.deepcopy(model)
    expected, _ = trained(reference, ON_CPU.get(loss, loss), x, False)
    for value in BUDGETS:
        own, mesh, placements = on_mesh(model, layout)
        with budget(value):
            losses, _ = trained(own, loss, distribute_tensor(x, mesh, placements), True)
        assert losses == pytest.approx(expected, rel=2e-5), value
        for name, theirs in reference.state_dict().items():
            mine: Any = own.state_dict()[name]
            mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
            torch.testing.assert_close(mine.cpu(), theirs, rtol=2e-4, atol=2e-5)


def test_the_same_bits() -> None:
    """What is computed again has the bits of the first time, dropout's masks, too."""

    def losses(value: float) -> list[float]:
        torch.manual_seed(0)
        model, mesh, placements = on_mesh(nn.Sequential(Block(), nn.Dropout(0.5), Block()), "dp")
        x = distribute_tensor(torch.randn(BATCH, WIDTH), mesh, placements)
        torch.manual_seed(1)
        with budget(value):
            return trained(model, plain, x, True)[0]

    assert losses(1) == losses(0.5) == losses(0)


def test_another_budget_is_another_program() -> None:
    """And the first one again, when it comes back."""
    model, mesh, placements = on_mesh(Stack(3), "dp")
    x = distribute_tensor(torch.randn(BATCH, WIDTH), mesh, placements)
    step = xd.compile(lambda x: plain(model, x).detach())
    for value, programs in ((1, 1), (0.25, 2), (0.25, 2), (1, 2), (0.8, 3), (0.25, 3)):
        with budget(value):
            model.zero_grad()
            step(x)
        assert len(step.compiled_programs()) == programs
    tanhs = [program.as_text().count(" tanh(") for program in step.compiled_programs()]
    assert sorted(tanhs)[0] < sorted(tanhs)[-1]


def test_no_budget() -> None:
    model, mesh, placements = on_mesh(Stack(1), "dp")
    x = distribute_tensor(torch.randn(BATCH, WIDTH), mesh, placements)
    step = xd.compile(lambda x: plain(model, x).detach())
    with budget(1.5), pytest.raises(ValueError, match=r"activation_memory_budget is 1\.5"):
        step(x)
    assert step(x).item() > 0  # as if nothing had been


def test_replayed_steps() -> None:
    """Have no trace in which to choose."""
    model, mesh, placements = on_mesh(Stack(1), "dp")
    x = distribute_tensor(torch.randn(BATCH, WIDTH), mesh, placements)
    step = xd.compile(lambda x: plain(model, x).detach(), watch="replay")
    with budget(0.5), pytest.raises(xd.UnsupportedOpError, match=r"_budget with watch=.replay"):
        step(x)
    model.zero_grad()
    assert step(x).item() > 0


def test_bytes_between_forward_and_backward() -> None:
    """Of a step whose result has a history: what its first program saves for the second."""
    torch.manual_seed(0)
    model, x = Stack(3), torch.randn(BATCH, WIDTH)
    plain(model, x)
    expected = [p.grad for p in model.parameters()]
    saved = []
    for value in (1, 0.5, 0):
        own, mesh, placements = on_mesh(model, "dp")
        own.zero_grad()
        batch = distribute_tensor(x, mesh, placements)
        step = xd.compile(lambda x, own=own: own(x).square().mean())
        with budget(value):
            loss = step(batch)
        (program,) = step.compiled_programs()
        saved.append(program.memory_analysis().output_size_in_bytes)
        loss.backward()
        for mine, theirs in zip(own.parameters(), expected, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor().cpu(), theirs)
        with torch.no_grad():
            next(own.parameters()).mul_(2)
        with budget(value):
            loss = step(batch)
        with torch.no_grad():
            next(own.blocks[1].parameters()).mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            loss.backward()
    assert saved[0] > 1.5 * saved[1] > 1.5 * saved[2]


def test_blocks_of_a_fixed_order() -> None:
    """``reproducible = "across meshes"`` has the same bits with a budget on other devices, too."""
    found = []
    for devices in (8, 2):
        torch.manual_seed(0)
        model = Stack(2)
        mesh = xd.init_device_mesh("xla", (devices,))
        distribute_module(model, mesh)
        x = distribute_tensor(torch.randn(BATCH, WIDTH), mesh, [Shard(0)])
        with xd.config.override(reproducible="across meshes"), budget(0.3):
            found.append(trained(model, plain, x, True)[0])
    assert found[0] == found[1]


def test_layouts_of_each_operation() -> None:
    """``layouts="torch"`` has them by operation, not chosen over the step."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(BATCH, WIDTH)
    expected = plain(model, x).item()
    own, mesh, placements = on_mesh(model, "tp")
    step = xd.compile(lambda x: plain(own, x).detach(), layouts="torch")
    with budget(0):
        loss = step(distribute_tensor(x, mesh, placements))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
