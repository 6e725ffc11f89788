"""Hyperparameters, random numbers and recompilation."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.compilation.test_state import assert_same_parameters, batches, twin_models

SCHEDULERS = {
    "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6),
    "warmup": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda i: (i + 1) / 5),
    "one_cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=8),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-3, weight_decay=0.1),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-3, foreach=True),
}


@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_schedules_do_not_recompile(mesh_2x4: DeviceMesh, optimizer: str, scheduler: str) -> None:
    """Also OneCycleLR, which changes the momentum and the betas."""
    reference, model = twin_models(mesh_2x4)

    def step_of(m: nn.Module):
        opt = OPTIMIZERS[optimizer](m.parameters())

        def step(x: torch.Tensor) -> None:
            m(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()

        return step, SCHEDULERS[scheduler](opt)

    reference_step, reference_schedule = step_of(reference)
    step, schedule = step_of(model)
    compiled = xd.compile(step)
    for x, dx in batches(mesh_2x4, 5):
        reference_step(x)
        compiled(dx)
        reference_schedule.step()
        schedule.step()
    assert_same_parameters(reference, model)
    # Momentum starts as the first gradient, so SGD's first step is a program of its own.
    assert compiled.compilations == (2 if optimizer == "sgd" else 1)


def test_fused_optimizer_takes_the_learning_rate_as_input(mesh_2x4: DeviceMesh) -> None:
    reference, model = twin_models(mesh_2x4)
    steps = []
    for m in (reference, model):
        opt = torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3, fused=True)

        def step(x: torch.Tensor, m: nn.Module = m, opt: torch.optim.Optimizer = opt) -> None:
            m(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()

        steps.append((step, opt))
    compiled = xd.compile(lambda x: steps[1][0](x))
    for i, (x, dx) in enumerate(batches(mesh_2x4, 4)):
        for _, opt in steps:
            opt.param_groups[0]["lr"] = 0.1 / (i + 1)
        steps[0][0](x)
        compiled(dx)
    assert_same_parameters(reference, model)
    assert compiled.compilations == 1


def test_a_hyperparameter_that_changes_the_code_path(mesh_2x4: DeviceMesh) -> None:
    reference, model = twin_models(mesh_2x4)
    optimizers = []

    def step_of(m: nn.Module):
        opt = torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1)
        optimizers.append(opt)

        def step(x: torch.Tensor) -> None:
            m(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()

        return step

    reference_step, step = step_of(reference), xd.compile(step_of(model))
    for decay, (x, dx) in zip((0.1, 0.2, 0.0, 0.3), batches(mesh_2x4, 4), strict=True):
        for opt in optimizers:
            opt.param_groups[0]["weight_decay"] = decay
        reference_step(x)
        step(dx)
    assert_same_parameters(reference, model)
    assert step.compilations == 2
    assert "SGD.param_groups[0]['weight_decay'] != 0" in step.recompilations[0]


def test_random_numbers_are_fresh_and_reproducible(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(64, 8), mesh_2x4, [Shard(0), Replicate()])

    def draw(t: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(t, 0.5) + torch.rand_like(t)

    compiled = xd.compile(draw)
    torch.manual_seed(3)
    first = [compiled(x).cpu() for _ in range(3)]
    torch.manual_seed(3)
    again = [compiled(x).cpu() for _ in range(3)]
    torch.manual_seed(3)
    eager = [draw(x).cpu() for _ in range(3)]
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
    for a, b, c in zip(first, again, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(a, c, rtol=0, atol=0)
    assert compiled.compilations == 1


def test_random_state_can_be_saved_and_restored(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(16), mesh_2x4, [Shard(0), Replicate()])
    step = xd.compile(lambda t: torch.rand_like(t))
    step(x)
    state = torch.xla.get_rng_state()
    first = step(x).cpu()
    torch.xla.set_rng_state(state)
    assert torch.equal(step(x).cpu(), first)


def test_recompilations_are_counted_and_explained(
    mesh_2x4: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    xd.distribute_module(model, mesh_2x4)
    step = xd.compile(lambda x, flag=True, **kw: model(x).sum())

    def batch(n: int, dtype: torch.dtype = torch.float32, placement=None) -> torch.Tensor:
        return distribute_tensor(
            torch.ones(n, 4, dtype=dtype), mesh_2x4, [placement or Shard(0), Replicate()]
        )

    with caplog.at_level(logging.WARNING, "xla_dtensor"):
        step(batch(8))
        step(batch(8))
        assert (step.compilations, step.recompilations) == (1, [])
        step(batch(16))
        step(batch(8))
        assert step.compilations == 2
        step(batch(8, placement=Replicate()))
        step(batch(8, placement=Replicate()), False)
        model.eval()
        step(batch(8, placement=Replicate()), False)
    assert step.compilations == 4 or step.compilations == 5
    mesh_free = [line.replace(", dtype=torch.float32", "") for line in step.recompilations]
    assert mesh_free[0] == (
        "argument [0]: from [8, 4] torch.float32 [Shard(dim=0), Replicate()] to "
        "[16, 4] torch.float32 [Shard(dim=0), Replicate()]"
    )
    assert mesh_free[1] == (
        "argument [0]: from [8, 4] torch.float32 [Shard(dim=0), Replicate()] to "
        "[8, 4] torch.float32 [Replicate(), Replicate()]"
    )
    assert mesh_free[-1] == "model.0.training: from True to False"
    assert sum("recompiled" in record.message for record in caplog.records) == len(mesh_free)


def test_a_zero_and_its_negative_are_different_arguments() -> None:
    step = xd.compile(lambda x, by: x / by)
    x = torch.ones(2, device="xla")
    assert step(x, 0.0).cpu().tolist() == [float("inf")] * 2
    assert step(x, -0.0).cpu().tolist() == [-float("inf")] * 2
