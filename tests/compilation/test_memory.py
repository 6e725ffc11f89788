"""What compiled steps keep alive: what they may need again, and no more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.utils import parametrizations, parametrize

import xla_dtensor as xd
from tests.compilation.test_history import numbers


def batch(mesh: DeviceMesh, seed: int = 0) -> torch.Tensor:
    return distribute_tensor(numbers(seed, 8, 4), mesh, [Shard(0), Replicate()])


def model_on(mesh: DeviceMesh) -> nn.Module:
    return distribute_module(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), mesh)


def memory_of(tensors: Iterable[torch.Tensor]) -> list[weakref.ref]:
    return [weakref.ref(t._storage_) for t in tensors]


def arrays_of(tensors: Iterable[torch.Tensor]) -> list[weakref.ref]:
    return [weakref.ref(t._storage_.array) for t in tensors]


def alive(references: Iterable[weakref.ref]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_the_first_batch_goes(mesh_2x4: DeviceMesh) -> None:
    w = distribute_tensor(numbers(1, 4, 4), mesh_2x4, [Replicate()] * 2).requires_grad_()
    for step in (xd.compile(lambda x: (x @ w).sum()), xd.compile(lambda x: x.add_(1).sum())):
        first = batch(mesh_2x4)
        found = memory_of([first]) + arrays_of([first])
        step(first)
        step(batch(mesh_2x4, 1))
        del first
        assert alive(found) == 0


def test_old_values_go(mesh_2x4: DeviceMesh) -> None:
    """A program that donates nothing has the arrays that it was traced with as constants."""
    model = model_on(mesh_2x4)
    step = xd.compile(lambda x: model(x).square().mean())
    old = arrays_of(model.parameters())
    step(batch(mesh_2x4)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    torch.xla.synchronize()  # type: ignore[attr-defined]
    assert alive(old) == 0


def test_gradients_go(mesh_2x4: DeviceMesh) -> None:
    model = model_on(mesh_2x4)
    step = xd.compile(lambda x: model(x).square().mean().backward())
    for _ in range(3):
        step(batch(mesh_2x4))
    grads = [p.grad for p in model.parameters()]
    found = memory_of(grads) + arrays_of(grads)
    model.zero_grad()
    del grads
    assert alive(found) == 0
    for _ in range(2):
        step(batch(mesh_2x4))
    assert step.traces == 2  # the one for gradients that are there still fits


def test_residuals_go_with_the_backward_pass(mesh_2x4: DeviceMesh) -> None:
    w = distribute_tensor(numbers(1, 4, 4), mesh_2x4, [Replicate()] * 2).requires_grad_()
    step = xd.compile(lambda x: (x @ w).tanh().sum())
    x = batch(mesh_2x4)
    loss = step(x)
    (token,) = loss.grad_fn.saved_tensors
    inputs = {id(t._storage_.array) for t in (x, w)}
    found = [weakref.ref(array) for array in token.kept.residuals if id(array) not in inputs]
    del token
    assert found
    loss.backward(retain_graph=True)
    assert alive(found)
    loss.backward()
    assert alive(found) == 0  # the loss is still there


def test_results_go_without_a_collection(mesh_2x4: DeviceMesh) -> None:
    w = distribute_tensor(numbers(1, 4, 4), mesh_2x4, [Replicate()] * 2).requires_grad_()
    step = xd.compile(lambda x: ((x @ w).tanh(), (x @ w)[0]))
    step(batch(mesh_2x4))
    gc.collect()
    gc.disable()
    try:
        results = step(batch(mesh_2x4))
        found = [weakref.ref(r._storage_) for r in results]
        del results
        assert [reference() for reference in found] == [None, None]
    finally:
        gc.enable()


def test_batches_go_without_a_collection(mesh_2x4: DeviceMesh) -> None:
    """What a call is given is free when the caller lets go of it: of a hundred batches that wait
    for the collector a device has no room."""
    weight = xd.distribute_tensor(torch.ones(8, 4), mesh_2x4, [xd.Replicate()] * 2)
    total = [torch.zeros((), device="xla")]

    def step(x: torch.Tensor, scale: dict[str, float]) -> torch.Tensor:
        total[0] = (x @ weight).sum().to_local() * scale["by"] + total[0]
        return total[0].detach()

    step = xd.compile(step)
    gc.collect()
    gc.disable()
    try:
        alive = []
        for number in range(6):
            x = xd.distribute_tensor(torch.ones(16, 8), mesh_2x4, [xd.Shard(0), xd.Replicate()])
            step(x, {"by": float(number)})
            alive.append(weakref.ref(x._storage_))
            del x
        # The last call may be done again (`step.again()`).
        assert [ref() is not None for ref in alive] == [*[False] * 5, True]
    finally:
        gc.enable()


def test_residuals_are_activations_as_they_lie(mesh_2x4: DeviceMesh) -> None:
    """No parameters in another order, and nothing replicated that isn't."""
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    for linear, dim in ((model[1], 0), (model[3], 1)):
        sharded = distribute_tensor(linear.weight.data, mesh_2x4, [Replicate(), Shard(dim)])
        linear.weight = nn.Parameter(sharded)
    distribute_module(model, mesh_2x4)
    x = distribute_tensor(numbers(0, 8, 4, 16), mesh_2x4, [Shard(0), Replicate()])
    loss = xd.compile(lambda x: (x + model(x)).square().mean())(x.requires_grad_())
    (token,) = loss.grad_fn.saved_tensors
    split = token.kept.residuals
    parameters = {id(p._storage_.array) for p in model.parameters()}
    residuals = [array for array in split if id(array) not in parameters and array.ndim > 1]
    assert residuals
    for array in residuals:
        assert array.shape[:2] == (8, 4), array.shape  # of the batch
        part = array.sharding.shard_shape(array.shape)
        assert part[0] == 4
        assert part[2] == (8 if array.shape[2] == 32 else array.shape[2])


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "own": lambda m: parametrize.register_parametrization(m, "weight", Double()),
    "weight_norm": parametrizations.weight_norm,
}


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_a_parametrization_registered_between_calls(
    mesh_2x4: DeviceMesh, kind: str, calls: int
) -> None:
    """It swaps the parameter for another, for which nothing must hold its place in a history."""

    def run(model: nn.Module, compile: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
        forward = compile(lambda x: model(x))
        for _ in range(calls):
            forward(x).square().mean().backward()
        PARAMETRIZATIONS[kind](model[0])
        model.zero_grad()
        forward(x).square().mean().backward()
        return [p.grad for p in model.parameters()]

    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    torch.manual_seed(0)
    model = model_on(mesh_2x4)
    expected = run(reference, lambda f: f, numbers(0, 8, 4))
    for actual, right in zip(run(model, xd.compile, batch(mesh_2x4)), expected, strict=True):
        torch.testing.assert_close(actual.cpu(), right, rtol=1e-4, atol=1e-5)


# --- models that are replaced ---------------------------------------------------------------------


class Experiment:
    """A model with its optimizer; what they have in memory."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.model = model_on(mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def memory(self) -> list[weakref.ref]:
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        return memory_of([*self.model.parameters(), *states])


@pytest.mark.slow
def test_a_model_that_is_replaced_goes(mesh_2x4: DeviceMesh) -> None:
    holder: dict[str, Experiment] = {}

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        e = holder["experiment"]
        e.optimizer.zero_grad()
        loss = e.model(x).square().mean()
        loss.backward()
        e.optimizer.step()
        return loss.detach()

    memory = []
    for _ in range(4):
        holder["experiment"] = Experiment(mesh_2x4)
        for _ in range(2):
            step(batch(mesh_2x4))
        memory.append(holder["experiment"].memory())
    assert [alive(m) > 0 for m in memory] == [False, False, False, True]
    assert step.compilations == 1


@pytest.mark.slow
def test_a_model_given_as_an_argument_goes(mesh_2x4: DeviceMesh) -> None:
    step = xd.compile(lambda model, x: model(x).sum())
    memory = []
    for _ in range(4):
        model = model_on(mesh_2x4)
        step(model, batch(mesh_2x4)).backward()
        memory.append(memory_of(model.parameters()))
        del model
    assert [alive(m) > 0 for m in memory] == [False, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("as_argument", [True, False])
def test_programs_of_models_in_use_stay(mesh_2x4: DeviceMesh, as_argument: bool) -> None:
    models = [model_on(mesh_2x4) for _ in range(3)]
    holder = {"model": models[0]}
    if as_argument:
        step = xd.compile(lambda model, x: model(x).sum())
    else:
        step = xd.compile(lambda x: holder["model"](x).sum())
    for _ in range(3):
        for model in models:
            holder["model"] = model
            model.zero_grad()
            step(*([model] if as_argument else []), batch(mesh_2x4)).backward()
            gc.collect()
    assert step.traces == 3


def test_programs_go_with_the_step(mesh_2x4: DeviceMesh) -> None:
    models = [model_on(mesh_2x4) for _ in range(2)]
    step = xd.compile(lambda model, x: model(x).sum())
    programs = []
    for model in models:
        step(model, batch(mesh_2x4))
        programs.append(weakref.ref(step._last[1]))
    assert alive(programs) == 2
    step.clear_cache()
    assert alive(programs) == 0
    for model in models:
        step(model, batch(mesh_2x4))
        programs.append(weakref.ref(step._last[1]))
    assert alive(programs) == 2
    del step
    assert alive(programs) == 0


@pytest.mark.slow
def test_models_of_a_method_with_state_go(mesh_2x4: DeviceMesh) -> None:
    """The places that a step keeps state in don't keep the object alive, whose they are."""

    class Trainer:
        def __init__(self) -> None:
            self.model, self.count = model_on(mesh_2x4), 0

        @xd.compile
        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.model(x).detach() * self.count

    found = []
    for _ in range(4):
        trainer = Trainer()
        for i in range(4):
            trainer.step(batch(mesh_2x4, i))
        found.append(memory_of(trainer.model.parameters()))
        del trainer
    gc.collect()
    assert [alive(memory) for memory in found[:3]] == [0, 0, 0]


def where(tensor: torch.Tensor) -> list[int]:
    """The addresses of a tensor's data on each device."""
    shards = tensor._storage_.array.addressable_shards
    return [shard.data.unsafe_buffer_pointer() for shard in shards]


@pytest.mark.parametrize("clears", ["first", "last"])
def test_a_step_writes_state_where_it_lies(mesh_2x4: DeviceMesh, clears: str) -> None:
    """JAX gives a donated array's memory to the first result of its shape, and here all have the
    same: gradients that the step leaves behind, parameters and the optimizer's state."""
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    model = distribute_module(nn.Sequential(*layers), mesh_2x4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        if clears == "first":
            optimizer.zero_grad()
        loss = model(x).tanh().square().mean()
        loss.backward()
        optimizer.step()
        if clears == "last":
            optimizer.zero_grad()
        return loss.detach()

    step(batch(mesh_2x4)), step(batch(mesh_2x4))
    state = [*model.parameters(), *(s[k] for s in optimizer.state.values() for k in s)]
    state = [tensor for tensor in state if tensor.dim() == 2]
    assert len(state) == 9
    places = [where(tensor) for tensor in state]
    step(batch(mesh_2x4))
    assert [where(tensor) for tensor in state] == places
    _, entry = step.compiled_programs()[-1].as_text().split("\nENTRY", 1)
    assert " copy(" not in entry


def test_a_trace_leaves_the_collector_as_it_was() -> None:
    before = gc.get_threshold()
    inside: list[tuple[int, int, int]] = []

    def step(x: torch.Tensor, fails: bool) -> torch.Tensor:
        inside.append(gc.get_threshold())
        return x + x.tolist()[0] if fails else x * 2

    compiled = xd.compile(step)
    compiled(torch.ones(3, device="xla"), False)
    assert gc.get_threshold() == before and inside[0][0] > before[0]
    with pytest.raises(xd.DataDependentError):
        compiled(torch.ones(3, device="xla"), True)
    assert gc.get_threshold() == before and gc.isenabled()


def test_what_a_step_sets_of_the_collector_stays() -> None:
    before = gc.get_threshold()

    def step(x: torch.Tensor) -> torch.Tensor:
        gc.set_threshold(1234, *before[1:])
        return x * 2

    try:
        xd.compile(step)(torch.ones(3, device="xla"))
        assert gc.get_threshold()[0] == 1234
    finally:
        gc.set_threshold(*before)
