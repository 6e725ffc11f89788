"""Hyperparameters, random numbers and recompilation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import lr_scheduler

import xla_dtensor as xd
from tests.compilation.test_state import assert_same_parameters, batches, twin_models
from xla_dtensor.base.numbers import number_functions, valueless_number

SCHEDULERS = {
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 6),
    "warmup": lambda opt: lr_scheduler.LambdaLR(opt, lambda i: (i + 1) / 5),
    "one_cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=8),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-3, weight_decay=0.1),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-3, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-3, fused=True),
}


@pytest.mark.one_in(2)
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
    assert compiled.compilations == 1, compiled.recompilations


class CountingLR(lr_scheduler.StepLR):
    """A user's own, which goes on to its base class's ``step``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.count = 0
        super().__init__(optimizer, 2, gamma=0.5)

    def step(self, epoch: int | None = None) -> None:
        self.count += 1
        super().step(epoch)


IN_THE_STEP = {
    "step": lambda opt: lr_scheduler.StepLR(opt, 2, gamma=0.5),
    "multi_step": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3], gamma=0.5),
    "constant": lambda opt: lr_scheduler.ConstantLR(opt, 0.5, total_iters=2),
    "linear": lambda opt: lr_scheduler.LinearLR(opt, 0.2, total_iters=3),
    "exponential": lambda opt: lr_scheduler.ExponentialLR(opt, 0.7),
    "polynomial": lambda opt: lr_scheduler.PolynomialLR(opt, 4, power=2.0),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4),
    "restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda i: (i + 1) / 5),
    "multiplicative": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda i: 1 / i),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=2),
    "one_cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=8),
    "sequential": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [
            lr_scheduler.LinearLR(opt, 0.2, total_iters=2),
            lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
        ],
        milestones=[2],
    ),
    "chained": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(opt, 2, gamma=0.5), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "user's": CountingLR,
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("scheduler", list(IN_THE_STEP))
def test_schedulers_stepped_in_the_step(
    mesh_2x4: DeviceMesh, scheduler: str, tensor_lr: bool
) -> None:
    """Each call steps them once, also those that step others."""
    reference, model = twin_models(mesh_2x4)

    def step_of(m: nn.Module):
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        opt = torch.optim.SGD(m.parameters(), lr=lr, momentum=0.5, foreach=False)
        schedule = IN_THE_STEP[scheduler](opt)

        def step(x: torch.Tensor) -> None:
            opt.zero_grad()
            m(x).pow(2).mean().backward()
            opt.step()
            schedule.step()

        return step, opt, schedule

    reference_step, expected, reference_schedule = step_of(reference)
    step, actual, schedule = step_of(model)
    compiled = xd.compile(step)
    for x, dx in batches(mesh_2x4, 6):
        reference_step(x)
        compiled(dx)
        for key in ("lr", "momentum"):
            assert actual.param_groups[0][key] == expected.param_groups[0][key]
        assert schedule.get_last_lr() == reference_schedule.get_last_lr()
    for counter in ("last_epoch", "count"):  # the user's; ChainedScheduler has none
        assert getattr(schedule, counter, 0) == getattr(reference_schedule, counter, 0)
    assert_same_parameters(reference, model)
    assert compiled.compilations == 1, compiled.recompilations


READS_OF_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "get_last_lr": lambda schedule: schedule.get_last_lr()[0],
    "last_epoch": lambda schedule: schedule.last_epoch,
    "state_dict": lambda schedule: schedule.state_dict()["last_epoch"],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheduler", ["step", "user's"])
@pytest.mark.parametrize("read", READS_OF_SCHEDULES)
def test_schedules_read_in_the_step_that_moves_them(
    mesh_2x4: DeviceMesh, scheduler: str, read: str
) -> None:
    """Before it is moved it is what it is; afterwards the step's program must have run."""
    seen: dict[str, list[Any]] = {}
    for name, model in zip(("cpu", "xla"), twin_models(mesh_2x4), strict=True):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = IN_THE_STEP[scheduler](opt)

        def step(before: bool, opt: Any = opt, schedule: Any = schedule) -> Any:
            found = READS_OF_SCHEDULES[read](schedule) if before else None
            opt.step()
            schedule.step()
            return found if before else READS_OF_SCHEDULES[read](schedule)

        watch = "auto" if read == "state_dict" else "trace"  # it is no input
        call = xd.compile(step, watch=watch) if name == "xla" else step
        seen[name] = [call(True) for _ in range(5)]
        if name == "xla":
            call = xd.compile(step)
            if read == "state_dict":
                with pytest.raises(xd.DataDependentError, match="and then steps it"):
                    call(True)
            else:
                call(True), call(True)
                assert call.compilations == call.traces == 1, call.recompilations
            with pytest.raises(xd.DataDependentError, match="puts off until its program has run"):
                call(False)
    assert seen["xla"] == seen["cpu"]


# Optimizers that ask for a tensor's value, or are given a tensor where their formula has a number.
VALUES = {
    "adafactor": lambda p, lr: torch.optim.Adafactor(p, lr=lr, weight_decay=0.1),
    "adafactor_single": lambda p, lr: torch.optim.Adafactor(p, lr=lr, foreach=False, d=1.5),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr, lr_decay=0.1, foreach=False),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, eps=1e-3, foreach=False),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, eps=1e-3, foreach=False),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("optimizer", list(VALUES))
@pytest.mark.parametrize("kind", ["float", "tensor", "vector"])
def test_values_in_an_optimizers_formula(mesh_2x4: DeviceMesh, kind: str, optimizer: str) -> None:
    reference, model = twin_models(mesh_2x4)

    def step_of(m: nn.Module):
        lr = {"float": 0.1, "tensor": torch.tensor(0.1), "vector": torch.tensor([0.1])}[kind]
        opt = VALUES[optimizer](list(m.parameters()), lr)

        def step(x: torch.Tensor) -> None:
            opt.zero_grad()
            m(x).pow(2).mean().backward()
            opt.step()

        return step, lr_scheduler.ExponentialLR(opt, 0.5)

    reference_step, reference_schedule = step_of(reference)
    step, schedule = step_of(model)
    compiled = xd.compile(step)
    for x, dx in batches(mesh_2x4, 4):
        reference_step(x)
        compiled(dx)
        reference_schedule.step()
        schedule.step()
    assert_same_parameters(reference, model)
    # Adafactor makes its step counts on the CPU.
    assert compiled.compilations == 1, compiled.recompilations


class Sgd(torch.optim.Optimizer):
    """A user's own, whose formula has a power of the learning rate, or a tensor's methods."""

    def __init__(self, parameters, lr) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr = group["lr"]
            for p in group["params"]:
                if isinstance(lr, torch.Tensor):
                    p.sub_(p.grad * lr.square()[0])
                elif lr:
                    p.add_(p.grad, alpha=-(lr**2))


@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_a_users_optimizer_with_a_schedule(mesh_2x4: DeviceMesh, kind: str) -> None:
    reference, model = twin_models(mesh_2x4)

    def step_of(m: nn.Module):
        opt = Sgd(m.parameters(), torch.tensor([0.5]) if kind == "tensor" else 0.5)

        def step(x: torch.Tensor) -> None:
            opt.zero_grad()
            m(x).pow(2).mean().backward()
            opt.step()

        return step, lr_scheduler.ExponentialLR(opt, 0.5)

    reference_step, reference_schedule = step_of(reference)
    step, schedule = step_of(model)
    compiled = xd.compile(step)
    for x, dx in batches(mesh_2x4, 3):
        reference_step(x)
        compiled(dx)
        reference_schedule.step()
        schedule.step()
    assert_same_parameters(reference, model)
    assert compiled.compilations == 1, compiled.recompilations


def test_a_closure_keeps_its_loss(mesh_2x4: DeviceMesh) -> None:
    """What torch's formulas ask for, and numbers that are known when the step has run."""
    twin, model = twin_models(mesh_2x4)
    losses: dict[Any, list[float]] = {twin: [], model: []}

    def training(model: nn.Module) -> Callable[[torch.Tensor], None]:
        opt = torch.optim.Adagrad(model.parameters(), lr=0.1, foreach=False)
        own = losses[model]

        def step(x: torch.Tensor) -> None:
            def closure() -> torch.Tensor:
                opt.zero_grad()
                loss = model(x).pow(2).mean()
                loss.backward()
                own.append(loss.item())
                return loss

            opt.step(closure)

        return step

    step, expected = xd.compile(training(model)), training(twin)
    for x, sharded in batches(mesh_2x4, 3):
        step(sharded)
        expected(x)
    assert losses[model] == pytest.approx(losses[twin]) and len(losses[model]) == 3


def test_powers_of_an_argument(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(4), mesh_2x4, [Shard(0), Replicate()])
    step = xd.compile(lambda t, by: t * by**2 + 2.0**by)
    for by in (1.5, 2.5, 3.5):
        torch.testing.assert_close(step(x, by).cpu(), torch.full((4,), by**2 + 2.0**by))
    assert step.compilations == 2


@pytest.mark.parametrize("values", [(1.0, 2.0), (2.0, 1.0), (1.0, math.nan), (math.nan, 1.0)])
def test_the_larger_and_the_smaller_of_numbers(values: tuple[float, float]) -> None:
    """Python's ``max`` and ``min``, also of NaN; and who asks which one it is raises."""

    def refuse() -> None:
        raise LookupError

    for ours, pythons in ((number_functions.larger, max), (number_functions.smaller, min)):
        assert repr(ours(*values)) == repr(pythons(*values))
        for i in range(2):
            given = list(values)
            given[i] = valueless_number.valueless_number(jnp.asarray(values[i]), "x", refuse)
            found = ours(*given)
            assert repr(float(number_functions.number_value(found))) == repr(pythons(*values))
            for look in (bool, float, repr, lambda x: x > 0 or x):
                with pytest.raises(LookupError):
                    look(found)


FUSED = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", list(FUSED))
def test_fused_optimizers_take_their_numbers_as_inputs(mesh_2x4: DeviceMesh, name: str) -> None:
    """torch's schema has them as floats, of which C++ would ask for the values."""
    cls, numbers = FUSED[name]
    reference, model = twin_models(mesh_2x4)
    steps = []
    for m in (reference, model):
        opt = cls(m.parameters(), fused=True, **numbers)

        def step(x: torch.Tensor, m: nn.Module = m, opt: torch.optim.Optimizer = opt) -> None:
            m(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()

        steps.append((step, opt))
    compiled = xd.compile(lambda x: steps[1][0](x))
    for i, (x, dx) in enumerate(batches(mesh_2x4, 4)):
        for _, opt in steps:
            opt.param_groups[0].update({key: value / (i + 1) for key, value in numbers.items()})
        steps[0][0](x)
        compiled(dx)
    assert_same_parameters(reference, model)
    assert compiled.compilations == 1, compiled.recompilations


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
    assert compiled.compilations == 1, compiled.recompilations


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


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_fused_function_on_the_cpu(as_tensor: bool) -> None:
    """Of a user's own optimizer: the host computes it in each call."""

    def make() -> tuple[torch.Tensor, Any]:
        p, g, m = torch.ones(3), torch.ones(3), torch.zeros(3)

        def step(x: torch.Tensor, lr: Any) -> torch.Tensor:
            torch._fused_sgd_(
                [p], [g], [m], weight_decay=0.01, momentum=0.9, lr=lr, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip
            return x + 1

        return p, step

    (expected, plain), (p, step) = make(), make()
    compiled, x = xd.compile(step), torch.ones(2).to("xla")
    for number in (0.1, 0.2, 0.3):
        lr = torch.tensor(number) if as_tensor else number
        plain(x, lr)
        compiled(x, lr)
    torch.testing.assert_close(p, expected)


def test_a_message_says_where_an_argument_lies() -> None:
    """One on the default device and one on all of a mesh's differ in nothing else."""
    mesh = xd.init_device_mesh("xla", (8,))
    step = xd.compile(lambda x: x * 2)
    on_mesh = xd.distribute_tensor(torch.ones(3), mesh, [xd.Replicate()]).to_local()
    step(torch.ones(3, device="xla"))
    torch.testing.assert_close(step(on_mesh).cpu(), torch.full((3,), 2.0))
    (why,) = step.recompilations
    assert "torch.float32 on the default device to [3] torch.float32 on Frame(dim0=8)" in why


def test_a_message_says_that_an_argument_is_a_view() -> None:
    step = xd.compile(lambda x: x * 2)
    memory = torch.arange(4.0, device="xla")
    for x in (torch.ones(3, device="xla"), memory[1:], memory[:3]):
        torch.testing.assert_close(step(x).cpu(), x.cpu() * 2)
    one, another = step.recompilations
    plain = "[3] torch.float32 on the default device"
    assert one == f"argument [0]: from {plain} to {plain}, a view of [4]"
    assert another == f"argument [0]: from {plain}, a view of [4] to another one"
