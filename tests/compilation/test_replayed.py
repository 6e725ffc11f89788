"""``watch="replay"``: the step's Python runs in every call, and one program computes what it asks.

What changes between two calls is in the table (`test_changes.py`), which runs in this mode too.
"""

from __future__ import annotations

import functools
import gc
import io
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.conftest import make_mesh


def replayed(function: Callable[..., Any]) -> Any:
    return xd.compile(function, watch="replay")


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def training(
    model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], calls: list[int]
) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    """A step that does what users' steps do, and counts its calls."""
    made = optimizer(model.parameters())

    def step(x: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(len(calls))
        loss = model(x).square().mean() * scale
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        made.zero_grad()
        return loss.detach()

    return step, made


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam-loop": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shape", ["2x4", "8"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_program_for_all_calls(name: str, shape: str) -> None:
    """Losses and parameters are CPU torch's; numbers and learning rates are inputs; the first
    step, which makes the optimizer's state, has the program of all others."""
    mesh = make_mesh(shape)
    expected, actual = [], []
    ran: list[int] = []
    models = mlp(), mlp()
    xd.distribute_module(models[1], mesh)
    steps = []
    for model, place, seen in zip(
        models,
        (
            lambda t: t,
            lambda t: distribute_tensor(t, mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1)),
        ),
        (expected, actual),
        strict=True,
    ):
        calls = ran if seen is actual else []
        step, optimizer = training(model, OPTIMIZERS[name], calls)
        if seen is actual:
            step = replayed(step)
            steps.append(step)
        for i in range(5):
            seen.append(step(place(numbers(i, 8, 16)), 1.0 + i).item())
            optimizer.param_groups[0]["lr"] *= 0.5
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    for ours, right in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor().cpu(), right, rtol=1e-4, atol=1e-5)
    assert len(ran) == 5
    assert (steps[0].compilations, steps[0].recompilations) == (1, [])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_double_precision(name: str) -> None:
    """Also of state that an optimizer makes in its first step."""
    models = mlp().double(), mlp().double().to("xla")
    steps = [training(model, OPTIMIZERS[name], [])[0] for model in models]
    steps[1] = replayed(steps[1])
    for i in range(3):
        x = numbers(i, 8, 16).double()
        loss, ours = steps[0](x, 1.0), steps[1](x.to("xla"), 1.0)
        torch.testing.assert_close(ours.cpu(), loss, rtol=1e-12, atol=1e-12)
    for actual, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(actual.detach().cpu(), expected, rtol=1e-9, atol=1e-12)


def test_what_is_overwritten_is_taken_over(mesh_2x4: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(numbers(0, 8, 16), mesh_2x4, [Shard(0), Shard(1)]))
    kept = distribute_tensor(numbers(1, 8, 16), mesh_2x4, [Shard(0), Shard(1)])

    @replayed
    def step() -> None:
        with torch.no_grad():
            weight.add_(kept)

    expected = numbers(0, 8, 16)
    for _ in range(3):
        before, other = weight.jax_array, kept.jax_array
        step()
        expected += numbers(1, 8, 16)
        assert before.is_deleted()
        assert not other.is_deleted()
    torch.testing.assert_close(weight.full_tensor().cpu().detach(), expected)


def test_values_are_read_in_the_middle(mesh_2x4: DeviceMesh) -> None:
    """``.item()`` waits for the value; what it decides is another sequence of operations."""
    x = distribute_tensor(torch.ones(8, 4), mesh_2x4, [Shard(0), Replicate()])

    @replayed
    def step(n: int) -> tuple[torch.Tensor, float]:
        y = x * n
        total = y.sum().item()
        return (y + 1 if total > 100 else y - 1), total

    for n in (1, 5, 2, 7):
        result, total = step(n)
        assert total == 32.0 * n
        assert torch.equal(
            result.full_tensor().cpu(), torch.full((8, 4), n + (1.0 if n > 3 else -1.0))
        )
    assert step.compilations == 3
    (why,) = step.recompilations  # the second program of the first call came in no other's place
    assert "from aten::sub.Tensor to aten::add.Tensor" in why


def test_a_recompilation_names_the_line(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 4), mesh_2x4, [Shard(0), Replicate()])
    hyper = {"power": 2}

    @replayed
    def step() -> torch.Tensor:
        return (x * 3).pow(hyper["power"]) if hyper["power"] < 4 else (x * 3).exp()

    step()
    hyper["power"] = 5
    step()
    (line,) = step.recompilations
    assert line.startswith("operation 2: from aten::pow")
    assert "test_replayed.py" in line
    assert 'pow(hyper["power"])' in line


@pytest.mark.slow
def test_garbage_makes_few_programs(mesh_2x4: DeviceMesh) -> None:
    """What only cycles hold when the step ends is there or not as Python's collector likes."""
    x = distribute_tensor(numbers(0, 8, 4), mesh_2x4, [Shard(0), Replicate()])

    @replayed
    def step(collect: int) -> torch.Tensor:
        y = x
        for i in range(4):
            y = y.sin()
            cycle: list[Any] = [y]
            cycle.append(cycle)
            if i == collect:
                gc.collect()
        return y

    expected = numbers(0, 8, 4).sin().sin().sin().sin()
    gc.disable()
    try:
        for i in range(24):
            torch.testing.assert_close(step(i % 6).full_tensor().cpu(), expected)
    finally:
        gc.enable()
    assert step.compilations <= 3, step.recompilations


def test_a_call_collects_no_garbage_and_leaves_the_settings_alone(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(numbers(1, 8, 16), mesh_2x4, [Shard(0), Replicate()])
    before, seen = gc.get_threshold(), []

    def step(fails: bool) -> torch.Tensor:
        collected = gc.get_stats()[0]["collections"]
        y = x
        for _ in range(400):
            y = y + 1
        seen.append(gc.get_stats()[0]["collections"] - collected)
        if fails:
            raise ValueError("mine")
        return y

    run = replayed(step)
    run(False)
    assert torch.allclose(run(False).full_tensor().cpu(), numbers(1, 8, 16) + 400)
    with pytest.raises(ValueError, match="mine"):
        run(True)
    assert seen[1:] == [0, 0] and gc.get_threshold() == before


def test_destructors_are_part_of_the_call(mesh_2x4: DeviceMesh) -> None:
    """What an object that is garbage in a cycle does when it goes is as right as what else runs,
    whether that is in the middle of the step or at its end."""
    count = distribute_tensor(torch.zeros(8, 4), mesh_2x4, [Shard(0), Replicate()])

    class Counts:
        def __del__(self) -> None:
            count.add_(1)

    @replayed
    def step(n: int, reads: bool) -> torch.Tensor:
        mine: Any = Counts()
        mine.cycle = mine
        del mine
        y = count * 0 + 1
        for _ in range(n):  # another program each time, so that garbage is collected
            y = y + 1
        return y * y.mean().item() if reads else y

    gc.collect()
    gc.disable()
    try:
        for n, reads in ((1, False), (2, True), (3, False), (4, True)):
            value = step(n, reads).full_tensor().cpu()
            assert torch.equal(value, torch.full((8, 4), (n + 1.0) ** (2 if reads else 1)))
            assert torch.equal(count.full_tensor().cpu(), torch.full((8, 4), float(n)))
    finally:
        gc.enable()


def test_recomputation_saves_memory() -> None:
    """A block under ``torch.utils.checkpoint`` is computed again in backward, not kept."""

    def step_of(again: bool) -> Any:
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(4)
        ]
        model = nn.ModuleList(layers).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @replayed
        def step(x: torch.Tensor) -> torch.Tensor:
            for layer in model:
                x = x + (checkpoint(layer, x, use_reentrant=False) if again else layer(x))
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        loss = step(numbers(0, 64, 32).to("xla")).item()
        return loss, step.compiled_programs()[-1].as_text().count(" erf(")

    plain, again = step_of(False), step_of(True)
    assert plain[0] == pytest.approx(again[0])
    assert again[1] > plain[1]


def test_random_numbers_are_those_of_eager_code(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 16), mesh_2x4, [Shard(0), Shard(1)])
    draw = lambda: torch.rand_like(x) + nn.functional.dropout(x, 0.5)
    torch.manual_seed(3)
    expected = [draw().full_tensor().cpu() for _ in range(3)]
    torch.manual_seed(3)
    step = replayed(draw)
    for right in expected:
        assert torch.equal(step().full_tensor().cpu(), right)
    assert step.compilations == 1


def test_steps_in_steps(mesh_2x4: DeviceMesh) -> None:
    """Whichever is outside, the inner one is part of it."""
    x = distribute_tensor(numbers(0, 8, 4), mesh_2x4, [Shard(0), Replicate()])
    for outer_watch in ("auto", "replay"):
        for inner_watch in ("auto", "replay"):
            inner = xd.compile(lambda y: y * 2 + 1, watch=inner_watch)
            outer = xd.compile(lambda y, inner=inner: inner(y.sin()).cos(), watch=outer_watch)
            for _ in range(2):
                expected = (numbers(0, 8, 4).sin() * 2 + 1).cos()
                torch.testing.assert_close(outer(x).full_tensor().cpu(), expected)
            assert (outer.compilations, inner.compilations) == (1, 0)


def test_threads(mesh_2x4: DeviceMesh) -> None:
    """Two threads share a step; a third reads what they write, in the middle of it."""
    x = distribute_tensor(torch.zeros(8, 4), mesh_2x4, [Shard(0), Replicate()])
    own = [distribute_tensor(torch.zeros(8, 4), mesh_2x4, [Shard(0), Replicate()]) for _ in "ab"]
    shared = distribute_tensor(torch.ones(8, 4), mesh_2x4, [Shard(0), Replicate()])

    @replayed
    def step(mine: torch.Tensor) -> torch.Tensor:
        mine.add_(shared)
        return mine * 2

    failures: list[BaseException] = []
    done = threading.Event()

    def train(mine: torch.Tensor) -> None:
        try:
            for i in range(20):
                assert step(mine).full_tensor()[0, 0].item() == 2.0 * (i + 1)
        except BaseException as error:
            failures.append(error)

    def look() -> None:
        try:
            while not done.is_set():
                values = own[0].full_tensor().cpu()
                assert torch.equal(values, values[:1, :1].expand(8, 4))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(mine,)) for mine in own]
    watcher = threading.Thread(target=look)
    watcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert not failures, failures
    assert torch.equal(own[1].full_tensor().cpu(), torch.full((8, 4), 20.0))
    assert torch.equal(x.full_tensor().cpu(), torch.zeros(8, 4))


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "to the host": lambda w: w.cpu(),
    "an element": lambda w: w[3, 3].cpu(),
    "an operation": lambda w: (w * 2 + 1).sum().cpu(),
    "a checkpoint": lambda w: torch.save(w, io.BytesIO()),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("eager", ["lazy", "strict"])
@pytest.mark.parametrize("watch", ["auto", "replay"])
@pytest.mark.parametrize("look", LOOKS)
def test_another_thread_looks_at_what_is_taken_over(
    look: str, watch: Any, eager: str, request: pytest.FixtureRequest
) -> None:
    """A thread that looks at parameters (saves them, evaluates) sees them before a step or after
    it, and disturbs no step."""
    if eager == "strict":
        request.getfixturevalue("strict_eager")
    weight = torch.zeros(256, 256).to("xla")

    @functools.partial(xd.compile, watch=watch, audit=0)  # in a trace there are no values
    def step() -> None:
        weight.add_(1)

    step()
    LOOKS[look](weight)
    done, failures = threading.Event(), []

    def train() -> None:
        try:
            while not done.is_set():
                step()
                steps.append(1)
        except BaseException as error:
            failures.append(error)

    steps = [1]
    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(30):
            LOOKS[look](weight)
            seen = weight.cpu()
            assert torch.equal(seen, seen[:1, :1].expand(256, 256))
    finally:
        done.set()
        trainer.join()
    assert not failures, failures
    assert len(steps) > 1
    assert torch.equal(weight.cpu(), torch.full((256, 256), float(len(steps))))


def test_threads_started_in_the_step(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8, 4), mesh_2x4, [Shard(0), Replicate()])

    @replayed
    def step(n: int) -> torch.Tensor:
        found: list[torch.Tensor] = []
        y = x * n
        thread = threading.Thread(target=lambda: found.append(y + n))
        thread.start()
        thread.join()
        return found[0] * 10

    for n in (1, 2, 5):
        assert torch.equal(step(n).full_tensor().cpu(), torch.full((8, 4), 20.0 * n))


def test_nothing_of_a_call_stays(mesh_2x4: DeviceMesh) -> None:
    """The programs hold no tensor of the step's."""
    model = xd.distribute_module(mlp(), mesh_2x4)
    step = replayed(lambda x, model=model: model(x).sum())
    step(distribute_tensor(numbers(0, 8, 16), mesh_2x4, [Shard(0), Replicate()])).item()
    alive = weakref.ref(model[0].weight)
    step._function = step.__wrapped__ = None
    del model
    gc.collect()
    assert alive() is None


class CountingSgd(torch.optim.Optimizer):
    """Its state is on the default device, whatever the parameters are on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if "offset" not in self.state[p]:
                self.state[p]["offset"] = torch.zeros(3, device="xla")
            p.sub_(p.grad, alpha=0.1)


def test_state_that_lies_nowhere_lies_where_the_step_does(mesh_2x4: DeviceMesh) -> None:
    q = nn.Parameter(distribute_tensor(numbers(0, 8), mesh_2x4, [Shard(0), Replicate()]))
    optimizer = CountingSgd([q])

    @replayed
    def step() -> None:
        q.square().sum().backward()
        optimizer.step()
        q.grad = None

    step()
    step()
    offset = optimizer.state[q]["offset"]
    ones = distribute_tensor(torch.ones(3), mesh_2x4, [Replicate(), Replicate()])
    assert torch.equal((ones + offset).full_tensor().cpu(), torch.ones(3))
    with pytest.raises(xd.MeshMismatchError):
        distribute_tensor(torch.ones(3), xd.init_device_mesh("xla", (4,)), [Replicate()]) + offset
    torch.testing.assert_close(q.full_tensor().detach().cpu(), numbers(0, 8) * 0.64)


def test_the_arguments_of_compile() -> None:
    with pytest.raises(ValueError, match="watch='never'"):
        xd.compile(lambda: None, watch="never")  # type: ignore[call-overload]
    for option in ({"audit": 1}, {"checks": True}):
        with pytest.raises(ValueError, match="replay"):
            xd.compile(lambda: None, watch="replay", **option)  # type: ignore[call-overload]


def test_methods_and_clearing() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        @replayed
        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.count

    counter, x = Counter(), torch.ones(4, device="xla")
    assert [counter.step(x)[0].item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert Counter.step.compilations == 1
    Counter.step.clear_cache()
    assert Counter.step.compiled_programs() == []
    assert counter.step(x)[0].item() == 4.0
    assert Counter.step.compilations == 2
