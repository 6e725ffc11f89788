"""``torch.amp.GradScaler`` in a compiled step: whether the optimizer steps is decided there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

Optimizers = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizers] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, 1e-2),
    "fused": lambda ps: torch.optim.AdamW(ps, 1e-2, fused=True),
    "one_by_one": lambda ps: torch.optim.AdamW(ps, 1e-2, foreach=False),
    "sgd": lambda ps: torch.optim.SGD(ps, 1e-2),
    "momentum": lambda ps: torch.optim.SGD(ps, 1e-2, momentum=0.9, nesterov=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, 1e-2),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 1e-2),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 1e-2),
}
# The calls in which a gradient overflows: in the first one there is no state yet.
OVERFLOWS = [(0, 2, 3), (1, 4)]


def training(
    optimizers: Optimizers, device: str, clips: bool, model: nn.Module | None = None
) -> tuple[nn.Module, Callable[[torch.Tensor], Any]]:
    torch.manual_seed(0)
    if model is None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = optimizers(model.parameters())
    scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2)

    def step(x: torch.Tensor) -> Any:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), scaler.get_scale()

    return model, step


def batches(overflows: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randn(8, 4, generator=generator) for _ in range(6)]
    for number in overflows:
        found[number][0, 0] = float("inf")
    return found


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), other.detach())


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("overflows", OVERFLOWS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name: str, overflows: tuple[int, ...], clips: bool) -> None:
    expected, step_on_cpu = training(OPTIMIZERS[name], "cpu", clips)
    model, step = training(OPTIMIZERS[name], "xla", clips)
    step = xd.compile(step)
    for x in batches(overflows):
        loss, scale = step(x.to("xla"))
        loss_on_cpu, scale_on_cpu = step_on_cpu(x)
        torch.testing.assert_close(loss.cpu(), loss_on_cpu, equal_nan=True)
        assert scale == scale_on_cpu
        assert_same(model, expected)
    # The scale is made before. Adagrad's step counts are one array in the first call alone.
    assert step.traces == (2 if name == "adagrad" else 1)


@pytest.mark.parametrize("overflows", OVERFLOWS)
def test_on_a_mesh(overflows: tuple[int, ...], mesh_2x4: DeviceMesh) -> None:
    expected, step_on_cpu = training(OPTIMIZERS["adamw"], "cpu", True)
    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for linear, layout in (
        (sharded[0], [Replicate(), Shard(0)]),
        (sharded[2], [Shard(1), Replicate()]),
    ):
        linear.weight = nn.Parameter(distribute_tensor(linear.weight, mesh_2x4, layout))
        linear.bias = nn.Parameter(distribute_tensor(linear.bias, mesh_2x4, [Replicate()] * 2))
    model, step = training(OPTIMIZERS["adamw"], "xla", True, sharded)
    step = xd.compile(step)
    for x in batches(overflows):
        _, scale = step(distribute_tensor(x, mesh_2x4, [Shard(0), Replicate()]))
        assert scale == step_on_cpu(x)[1]
        for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter.full_tensor().detach().cpu(), other.detach())


class _Counting(torch.optim.Optimizer):
    """Counts in Python."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.add_(p.grad, alpha=-0.1 / state["step"])


def _with_a_hook(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


REFUSED: dict[str, tuple[Optimizers, str]] = {
    "of_ones_own": (_Counting, "isn't one of torch's"),
    "with_hooks": (lambda ps: _with_a_hook(torch.optim.SGD(ps, 0.1)), "there are hooks"),
    "dampens": (lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, dampening=0.5), "makes state"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_undone_is_refused(name: str) -> None:
    optimizers, message = REFUSED[name]
    model, step = training(optimizers, "xla", False)
    before = [p.detach().cpu() for p in model.parameters()]
    with pytest.raises(xd.DataDependentError, match=message):
        xd.compile(step)(batches(())[0].to("xla"))
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), old, rtol=0, atol=0)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_scaler_that_is_switched_off(compiles: bool) -> None:
    parameter = nn.Parameter(torch.ones(2, device="xla"))
    optimizer = torch.optim.SGD([parameter], 0.5)
    scaler = torch.amp.GradScaler("xla", enabled=False)

    def step() -> None:
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    (xd.compile(step) if compiles else step)()
    assert parameter.tolist() == [0.5, 0.5]
    torch.amp.GradScaler("cpu", enabled=False).update()


def test_factors_that_are_set_between_calls() -> None:
    scalers = {device: torch.amp.GradScaler(device, init_scale=2.0) for device in ("cpu", "xla")}

    def training(device: str) -> Callable[[torch.Tensor], float]:
        parameter = nn.Parameter(torch.ones(2, device=device))
        optimizer = torch.optim.SGD([parameter], 0.5)
        scaler = scalers[device]

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            scaler.scale((parameter * x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            return scaler.get_scale()

        return step

    step, expected = xd.compile(training("xla")), training("cpu")
    x = torch.ones(2)
    for change in ("growth_interval", "growth_factor", "backoff_factor", None):
        assert step(x.to("xla")) == expected(x)
        value = {"growth_interval": 1, "growth_factor": 3.0, "backoff_factor": 0.25}.get(change)
        for scaler in scalers.values() if change else ():
            getattr(scaler, f"set_{change}")(value)
        x = x if change != "backoff_factor" else x / 0


def test_a_scaler_that_has_begun_outside() -> None:
    expected, step_on_cpu = training(OPTIMIZERS["momentum"], "cpu", False)
    model, step = training(OPTIMIZERS["momentum"], "xla", False)
    compiled = xd.compile(step)
    for number, x in enumerate(batches((1, 3))):
        (step if number in (0, 3) else compiled)(x.to("xla"))
        step_on_cpu(x)
        assert_same(model, expected)
    assert compiled.traces == 1


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_undone_is_replayed(name: str) -> None:
    """By default: torch decides then, by the value."""
    expected, step_on_cpu = training(REFUSED[name][0], "cpu", False)
    model, step = training(REFUSED[name][0], "xla", False)
    step = xd.compile(step, watch="auto")
    for x in batches((1,)):
        assert step(x.to("xla"))[1] == step_on_cpu(x)[1]
        assert_same(model, expected)
