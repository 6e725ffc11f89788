"""A compiled step that fails at any stage leaves everything bit by bit as it was, and can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

import xla_dtensor as xd
from tests.compilation.test_state import assert_same_parameters, batches, twin_models
from xla_dtensor.base import executor
from xla_dtensor.compilation.call import recipes
from xla_dtensor.compilation.objects import flatten
from xla_dtensor.compilation.program import backward, write_back
from xla_dtensor.compilation.watch.effects import Effect
from xla_dtensor.forms.storage import Storage


class Interrupt(BaseException):
    """Like `KeyboardInterrupt`, no `Exception`."""


def out_of_memory() -> Exception:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte")


# Where a call can fail, and what is made to fail there: an attribute of a class of JAX's.
STAGES: dict[str, tuple[Any, str]] = {
    "lower": (jax.stages.Traced, "lower"),
    "text": (jax.stages.Lowered, "as_text"),
    "compile": (jax.stages.Lowered, "compile"),
    "launch": (jax.stages.Compiled, "__call__"),
}
ERRORS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: ValueError("on purpose"),
    "out_of_memory": out_of_memory,
    "interrupt": Interrupt,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-3),
    "fused": lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-3, fused=True),
}


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a step may change, with which objects hold it."""
    found: dict[str, Any] = {"random": torch.xla.get_rng_state().tolist()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = (id(parameter), parameter.detach().cpu().numpy().tobytes())
        found[f"{name}.grad"] = grad if grad is None else grad.cpu().numpy().tobytes()
    for name, buffer in model.named_buffers():
        found[name] = buffer.cpu().numpy().tobytes()
    for i, (parameter, state) in enumerate(optimizer.state.items()):
        for key, value in state.items():
            is_tensor = isinstance(value, torch.Tensor)
            found[f"state {i} {key}"] = (
                id(parameter),
                value.cpu().numpy().tobytes() if is_tensor else value,
            )
    found["groups"] = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return found


@pytest.mark.parametrize("calls_before", [0, 1, 2])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("stage", [*STAGES, "trace"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.one_in(12)
def test_nothing_is_lost(
    mesh_2x4: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
    stage: str,
    error: str,
    calls_before: int,
) -> None:
    if stage != "launch" and calls_before == 2:
        calls_before = 1  # later calls only launch
    reference, model = twin_models(mesh_2x4)
    optimizers = [OPTIMIZERS[optimizer](m.parameters()) for m in (reference, model)]
    failing: list[BaseException] = []

    def step_of(m: nn.Module, opt: torch.optim.Optimizer) -> Callable[[torch.Tensor], Any]:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = m(x).pow(2).mean()
            loss.backward()
            opt.step()
            if failing and stage == "trace":
                raise failing[0]
            opt.zero_grad()
            return loss.detach()

        return step

    reference_step = step_of(reference, optimizers[0])
    step = xd.compile(step_of(model, optimizers[1]))
    rows = batches(mesh_2x4, calls_before + 4)
    for x, dx in rows[:calls_before]:
        torch.testing.assert_close(step(dx).cpu(), reference_step(x), rtol=1e-4, atol=1e-5)
    before = bits(model, optimizers[1])
    raised = ERRORS[error]()
    if stage != "launch":
        step.clear_cache()
    with monkeypatch.context() as patch:
        if stage == "trace":
            failing.append(raised)
        else:

            def fail(*args: Any, **kwargs: Any) -> Any:
                raise raised

            patch.setattr(*STAGES[stage], fail)
        with pytest.raises(type(raised)) as caught:
            step(rows[calls_before][1])
    assert caught.value is raised
    failing.clear()
    assert bits(model, optimizers[1]) == before
    for x, dx in rows[calls_before:]:
        torch.testing.assert_close(step(dx).cpu(), reference_step(x), rtol=1e-4, atol=1e-5)
    assert_same_parameters(reference, model)


# What writing back calls, which is made to fail once.
WRITING: dict[str, tuple[Any, str]] = {
    "states": (write_back, "put"),
    "counts": (Storage, "count_write"),
    "arguments": (Storage, "write"),
    "versions": (torch.autograd.graph, "increment_version"),
    "gradients": (recipes.NewTensor, "make"),
    "attributes": (Effect, "repeat"),
    "views": (recipes.ViewRecipe, "make"),
    "results": (flatten.Tree, "build"),
    "node": (backward, "SavedForBackward"),
}


class Writer:
    """A step that writes to everything there is: parameters, optimizer state, gradients, an
    argument, an attribute; of its results one has a history."""

    def __init__(self, model: nn.Module, gain: nn.Parameter, total: torch.Tensor) -> None:
        self.model, self.gain, self.total = model, gain, total
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.last: torch.Tensor | None = None

    def step(self, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.optimizer.zero_grad()
        y = self.model(x)
        y.pow(2).mean().backward()
        self.optimizer.step()
        self.last = y.detach().sum()
        with torch.no_grad():
            total.add_(self.last)
        return (x * self.gain).sum(), y.detach()[0]

    def tensors(self) -> list[torch.Tensor | None]:
        parameters = list(self.model.parameters())
        states = [self.optimizer.state[p]["momentum_buffer"] for p in parameters]
        grads = [p.grad for p in (*parameters, self.gain)]
        return [*parameters, *states, *grads, self.total, self.last]


@pytest.mark.parametrize("calls_before", [0, 1, 2])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("place", WRITING)
@pytest.mark.one_in(8)
def test_a_failure_in_writing_back(
    mesh_2x4: DeviceMesh, monkeypatch: pytest.MonkeyPatch, place: str, at: int, calls_before: int
) -> None:
    """The step has happened, and as a whole: everything is as after a call that succeeds."""
    reference, model = twin_models(mesh_2x4)
    placed = lambda t: distribute_tensor(t, mesh_2x4, [Replicate()] * 2)
    right = Writer(reference, nn.Parameter(torch.ones(6)), torch.zeros(()))
    mine = Writer(model, nn.Parameter(placed(torch.ones(6))), placed(torch.zeros(())))
    step = xd.compile(mine.step)
    local = next(model.parameters()).to_local()  # whose writes torch doesn't count with the others
    owner, name = WRITING[place]
    original, calls, failed = getattr(owner, name), 0, False

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls, failed
        calls += executor.trace() is None
        if calls == at and not failed:
            failed = True
            raise MemoryError("on purpose")
        return original(*args, **kwargs)

    for i, (x, dx) in enumerate(batches(mesh_2x4, calls_before + 3)):
        expected = right.step(x, right.total)
        if i == calls_before:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing)
                try:
                    step(dx, mine.total)
                except MemoryError:
                    assert failed
        else:
            actual = step(dx, mine.total)
            for result in (expected, actual):
                result[0].backward()
            torch.testing.assert_close(actual[1].cpu(), expected[1], rtol=1e-4, atol=1e-5)
            continue
        right.gain.grad = mine.gain.grad = None
        for a, b in zip(mine.tensors(), right.tensors(), strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)
    assert failed or at == 2  # not each place comes twice
    assert local is not None


def test_an_error_in_a_schedulers_step_comes_after_the_step(mesh_2x4: DeviceMesh) -> None:
    """It is the user's code, and runs when everything else is in place."""
    reference, model = twin_models(mesh_2x4)
    fail = True

    def factor(epoch: int) -> float:
        if fail and epoch:
            raise ZeroDivisionError("on purpose")
        return 1.0

    def step_of(m: nn.Module) -> Callable[[torch.Tensor], None]:
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, factor)

        def step(x: torch.Tensor) -> None:
            m(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
            schedule.step()

        return step

    step, reference_step = xd.compile(step_of(model)), step_of(reference)
    ((x, dx),) = batches(mesh_2x4, 1)
    for run, value in ((reference_step, x), (step, dx)):
        with pytest.raises(ZeroDivisionError):
            run(value)
    assert_same_parameters(reference, model)
    fail = False
    reference_step(x)
    step(dx)
    assert_same_parameters(reference, model)


def test_what_a_failed_trace_leaves_has_no_value(mesh_2x4: DeviceMesh) -> None:
    """A tensor of the step's that something unwatched has kept says why it can't be read."""
    kept = Keeper()
    ((_, dx),) = batches(mesh_2x4, 1)

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        kept.keep(x * 2)
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        step(dx)
    assert kept.what() is None


class Keeper:
    """Keeps something where no name of the step's code leads."""

    def __init__(self) -> None:
        self._holder: dict[str, Any] = {}

    def keep(self, value: Any) -> None:
        self._holder["kept"] = value

    def what(self) -> Any:
        return self._holder.get("kept")
