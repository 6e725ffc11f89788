"""Modules that move between devices, against torch moving them to another dtype."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda model: model.to("xla"),
    "to_and_dtype": lambda model: model.to("xla", torch.float64).to(torch.float32),
    "back": lambda model: model.to("xla").cpu(),
    "there_and_back_again": lambda model: model.to("xla").cpu().to("xla"),
    "apply": lambda model: model._apply(lambda t: t.to("xla")),
}


class Tied(nn.Module):
    """One weight in three places, two of them modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.output = nn.Linear(4, 8, bias=False)
        self.output.weight = self.embedding.weight
        self.weight = self.embedding.weight
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(self.embedding(tokens)))


def train(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_training_with_tied_weights(move: Callable[[nn.Module], nn.Module], when: str) -> None:
    """An optimizer made before the move trains the parameters that moved."""
    torch.manual_seed(0)
    model = Tied()
    reference = Tied()
    reference.load_state_dict(model.state_dict())
    tokens = torch.arange(8).view(2, 4)
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=0.1), tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if when == "before" else None
    known = list(model.parameters())
    move(model)
    assert all(a is b for a, b in zip(model.parameters(), known, strict=True))
    assert model.output.weight is model.embedding.weight is model.weight
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
    device = model.weight.device
    assert type(model.weight) is nn.Parameter or isinstance(model.weight, nn.Parameter)
    # Sums of floats: torch compares Python numbers as if they were exact to 1e-7.
    losses = train(model, optimizer, tokens.to(device))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))


@pytest.mark.parametrize("held_by", ["weak_reference", "graph"])
def test_weights_stay_tied_where_the_object_cannot_be_kept(held_by: str) -> None:
    model = Tied()
    holder: Any
    if held_by == "graph":
        holder = model.weight * 2
    else:
        holder = weakref.ref(model.weight)
    model.to("xla")
    assert holder is not None
    assert len(list(model.parameters())) == 3
    assert model.output.weight is model.embedding.weight
    assert all(p.device.type == "xla" for p in model.parameters())


def test_gradients_and_marks_move_along() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    model.weight.mark = "sharded"  # type: ignore[assignment]
    model.bias.requires_grad_(False)
    expected = model.weight.grad
    for device in ("xla", "cpu", "xla"):
        model.to(device)
        assert model.weight.mark == "sharded"
        assert model.weight.grad is not None and model.weight.grad.device.type == device
        assert torch.equal(model.weight.grad.cpu(), expected)
        assert model.weight.requires_grad and not model.bias.requires_grad


def test_recurrent_weights(mesh_2x4: DeviceMesh) -> None:
    """``RNNBase`` keeps its weights in a list of its own, too."""
    torch.manual_seed(0)
    model = nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    expected = model(x)[0]
    model.to("xla")
    torch.testing.assert_close(model(x.to("xla"))[0].cpu(), expected)
    model.cpu()
    torch.testing.assert_close(model(x)[0], expected)


def test_in_a_compiled_step_between_moves() -> None:
    model = Tied().to("xla")
    step = xd.compile(lambda tokens: model(tokens).detach())
    tokens = torch.arange(4, device="xla")[None]
    first = step(tokens)
    model.cpu()
    with torch.no_grad():
        model.weight.mul_(2)
    expected = model(tokens.cpu())
    model.to("xla")
    torch.testing.assert_close(step(tokens).cpu(), expected.detach())
    assert not torch.equal(step(tokens), first)


@pytest.mark.parametrize("partition", ["none", "function", "one_place"])
def test_distribute_module_keeps_weights_tied(mesh_2x4: DeviceMesh, partition: str) -> None:
    def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if partition == "one_place" and not isinstance(module, nn.Embedding):
            return
        for key, p in list(module.named_parameters(recurse=False)):
            if not isinstance(p, xd.XLAShardedTensor):
                sharded = distribute_tensor(p.data, mesh, [Shard(0), Replicate()])
                module.register_parameter(key, nn.Parameter(sharded))

    model = Tied()
    if partition == "one_place":
        # The places that it leaves alone are replicated.
        with pytest.raises(ValueError, match=r"embedding\.weight.*one parameter"):
            xd.distribute_module(model, mesh_2x4, shard)
        return
    xd.distribute_module(model, mesh_2x4, shard if partition == "function" else None)
    assert model.output.weight is model.embedding.weight is model.weight
    assert len(list(model.parameters())) == 3
    wanted = (Shard(0), Replicate()) if partition == "function" else (Replicate(), Replicate())
    assert model.weight.placements == wanted


@pytest.mark.parametrize("move", ["double", "xla", "and back"])
def test_hooks_of_parameters_stay(move):
    moves = {
        "double": lambda m: m.double(),
        "xla": lambda m: m.to("xla"),
        "and back": lambda m: m.to("xla").cpu(),
    }
    model = nn.Linear(2, 2)
    optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    handles.append(model.bias.register_hook(lambda grad: grad * 3))
    before = model.bias.detach().clone()
    moves[move](model)
    model(torch.ones(1, 2).to(model.bias)).sum().backward()
    assert (model.bias.detach().cpu() - before).tolist() == pytest.approx([-3, -3])
    assert model.bias.grad is None
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 2).to(model.bias)).sum().backward()
    assert model.bias.grad.tolist() == [1, 1]
    assert (model.bias.detach().cpu() - before).tolist() == pytest.approx([-3, -3])


@pytest.mark.parametrize("hold", ["graph", "weak reference"])
def test_a_parameter_that_something_holds_is_a_new_one_to_all(hold):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    ran = []
    model[1].weight.register_hook(lambda grad: ran.append(1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    held = model(torch.ones(1, 2)) if hold == "graph" else weakref.ref(model[1].weight)
    del ran[:]
    before = [p.detach().clone() for p in model.parameters()]
    model.to("xla")
    assert [*optimizer.param_groups[0]["params"]] == [*model.parameters()]
    assert set(optimizer.state) == set(model.parameters()), held
    optimizer.load_state_dict(optimizer.state_dict())  # which takes the state along
    model(torch.ones(1, 2, device="xla")).sum().backward()
    optimizer.step()
    assert ran == [1]
    after = [p.detach().cpu() for p in model.parameters()]
    assert not any(map(torch.equal, before, after))


class _Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "parametrized": lambda model: nn.utils.parametrize.register_parametrization(
        model, "weight", _Doubled()
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("how", ["eager", "watched", "replayed"])
@pytest.mark.parametrize("place", ["xla", "mesh"])
def test_conversion_while_a_graph_holds_the_parameters(
    mesh_2x4: DeviceMesh, convert: Callable[[nn.Module], Any], how: str, place: str
) -> None:
    """Somebody keeps the last loss, with its history; training goes on as on the CPU."""

    def trained(place: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = nn.Linear(4, 4), torch.randn(8, 4)
        if place != "cpu":
            model.to("xla")
            x = x.to("xla")
        if place == "mesh":
            xd.distribute_module(model, mesh_2x4)
            x = distribute_tensor(x, mesh_2x4, [Shard(0), Replicate()])

        def function(x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        step = function
        if place != "cpu" and how != "eager":
            step = xd.compile(function, watch="replay" if how == "replayed" else "auto")
        losses = [step(x)]
        convert(model)
        x = x.to(model.bias.dtype)
        for _ in range(2):
            losses.append(step(x))
            losses[-1].backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad)
                    p.grad = None
        return [loss.detach().cpu() for loss in losses]

    for ours, expected in zip(trained(place), trained("cpu"), strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(torch.as_tensor(ours), expected)
