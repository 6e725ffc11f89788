"""What a compiled step reads, overwrites and leaves behind, against CPU torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import xla_dtensor as xd


def shard_linears(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        for key, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.data, mesh, [Replicate(), Shard(0)])
            module.register_parameter(key, nn.Parameter(sharded))


def twin_models(mesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """A small model on the CPU, and the same one on the mesh."""
    reference = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model = copy.deepcopy(reference)
    distribute_module(model, mesh, shard_linears)
    return reference, model


def batches(mesh: DeviceMesh, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches on the CPU and on the mesh."""
    xs = [torch.randn(4, 6) for _ in range(count)]
    return [(x, distribute_tensor(x, mesh, [Shard(0), Replicate()])) for x in xs]


def assert_same_parameters(reference: nn.Module, model: nn.Module) -> None:
    for expected, actual in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)


def test_gradients_left_behind_accumulate(mesh_2x4: DeviceMesh) -> None:
    reference, model = twin_models(mesh_2x4)

    def step(x: torch.Tensor) -> None:
        model(x).pow(2).sum().backward()

    compiled = xd.compile(step)
    for x, dx in batches(mesh_2x4, 4):
        reference(x).pow(2).sum().backward()
        assert compiled(dx) is None
    for expected, actual in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-5)
    # One program without gradients at the start, one that adds to them.
    assert compiled.compilations == 2
    assert ".grad" in compiled.recompilations[0]


def test_zero_grad_between_calls_is_respected(mesh_2x4: DeviceMesh) -> None:
    reference, model = twin_models(mesh_2x4)
    compiled = xd.compile(lambda x: model(x).pow(2).sum().backward())
    for x, dx in batches(mesh_2x4, 3):
        for m, run, value in ((reference, None, x), (model, compiled, dx)):
            m.zero_grad()
            m(value).pow(2).sum().backward() if run is None else run(value)
    for expected, actual in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-5)
    assert compiled.compilations == 1


@pytest.mark.parametrize("first_in_step", [True, False], ids=["zero_first", "zero_last"])
def test_lazily_made_optimizer_state_compiles_once(
    mesh_2x4: DeviceMesh, first_in_step: bool
) -> None:
    reference, model = twin_models(mesh_2x4)

    def step_of(m: nn.Module):
        opt = torch.optim.AdamW(m.parameters(), lr=0.05, eps=1e-3)

        def step(x: torch.Tensor) -> torch.Tensor:
            if first_in_step:
                opt.zero_grad()
            loss = m(x).pow(2).mean()
            loss.backward()
            opt.step()
            if not first_in_step:
                opt.zero_grad()
            return loss

        return step

    reference_step, step = step_of(reference), xd.compile(step_of(model))
    for x, dx in batches(mesh_2x4, 5):
        torch.testing.assert_close(step(dx).cpu(), reference_step(x).detach(), rtol=1e-4, atol=1e-5)
    assert_same_parameters(reference, model)
    assert step.compilations == 1
    assert step.recompilations == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("options", "compilations"),
    [
        ({}, 1),
        ({"fused": True}, 1),
        ({"foreach": False}, 1),
        ({"nesterov": True, "weight_decay": 0.1}, 1),
        ({"maximize": True}, 1),
        # The first gradient counts more than the later ones: a first step is another program, and
        # so is the first one of one parameter.
        ({"dampening": 0.3}, 3),
        ({"dampening": 0.3, "fused": True}, 2),
    ],
    ids=str,
)
def test_momentum_begins_with_the_first_gradient(
    mesh_2x4: DeviceMesh, options: dict[str, Any], compilations: int
) -> None:
    reference, model = twin_models(mesh_2x4)
    made = []

    def step_of(m: nn.Module):
        opt = torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, **options)
        made.append(opt)

        def step(x: torch.Tensor) -> None:
            opt.zero_grad()
            m(x).pow(2).mean().backward()
            opt.step()

        return step

    reference_step, step = step_of(reference), xd.compile(step_of(model))
    for i, (x, dx) in enumerate(batches(mesh_2x4, 5)):
        if i == 3 and "fused" not in options:  # one parameter's state begins again
            for opt in made:
                del opt.state[opt.param_groups[0]["params"][1]]
        reference_step(x)
        step(dx)
    assert_same_parameters(reference, model)
    for mine, right in zip(model.parameters(), reference.parameters(), strict=True):
        momenta = [o.state[p]["momentum_buffer"] for o, p in zip(made, (right, mine), strict=True)]
        torch.testing.assert_close(momenta[1].full_tensor().cpu(), momenta[0])
    assert step.compilations == compilations
    # Once more for the state that begins again, or after the first of fused steps.
    assert "dampening" in options or step.traces == 2


def test_a_first_step_that_fails_leaves_no_momentum() -> None:
    model = nn.Linear(4, 4).to("xla")
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        opt.step()
        return x.expand(3, 3)  # not its shape

    with pytest.raises(RuntimeError, match="expanded size"):
        step(torch.ones(2, 4, device="xla"))
    assert not opt.state


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}])
def test_optimizer_continues_between_eager_and_compiled(
    mesh_2x4: DeviceMesh, options: dict[str, bool]
) -> None:
    reference, model = twin_models(mesh_2x4)

    def step_of(m: nn.Module):
        opt = torch.optim.Adam(m.parameters(), lr=0.05, eps=1e-3, **options)

        def step(x: torch.Tensor) -> None:
            m(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()

        return step

    reference_step, step = step_of(reference), step_of(model)
    compiled = xd.compile(step)
    runs = [step, step, compiled, compiled, step, compiled]
    for run, (x, dx) in zip(runs, batches(mesh_2x4, len(runs)), strict=True):
        reference_step(x)
        run(dx)
    assert_same_parameters(reference, model)


def test_overwritten_state_is_donated(mesh_2x4: DeviceMesh) -> None:
    state = distribute_tensor(torch.ones(8, 4), mesh_2x4, [Shard(0), Replicate()])
    kept = distribute_tensor(torch.ones(8, 4), mesh_2x4, [Shard(0), Replicate()])

    @xd.compile
    def step() -> torch.Tensor:
        state.mul_(2).add_(kept)
        return state.sum()

    before, before_kept = state.jax_array, kept.jax_array
    assert step().item() == 96.0
    assert before.is_deleted()
    assert not before_kept.is_deleted()
    assert step().item() == 224.0
    assert state.cpu().tolist() == [[7.0] * 4] * 8


def test_copies_made_before_survive_donation(mesh_2x4: DeviceMesh) -> None:
    state = distribute_tensor(torch.arange(8.0), mesh_2x4, [Replicate(), Replicate()])
    copies = [
        state.clone(),
        state.redistribute(placements=[Replicate(), Replicate()]),
        state.full_tensor(),
        state.detach().clone().view(2, 4),
    ]
    view = state.view(2, 4)
    xd.compile(lambda: state.add_(1))()
    for tensor in copies:
        assert tensor.cpu().flatten().tolist() == list(range(8))
    assert view.cpu().flatten().tolist() == list(range(1, 9))


def test_buffers_and_views_of_state(mesh_2x4: DeviceMesh) -> None:
    reference = torch.zeros(4, 6)
    state = distribute_tensor(reference, mesh_2x4, [Shard(0), Shard(1)])
    row = state[1]
    expected_row = reference[1]

    @xd.compile
    def step(value: torch.Tensor) -> None:
        state[:, 1:3] += value
        row.mul_(2)

    for i in range(3):
        value = torch.full((4, 2), float(i + 1))
        step(distribute_tensor(value, mesh_2x4, [Shard(0), Replicate()]))
        reference[:, 1:3] += value
        expected_row.mul_(2)
    torch.testing.assert_close(state.cpu(), reference)
    torch.testing.assert_close(row.cpu(), expected_row)
    assert step.compilations == 1


def test_batch_norm_statistics(mesh_2x4: DeviceMesh) -> None:
    reference = nn.BatchNorm1d(6)
    model = copy.deepcopy(reference)
    distribute_module(model, mesh_2x4)
    step = xd.compile(lambda x: model(x).sum())
    for x, dx in batches(mesh_2x4, 3):
        reference(x)
        step(dx)
    for expected, actual in zip(reference.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(actual.cpu(), expected)


def test_tensors_on_the_cpu_are_read_in_every_call(mesh_2x4: DeviceMesh) -> None:
    scale = torch.tensor(2.0)
    x = distribute_tensor(torch.ones(4), mesh_2x4, [Shard(0), Replicate()])
    step = xd.compile(lambda t, offset: t * scale + offset)
    assert step(x, torch.ones(4)).cpu().tolist() == [3.0] * 4
    scale.fill_(5.0)
    assert step(x, torch.zeros(4)).cpu().tolist() == [5.0] * 4
    assert step.compilations == 1


def test_arguments_are_written_and_results_returned(mesh_2x4: DeviceMesh) -> None:
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh_2x4, None))

    @xd.compile
    def step(x: torch.Tensor, *, scale: float) -> dict:
        x.add_(1)
        y = x * scale
        return {"y": y, "view": y.view(2, 2)[1], "parameter": parameter, "n": 3, "none": None}

    for start, expected in ((0.0, 2.0), (4.0, 10.0)):
        x = distribute_tensor(torch.full((4,), start), mesh_2x4, [Shard(0), Replicate()])
        out = step(x, scale=2.0)
        assert x.cpu().tolist() == [start + 1] * 4
        assert out["y"].cpu().tolist() == [expected] * 4
        assert out["view"].cpu().tolist() == [expected] * 2
        assert out["parameter"] is parameter
        assert (out["n"], out["none"]) == (3, None)
    assert step.compilations == 1


def test_result_is_a_new_tensor_in_every_call(mesh_2x4: DeviceMesh) -> None:
    total = distribute_tensor(torch.zeros(()), mesh_2x4, None)
    step = xd.compile(lambda: total.add_(1).clone())
    results = [step() for _ in range(3)]
    assert [r.item() for r in results] == [1.0, 2.0, 3.0]


class CountingSgd(torch.optim.Optimizer):
    """A user's own, which counts its steps and looks at the count."""

    def __init__(self, parameters, count) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._count = count

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", self._count(p)) + 1
                p.add_(p.grad / state["count"], alpha=-group["lr"])


def counting_step(model: nn.Module, count):
    optimizer = CountingSgd(model.parameters(), count)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    return step, optimizer


COUNTS = {"python": lambda p: 0, "tensor": lambda p: torch.zeros((), device=p.device)}


@pytest.mark.parametrize("kind", COUNTS)
def test_an_optimizer_that_counts(mesh_2x4: DeviceMesh, kind: str) -> None:
    reference, model = twin_models(mesh_2x4)
    count = COUNTS[kind]
    reference_step, step = counting_step(reference, count)[0], counting_step(model, count)[0]
    compiled = xd.compile(step)
    for x, dx in batches(mesh_2x4, 4):
        reference_step(x)
        compiled(dx)
    assert_same_parameters(reference, model)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_copies_that_do_not_wait(mesh_2x4: DeviceMesh, compiled: bool) -> None:
    state = distribute_tensor(torch.zeros(4), mesh_2x4, [Shard(0), Replicate()])

    def step(x: torch.Tensor) -> torch.Tensor:
        state.copy_(x, non_blocking=True)
        return x.to(torch.float64, non_blocking=True)

    run = xd.compile(step) if compiled else step
    for i in range(2):
        x = torch.arange(4.0) + i
        assert run(distribute_tensor(x, mesh_2x4, None)).cpu().tolist() == x.tolist()
        assert state.cpu().tolist() == x.tolist()


@pytest.mark.parametrize("audit", [0, 1])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_a_closure_of_an_optimizers_step(mesh_2x4: DeviceMesh, optimizer: str, audit: int) -> None:
    """Its forward and backward pass aren't part of the optimizer's formula."""
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-3),
    }

    def step_of(m: nn.Module):
        opt = makers[optimizer](m.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            def closure() -> torch.Tensor:
                opt.zero_grad()
                loss = m(x).pow(2).mean()
                loss.backward()
                return loss

            return opt.step(closure).detach()

        return step

    reference, model = twin_models(mesh_2x4)
    right, compiled = step_of(reference), xd.compile(step_of(model), audit=audit)
    for x, dx in batches(mesh_2x4, 4):
        torch.testing.assert_close(compiled(dx).cpu(), right(x), rtol=1e-4, atol=1e-5)
    assert_same_parameters(reference, model)
    assert compiled.compilations <= 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_adam_with_state_of_another_dtype(
    mesh_2x4: DeviceMesh, dtype: torch.dtype, compiled: bool
) -> None:
    """``model.half()`` leaves the optimizer its moments: torch's error, in compiled steps, too."""

    def step_of(m: nn.Module):
        opt = torch.optim.Adam(m.parameters())

        def step(x: torch.Tensor) -> None:
            opt.zero_grad()
            m(x).pow(2).mean().backward()
            opt.step()

        return step

    reference, model = twin_models(mesh_2x4)
    ((x, dx),) = batches(mesh_2x4, 1)
    right, step = step_of(reference), step_of(model)
    step = xd.compile(step) if compiled else step
    for run, m, value in ((right, reference, x), (step, model, dx)):
        run(value)
        m.to(dtype)
        with pytest.raises(RuntimeError, match="expected dtype"):
            run(value.to(dtype))
