"""Optimizers, run eagerly: torch's numbers, and one launch per step."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.optim import adam

import xla_dtensor as xd
from tests.dispatch.launches import launches
from xla_dtensor.execution import batch

pytestmark = pytest.mark.one_in(2)  # each variant compiles programs of its own

PLACEMENTS: list[list[Placement]] = [
    [Shard(0), Replicate()],
    [Replicate(), Shard(1)],
    [Shard(1), Shard(0)],
]

FOREACH: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (torch.optim.Adamax, {"weight_decay": 0.1}),
    (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.RAdam, {"weight_decay": 0.1}),
    (torch.optim.Adadelta, {"weight_decay": 0.1}),
]
FUSED: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
]
CASES = [(c, o | {"foreach": True}) for c, o in FOREACH] + [
    (c, o | {"fused": True}) for c, o in FUSED
]


class Both:
    """The same optimizer over the same parameters, on the CPU and on a mesh."""

    def __init__(self, optimizer: Any, options: dict[str, Any], count: int, mesh: Any) -> None:
        values = [torch.randn(4 + i % 2, 8) for i in range(count)]  # some are uneven
        self.mesh = mesh
        self.plain = [torch.nn.Parameter(v.clone()) for v in values]
        self.ours = [
            torch.nn.Parameter(distribute_tensor(v, mesh, PLACEMENTS[i % 3]))
            for i, v in enumerate(values)
        ]
        cpu_options = {k: v for k, v in options.items() if k not in ("fused", "capturable")}
        self.plain_optimizer = optimizer(self.plain, **cpu_options | {"foreach": True})
        self.optimizer = optimizer(self.ours, **options)

    def prepare(self, lr: float) -> None:
        """New gradients and another learning rate."""
        for i, (plain, ours) in enumerate(zip(self.plain, self.ours, strict=True)):
            plain.grad = torch.randn_like(plain)
            ours.grad = distribute_tensor(plain.grad, self.mesh, PLACEMENTS[i % 3])
        for optimizer in (self.plain_optimizer, self.optimizer):
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr

    def step(self) -> None:
        self.plain_optimizer.step()
        self.optimizer.step()

    def counted_step(self) -> int:
        """A step, and how many launches ours takes. (Compiling under the profiler takes long.)"""
        self.plain_optimizer.step()
        return launches(self.optimizer.step)

    def check(self) -> None:
        for plain, ours in zip(self.plain, self.ours, strict=True):
            torch.testing.assert_close(ours.detach().cpu(), plain.detach())


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("optimizer", "options"), CASES, ids=[f"{c.__name__}-{'-'.join(o)}" for c, o in CASES]
)
def test_steps_are_torchs_and_one_launch_each(
    optimizer: Any, options: dict[str, Any], mesh_2x4: DeviceMesh
) -> None:
    both = Both(optimizer, options, 6, mesh_2x4)
    for step in range(7):  # RAdam changes its formula in the sixth
        both.prepare(lr=0.01 / (1 + step))
        if step < 2:  # the first makes the state, and SGD's second is the first with a momentum
            both.step()
        else:
            assert both.counted_step() == 1
        both.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation",
    [{}, {"fused": True}, {"foreach": True}],
    ids=["default", "fused", "foreach"],
)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_200_parameters_are_one_launch(
    optimizer: Any, implementation: dict[str, bool], mesh_2x4: DeviceMesh
) -> None:
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    both = Both(optimizer, options | implementation, 200, mesh_2x4)
    for lr in (0.01, 0.02):
        both.prepare(lr)
        both.step()
    for lr in (0.03, 0.04):
        both.prepare(lr)
        known, compiled = len(batch.executables), []
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, duration, c=compiled, **kw: c.append(event) if "compile" in event else 0
        )
        try:
            assert both.counted_step() == 1
        finally:
            jax.monitoring.clear_event_listeners()
        assert compiled == [] and len(batch.executables) == known
    both.check()


@pytest.mark.parametrize("implementation", [{"foreach": True, "capturable": True}, {"fused": True}])
def test_a_learning_rate_that_is_a_tensor(
    implementation: dict[str, bool], mesh_2x4: DeviceMesh
) -> None:
    both = Both(torch.optim.AdamW, implementation, 3, mesh_2x4)
    for group in both.optimizer.param_groups:
        group["lr"] = torch.tensor(0.1)
    both.prepare(lr=0.01)
    both.step()
    known = len(batch.executables)
    for lr in (0.02, 0.03):
        both.prepare(lr)
        assert both.counted_step() == 1
        assert len(batch.executables) == known
    both.check()


def test_parameters_with_different_numbers_of_steps(mesh_2x4: DeviceMesh) -> None:
    both = Both(torch.optim.Adam, {"foreach": True}, 4, mesh_2x4)
    for step in range(5):
        both.prepare(lr=0.01)
        if step < 2:
            both.plain[1].grad = both.ours[1].grad = None
        both.step()
        both.check()


def test_the_default_is_torchs_loop_over_parameters(mesh_2x4: DeviceMesh) -> None:
    both = Both(torch.optim.AdamW, {}, 3, mesh_2x4)
    for _ in range(3):
        both.prepare(lr=0.01)
        both.step()
        both.check()


@pytest.mark.parametrize("foreach", [True, False, None])
def test_what_nesterov_leaves_in_gradients(foreach: bool | None, mesh_2x4: DeviceMesh) -> None:
    def gradient(start: torch.Tensor, foreach: bool | None) -> torch.Tensor:
        p = start.requires_grad_()
        sgd = torch.optim.SGD([p], 0.1, momentum=0.9, nesterov=True, foreach=foreach)
        (p * 2).sum().backward()
        sgd.step()
        return p.grad.cpu()

    ours = distribute_tensor(torch.ones(4), mesh_2x4, [Shard(0), Replicate()])
    # On an accelerator foreach is the default, of torch's too.
    wanted = gradient(torch.ones(4), foreach is not False)
    assert torch.equal(gradient(ours, foreach), wanted)


def test_closures_hooks_and_gradient_scaling(mesh_2x4: DeviceMesh) -> None:
    both = Both(torch.optim.SGD, {"fused": True}, 2, mesh_2x4)
    calls: list[str] = []
    both.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    both.optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure(parameters: list[torch.Tensor]) -> torch.Tensor:
        loss = sum(((p * p).sum() for p in parameters), torch.zeros(()))
        loss.backward()
        return loss

    both.prepare(lr=0.01)
    expected = both.plain_optimizer.step(lambda: closure(both.plain))

    def ours() -> torch.Tensor:
        loss = (both.ours[0] ** 2).sum() + (both.ours[1] ** 2).sum()
        loss.backward()
        return loss

    result = both.optimizer.step(ours)
    torch.testing.assert_close(result.detach().cpu(), expected.detach())
    both.check()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("fused", [True, False])
def test_a_wrapper_of_the_users_around_ours(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """A profiler's, say. (In a compiled step Adam's update is torch's fused function itself.)"""
    inner = adam._fused_adam
    monkeypatch.setattr(adam, "_fused_adam", lambda *args, **kwargs: inner(*args, **kwargs))
    weight, x = torch.randn(4, 3), torch.randn(2, 4)
    values = []
    for device in ("cpu", "xla"):
        w = weight.clone().to(device).requires_grad_()
        optimizer = torch.optim.AdamW([w], lr=0.1, fused=fused)

        def step(x: torch.Tensor, w: Any = w, optimizer: Any = optimizer) -> None:
            (x @ w).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = xd.compile(step) if device == "xla" else step
        for _ in range(2):
            run(x.to(device))
        values.append(w.detach().cpu())
    torch.testing.assert_close(values[1], values[0])
