"""Training under random changes between steps: what the user freezes, loads, sets and clears, in
eager and compiled steps, with `xd.parallel.zero` and sharding in place; the numbers are CPU
torch's."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor as xd
import xla_dtensor.compat.torch_xla.distributed.spmd as xs
from tests.parallel.harness import EPS

STEPS = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 5)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(self.up(x))) * self.scale.clone()
        if self.training:
            self.scale.mul_(0.9)
        return self.down(h)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.AdamW(p, lr=0.02, eps=EPS),
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=0.02, eps=EPS, foreach=False),
]


def saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def larger(model: nn.Module) -> dict[str, Any]:
    return {name: value * 1.05 for name, value in model.state_dict().items()}


# What is done to a model, its optimizer, and one of its parameters.
CHANGES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "freeze": lambda m, o, p: p.requires_grad_(not p.requires_grad),
    "rate": lambda m, o, p: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.7),
    "decay": lambda m, o, p: o.param_groups[0].update(weight_decay=0.05),
    "no gradients": lambda m, o, p: o.zero_grad(),
    "gradients of 0": lambda m, o, p: o.zero_grad(set_to_none=False),
    "mode": lambda m, o, p: m.train(not m.training),
    "value": lambda m, o, p: p.data.mul_(1.1),
    "optimizer's state": lambda m, o, p: o.load_state_dict(saved(o.state_dict())),
    "model's state": lambda m, o, p: m.load_state_dict(larger(m)),
    "no gradient": lambda m, o, p: setattr(p, "grad", None),
    "other gradient": lambda m, o, p: p.grad is not None and p.grad.mul_(0.5),
    "no state": lambda m, o, p: o.state.pop(p, None),
}
SPECS: list[tuple[Any, Any]] = [(0, None), (None, 1), ((0, 1), None), (None, None), (1, 0)]


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    if getattr(tensor, "varying", ()):
        return torch.stack(tensor.local_values()).mean(0)
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


def check(model: nn.Module, expected: nn.Module, said: str) -> None:
    for (name, wanted), found in zip(expected.named_parameters(), model.parameters(), strict=True):
        about = {"atol": 5e-4, "rtol": 1e-2, "msg": lambda text, n=name: f"{n} {said}: {text}"}
        torch.testing.assert_close(whole(found), wanted.detach(), **about)
        assert (wanted.grad is None) == (found.grad is None), f"{name} {said}"
        if wanted.grad is not None:
            torch.testing.assert_close(whole(found.grad), wanted.grad, **about)


def step_of(model: nn.Module, optimizer: Any) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["marks", "zero", "zero and replicate"])
def test_changes_between_steps(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    mesh = xs.Mesh(range(8), (2, 4), ("dp", "tp"))
    expected = Model()
    model: Any = copy.deepcopy(expected)
    if kind == "zero":
        model = xd.distribute_module(model, mesh)
    elif kind == "marks":
        model = model.to("xla")
    else:
        model = xd.replicate(model.to("xla"), mesh=mesh["dp"])
    make = draw.choice(OPTIMIZERS)
    optimizer, on_cpu = make(model.parameters()), make(expected.parameters())
    if kind != "marks":
        xd.parallel.zero(optimizer, mesh["dp"], stage=1 + seed % 2)
    step, wanted = step_of(model, optimizer), step_of(expected, on_cpu)
    compiled = xd.compile(step)
    names = [name for name, _ in expected.named_parameters()]
    done: list[str] = []
    for _ in range(STEPS):
        for name in draw.choices([*CHANGES], k=draw.randint(0, 2)):
            one = draw.choice(names)
            done.append(f"{name} of {one}")
            for m, o in ((model, optimizer), (expected, on_cpu)):
                CHANGES[name](m, o, m.get_parameter(one))
        if kind == "marks":
            parameter, spec = model.get_parameter(draw.choice(names)), draw.choice(SPECS)
            if draw.random() < 0.3:
                xs.clear_sharding(parameter)
            else:
                xs.mark_sharding(parameter, mesh, spec[: parameter.ndim])
        x = torch.randn(draw.choice([8, 16]), 8)
        run = draw.choice([step, step, compiled])
        done.append("a compiled step" if run is compiled else "a step")
        if kind == "zero":
            placed = xd.distribute_tensor(x, mesh, [xd.Shard(0), xd.Replicate()])
        elif kind == "marks":
            placed = x.to("xla")
        else:
            placed = xd.from_device_values(list(x.chunk(2)), mesh["dp"])
        torch.testing.assert_close(whole(run(placed)), wanted(x), atol=3e-4, rtol=1e-3)
        check(model, expected, f"after {done}")
