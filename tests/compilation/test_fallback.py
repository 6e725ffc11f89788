"""Steps whose Python can't be one program: it runs in every call, with a warning, as CPU torch has
it; or the call raises, where running it once more would do something twice.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import logging
import math
import os
import random
import signal
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.compilation import CompiledStep
from xla_dtensor.compilation.call.retraces import MANY_TRACES
from xla_dtensor.compilation.code import host_random
from xla_dtensor.compilation.step.base_step import TOLD
from xla_dtensor.runtime import processes

CALLS = 4

Step = Callable[..., Any]
Training = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture
def warnings_told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The warnings so far that a step runs its Python in every call."""
    with caplog.at_level(logging.WARNING, "xla_dtensor"):
        yield lambda: [m for m in caplog.messages if "runs in every call from now on" in m]


def falling(function: Step) -> CompiledStep:
    return xd.compile(function, watch="auto")


def training(kind: Any = torch.optim.SGD, **kwargs: Any) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    return model, kind(model.parameters(), **({"lr": 0.1} | kwargs))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, generator=generator) for _ in range(CALLS)]


def same(value: Any, expected: Any) -> bool:
    """Whether a result is the expected one, but for rounding."""
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        value = value.detach().cpu()
    if isinstance(value, torch.Tensor | np.ndarray | float):
        return np.allclose(value, expected, rtol=1e-4, atol=1e-6)
    if isinstance(value, tuple | list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(same(value[k], expected[k]) for k in value)
    return bool(value == expected)


# --- what a trace can't do -----------------------------------------------------------------------

After = Callable[[dict[str, Any], torch.Tensor], Any]
"""What a step does with its state and its loss, when it has taken a step; gives its result."""


def percent(state: dict[str, Any], loss: torch.Tensor) -> Any:
    return "%.3f" % loss.item()  # noqa: UP031 - as users write it


def padded(state: dict[str, Any], loss: torch.Tensor) -> Any:
    return f"{loss.item():.3f}".ljust(12) + "|"


def as_json(state: dict[str, Any], loss: torch.Tensor) -> Any:
    return json.dumps({"step": state["step"], "loss": round(loss.item(), 3)})


def decimal(state: dict[str, Any], loss: torch.Tensor) -> Any:
    return round(Decimal(loss.item()), 3)


def written(state: dict[str, Any], loss: torch.Tensor) -> Any:
    file = io.StringIO()
    file.write(f"loss {loss.item():.3f}\n")
    return file.getvalue()


def on_the_host(state: dict[str, Any], loss: torch.Tensor) -> Any:
    return loss.detach().cpu().numpy()


def decides(state: dict[str, Any], loss: torch.Tensor) -> Any:
    state["best"] = min(state.get("best", math.inf), loss.item())
    return state["best"]


def by_tensor(state: dict[str, Any], loss: torch.Tensor) -> Any:
    if torch.isnan(loss):
        raise ValueError("diverged")
    return loss.detach()


def by_size(state: dict[str, Any], loss: torch.Tensor) -> Any:
    return torch.nonzero(state["weight"].detach() > 0).shape[0]


def kept_by_number(state: dict[str, Any], loss: torch.Tensor) -> Any:
    state.setdefault("losses", {})[state["step"]] = loss.item()
    return dict(state["losses"])


def extended(state: dict[str, Any], loss: torch.Tensor) -> Any:
    state.setdefault("losses", [])
    state["losses"] += [loss.item()]
    return list(state["losses"])


def of_an_own_type(state: dict[str, Any], loss: torch.Tensor) -> Any:
    state["time"] = state.get("time", Decimal(0)) + Decimal("0.5")
    return state["time"], loss.detach()


AFTER: list[After] = [
    *(percent, padded, as_json, decimal, written, on_the_host, decides, by_tensor, by_size),
    *(kept_by_number, extended, of_an_own_type),
]


def made(after: After, given: Training) -> tuple[Step, dict[str, Any]]:
    model, optimizer = given
    state: dict[str, Any] = {"step": 0, "weight": next(model.parameters())}

    def step(x: torch.Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        return after(state, loss)

    return step, state


@pytest.mark.parametrize("after", AFTER, ids=lambda after: after.__name__)
def test_steps_that_are_no_program(after: After, warnings_told: Callable[[], list[str]]) -> None:
    on_cpu, there = training(), training()
    there[0].to("xla")
    refused = training()
    refused[0].to("xla")
    with pytest.raises((xd.DataDependentError, TypeError)):
        several_calls(made(after, refused)[0], batches()[0].to("xla"))
    expected, _ = made(after, on_cpu)
    step = falling(made(after, there)[0])
    for x in batches():
        assert same(step(x.to("xla")), expected(x))
    assert same(there[0].state_dict(), on_cpu[0].state_dict())
    assert len(warnings_told()) == 1


def several_calls(function: Step, *args: Any) -> None:
    """Enough calls, watched, for the refusal of each step here: some say so in a later one."""
    step = xd.compile(function, watch="trace")
    for _ in range(3):
        step(*args)


@pytest.mark.parametrize("after", [as_json, by_tensor], ids=lambda after: after.__name__)
def test_on_meshes(after: After, mesh: DeviceMesh) -> None:
    on_cpu, there = training(), training()
    first = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else ""
    rows = [Shard(0) if name == first else Replicate() for name in mesh.mesh_dim_names or ()]
    for module in there[0].modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = rows if parameter.shape[0] == 8 else [Replicate()] * mesh.ndim
            laid_out = distribute_tensor(parameter.data, mesh, cut)
            setattr(module, name, nn.Parameter(laid_out))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, distribute_tensor(buffer, mesh, [Replicate()] * mesh.ndim))
    optimizer = torch.optim.SGD(there[0].parameters(), lr=0.1)
    expected, _ = made(after, on_cpu)
    step = falling(made(after, (there[0], optimizer))[0])
    for x in batches():
        given = distribute_tensor(x, mesh, [Replicate()] * mesh.ndim)
        assert same(step(given), expected(x))


# --- what the first try did ----------------------------------------------------------------------


class Effects:
    """What a step does beside computing."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, list[int]()
        self.own, self.numpy = random.Random(3), np.random.default_rng(3)
        self.memory, self.counter = np.zeros(2), itertools.count()
        self.elements = iter(range(100))
        self.cpu, self.semaphore = torch.zeros(2), threading.Semaphore(50)

    def counts(self) -> Any:
        self.calls += 1
        self.seen.append(self.calls)
        self.cpu += 1
        return self.calls, self.cpu.tolist(), len(self.seen)

    def draws(self) -> Any:
        return random.random(), np.random.rand(), self.own.random(), self.numpy.random()

    def draws_by_torch(self) -> Any:
        return torch.rand(2).tolist()

    def counts_by_iterator(self) -> Any:
        return next(self.counter)

    def takes(self) -> Any:
        return next(self.elements)

    def writes_to_memory(self) -> Any:
        self.memory += 1
        return self.memory.tolist()

    def acquires(self) -> Any:
        self.semaphore.acquire()
        return self.semaphore._value


def with_effect(effect: Callable[[Effects], Any]) -> tuple[Step, Effects]:
    effects = Effects()

    def step(x: torch.Tensor) -> Any:
        did = effect(effects)
        return did, json.dumps({"sum": x.sum().item()})

    return step, effects


def seeded(call: Callable[[], Any]) -> Any:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    return call()


@pytest.mark.parametrize("effect", [Effects.counts, Effects.draws, Effects.draws_by_torch])
def test_what_the_first_try_did_is_taken_back(
    effect: Callable[[Effects], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_random, "others_run", lambda: False)  # a worker of xdist has some
    x = torch.ones(4)
    expected = with_effect(effect)[0]
    step = falling(with_effect(effect)[0])
    want = seeded(lambda: [expected(x) for _ in range(CALLS)])
    assert seeded(lambda: [step(x.to("xla")) for _ in range(CALLS)]) == want


@pytest.mark.parametrize(
    ("effect", "said"),
    [
        (Effects.counts_by_iterator, "takes the next element of"),
        (Effects.takes, "takes the next element of"),
        (Effects.writes_to_memory, "writes to"),
        (Effects.acquires, "acquires"),
    ],
)
def test_what_can_not_be_taken_back_is_not_done_twice(
    effect: Callable[[Effects], Any], said: str, warnings_told: Callable[[], list[str]]
) -> None:
    step = falling(with_effect(effect)[0])
    with pytest.raises((TypeError, xd.DataDependentError)) as error:
        step(torch.ones(4, device="xla"))
    note = error.value.__notes__[-1]  # others are JAX's
    assert said in note and 'watch="replay"' in note and warnings_told() == []
    # That is right from the first call on.
    function, _ = with_effect(effect)
    expected, _ = with_effect(effect)
    replayed = xd.compile(function, watch="replay")
    for _ in range(CALLS):
        assert replayed(torch.ones(4, device="xla")) == expected(torch.ones(4))


def test_hooks_of_a_tensor_are_taken_back() -> None:
    """Doubled they would double the gradients."""

    def made(device: str) -> Step:
        leaf = torch.ones(2, device=device, requires_grad=True)
        seen: list[int] = []

        def step(x: torch.Tensor) -> Any:
            leaf.register_hook(lambda grad: grad * 2)
            leaf.register_post_accumulate_grad_hook(lambda p: seen.append(1))
            json.dumps(x.sum().item())
            (leaf * x).sum().backward()
            grad, leaf.grad = leaf.grad, None
            return grad, len(seen)

        return step

    expected, step = made("cpu"), falling(made("xla"))
    for _ in range(CALLS):
        assert same(step(torch.ones(2, device="xla")), expected(torch.ones(2)))


def test_what_functions_keep_of_their_calls_is_taken_back() -> None:
    """Numbers, what they count, and tensors, which have no value in a trace."""

    def made(device: str) -> Step:
        state = {"calls": 0, "made": 0}

        @functools.lru_cache
        def numbered(key: int) -> int:
            state["made"] += 1
            return state["made"]

        @functools.cache
        def mask(n: int) -> torch.Tensor:
            return torch.tril(torch.ones(n, n, device=device))

        def step(x: torch.Tensor) -> Any:
            state["calls"] += 1
            text = json.dumps((x @ mask(2)).sum().item())
            return numbered(state["calls"] // 2), mask(2), text

        return step

    expected, step = made("cpu"), falling(made("xla"))
    for _ in range(CALLS):
        assert same(step(torch.ones(2, 2, device="xla")), expected(torch.ones(2, 2)))


def test_generators_and_files_that_are_under_way(tmp_path: Path) -> None:
    """A generator that stops at the same line each time has moved on all the same."""

    def counting() -> Iterator[int]:
        n = 0
        while True:
            n += 1
            yield n

    def nested() -> Iterator[int]:
        for _ in range(90):
            yield from (n for n in range(4))

    (tmp_path / "lines").write_text("1\n" * 99)
    with (tmp_path / "lines").open() as file:
        one, other = counting(), nested()
        next(one), next(other), file.readline()
        takes: list[Callable[[], Any]] = [
            *(lambda: next(one), lambda: next(other), file.readline),
            *(lambda: [n for n, _ in zip(one, range(2), strict=False)], lambda: file.read(1)),
        ]
        for take in takes:
            x = torch.ones(2, device="xla")
            with pytest.raises(xd.DataDependentError, match="takes the next element of"):
                falling(lambda x, take=take: x * int(bool(take())))(x)
            with pytest.raises(xd.DataDependentError) as error:
                falling(lambda x, take=take: (take(), json.dumps(x.sum().item())))(x)
            assert "takes the next element of" in error.value.__notes__[-1]


def test_errors_of_json_that_are_caught() -> None:
    """Who asks whether something can be written isn't told that a number can't."""

    def plain(value: Any) -> Any:
        try:
            json.dumps(value)
        except TypeError:
            return "no JSON"
        return value

    def step(x: torch.Tensor) -> Any:
        loss = x.sum().item()
        text = json.dumps([loss, x], default=lambda other: "not known")
        return plain(loss), plain(x) == "no JSON", text

    def counts(state: dict[str, int]) -> Any:
        state["n"] += 1
        return plain(state["n"])

    compiled = falling(step)
    for _ in range(2):
        assert compiled(torch.ones(2, device="xla")) == (2.0, True, '[2.0, "not known"]')
    counting, state = falling(counts), {"n": 0}
    assert [counting(state) for _ in range(7)] == [1, 2, 3, 4, 5, 6, 7]


def test_items_of_cpu_tensors_and_other_errors() -> None:
    count = torch.zeros(())

    def step(x: torch.Tensor, t: torch.Tensor) -> Any:
        count.add_(1)
        return json.dumps([t.sum().item(), count.item()]), struct.pack("d", x.sum().item())

    compiled = falling(step)
    for n in (1.0, 2.0, 3.0):
        given = compiled(torch.ones(2, device="xla"), torch.full((2,), n))
        assert given == (json.dumps([2 * n, n]), struct.pack("d", 2.0))


def test_files_that_the_first_try_has_made(tmp_path: Path) -> None:
    def step(x: torch.Tensor) -> Any:
        (tmp_path / "made").mkdir()
        return json.dumps(x.sum().item())

    with pytest.raises(FileExistsError) as error:
        falling(step)(torch.ones(2, device="xla"))
    assert "has run before" in error.value.__notes__[-1]


def test_what_it_prints_and_logs_is_there_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Before the line at which a trace can't go on, and of traces that are made again."""
    log, calls = logging.getLogger("of the user"), [0]
    log.setLevel(logging.INFO)

    def step(x: torch.Tensor, ends: str) -> torch.Tensor:
        calls[0] += 1  # the first trace finds that it is raised, the second one has it as an input
        print("call", calls[0], "of", ends)
        log.info("call %d", calls[0])
        if ends == "replayed":
            json.dumps(x.sum().item())
        if ends == "raising":
            raise KeyError(ends)
        return x * calls[0]

    compiled = falling(step)
    x = torch.ones(2, device="xla")
    for ends in ("traced", "replayed", "replayed", "traced"):
        assert compiled(x, ends)[0] == calls[0]
    with pytest.raises(KeyError):
        compiled(x, "raising")
    # A program's call doesn't run the Python.
    texts = ["call 1 of traced", "call 2 of replayed", "call 3 of replayed", "call 5 of raising"]
    assert capsys.readouterr().out.splitlines() == texts
    said = [r.getMessage() for r in caplog.records if r.name == "of the user"]
    assert said == ["call 1", "call 2", "call 3", "call 5"]


def test_a_debugger_sees_what_it_prints_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def asked(show: Callable[[], None]) -> None:
        show()

    stop = types.FunctionType(asked.__code__, {"__name__": "pdb"})

    @functools.partial(xd.compile, watch="trace")
    def step(x: torch.Tensor) -> torch.Tensor:
        stop(lambda: print("typed"))
        seen.append(capsys.readouterr().out)
        return x

    step(torch.ones(2, device="xla"))
    assert seen[0] == "typed\n"


def test_what_draws_while_other_threads_run() -> None:
    """Whose draws must stay drawn."""
    step = falling(with_effect(Effects.draws)[0])
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with pytest.raises((TypeError, xd.DataDependentError)) as error:
            step(torch.ones(4, device="xla"))
    finally:
        ended.set()
        thread.join()
    assert "draws random numbers" in error.value.__notes__[-1]


# --- which calls are programs --------------------------------------------------------------------


def test_calls_that_can_be_programs_are(warnings_told: Callable[[], list[str]]) -> None:
    """As the kind of arguments says, or a decision by a number that Python knows."""
    told: list[str] = []
    calls = [0]

    def step(x: torch.Tensor, tells: bool = False) -> torch.Tensor:
        calls[0] += 1
        loss = x.square().mean()
        if tells:
            told.append(json.dumps(loss.item()))
        return loss * calls[0]

    compiled = falling(step)
    x = torch.full((4,), 3.0, device="xla")
    results = [compiled(x, tells=i % 3 == 2).item() for i in range(9)]
    assert results == [9.0 * (i + 1) for i in range(9)]
    assert told == ["9.0"] * 3 and calls == [9]
    assert len(warnings_told()) == 1
    runs = [program.runs for program in compiled.programs()]
    assert sum(runs) == 6  # of nine; the others were replayed


@pytest.mark.parametrize("counts", [False, True], ids=["argument", "state"])
def test_the_first_call_may_be_the_one_that_writes(counts: bool) -> None:
    """It is tried again; and not in each of those calls."""
    state, written = {"n": 0}, []

    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        number = state["n"] if counts else n
        if number % 10 == 0:
            written.append(json.dumps(x.sum().item()))
        state["n"] += 1
        return x + number

    compiled = falling(step)
    x = torch.ones(2, device="xla")
    for n in range(100):
        assert compiled(x, n)[0] == 1 + n
    assert written == ["2.0"] * 10 and state["n"] == 100
    assert sum(program.runs for program in compiled.programs()) >= 85


def test_an_error_of_the_users_is_no_reason_for_good() -> None:
    wrong = [True]

    def step(x: torch.Tensor) -> float:
        total = x.sum().item()
        if wrong[0]:
            raise ValueError("a bad batch")
        return total

    compiled = falling(step)
    x = torch.ones(2, device="xla")
    with pytest.raises(ValueError, match="a bad batch"):
        compiled(x)
    wrong[0] = False
    assert [compiled(x) for _ in range(4)] == [2.0] * 4
    assert sum(program.runs for program in compiled.programs()) >= 3


def test_many_kinds_of_arguments_are_told_of_once(warnings_told: Callable[[], list[str]]) -> None:
    runs = [0]

    def step(x: torch.Tensor) -> str:
        runs[0] += 1
        return json.dumps(x.sum().item())

    compiled = falling(step)
    for n in range(1, 12):
        assert compiled(torch.ones(n, device="xla")) == f"{n}.0"
    assert runs == [11] and len(warnings_told()) == 1


def test_a_step_that_is_traced_in_every_call(warnings_told: Callable[[], list[str]]) -> None:
    """Its Python might as well run."""
    state = {"name": "a"}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * len(state["name"])

    compiled = falling(step)
    x = torch.ones(2, device="xla")
    for i in range(1, 12):
        state["name"] = "a" * i
        assert compiled(x)[0] == i
    assert len(warnings_told()) == 1 and compiled.programs()
    always = xd.compile(step, watch="trace")
    for i in range(1, 12):
        state["name"] = "a" * i
        always(x)
    assert len(always.programs()) > MANY_TRACES
    assert len(warnings_told()) == 1


def test_a_change_of_the_number_of_rows_is_no_reason(
    warnings_told: Callable[[], list[str]],
) -> None:
    step = falling(lambda x: x.sum())
    for rows in range(1, 10):
        assert step(torch.ones(rows, device="xla")) == rows
    assert warnings_told() == []


def test_many_recompilations_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """As of a step whose shapes depend on values, and are others in each call."""
    step = falling(lambda x: x[x > 0].sum())
    with caplog.at_level(logging.INFO, "xla_dtensor"):
        for n in range(2, TOLD + 6):
            x = torch.arange(TOLD + 6) < n
            assert step(torch.where(x, 1.0, -1.0).to("xla")) == n
    told = [r.levelno for r in caplog.records if "recompiled" in r.getMessage()]
    assert len(step.recompilations) > TOLD
    assert told.count(logging.WARNING) == TOLD + 1
    assert told.count(logging.INFO) == len(step.recompilations) - TOLD


# --- the step's methods --------------------------------------------------------------------------


def summed(x: torch.Tensor) -> str:
    return json.dumps(x.sum().item())


def test_what_the_step_says_of_itself() -> None:
    step = falling(summed)
    x = torch.ones(4, device="xla")
    assert step.why_not(x) == "the step has not been called yet"
    assert [step(x), step(x)] == ["4.0", "4.0"]
    assert "runs in every call" in str(step.why_not(x))
    assert step.compilations == step.traces == len(step.compiled_programs()) == 1
    x.add_(1)
    assert step.again() == "8.0"
    step.clear_cache()
    assert step.compiled_programs() == []
    with pytest.raises(RuntimeError, match="needs a call"):
        step.again()
    assert step(x) == "8.0" and step.compilations == 2
    with pytest.raises(RuntimeError, match="has run in place of a program"):
        step.layouts()
    with pytest.raises(xd.DataDependentError, match=r"\.item\(\)"):
        step.lower(x)


def test_again_follows_the_call_that_ran_last() -> None:
    step = falling(lambda x, tells: json.dumps(x.sum().item()) if tells else x.sum())
    x = torch.ones(4, device="xla")
    assert step(x, True) == "4.0" and step.again() == "4.0"
    assert step(x, False) == 4 and step.again() == 4
    assert step(x, True) == "4.0" and step.again() == "4.0"


def test_copies() -> None:
    step = falling(summed)
    for other in (copy.deepcopy(step), copy.copy(step)):
        assert other(torch.ones(2, device="xla")) == "2.0"
    strict = copy.deepcopy(xd.compile(summed, watch="trace"))
    with pytest.raises(xd.DataDependentError):
        strict(torch.ones(2, device="xla"))


def test_methods() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.total = 0.0

        @functools.partial(xd.compile, watch="auto")
        def step(self, x: torch.Tensor) -> str:
            self.total += x.sum().item()
            return json.dumps(self.total)

    one, other = Trainer(), Trainer()
    x = torch.ones(2, device="xla")
    assert [one.step(x), one.step(x), other.step(x)] == ["2.0", "4.0", "2.0"]


def test_in_a_step_around_it() -> None:
    inner = falling(lambda x: x * 2 if x.sum() > 0 else x)
    outer = falling(lambda x: inner(x) + 1)
    assert outer(torch.ones(2, device="xla"))[0] == 3
    assert outer(-torch.ones(2, device="xla"))[0] == 0


# --- what raises, as it did ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"watch": "trace"},
        {"audit": 2},
        {"checks": False},
        {"layouts": "step"},
        {"buckets": {"x": {0: (4, 8)}}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_a_replayed_step_does_not_know(asked: dict[str, Any]) -> None:
    with xd.config.override(watch="auto"):
        step = xd.compile(lambda x: x * 2 if x.sum() > 0 else x, **asked)
    with pytest.raises(xd.DataDependentError):
        step(torch.ones(4, device="xla"))


def test_the_switch() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x

    x = torch.ones(4, device="xla")
    with xd.config.override(watch="trace"):
        with pytest.raises(xd.DataDependentError):
            xd.compile(step)(x)
        assert xd.compile(step, watch="auto")(x)[0] == 2
    with xd.config.override(watch="auto"):
        assert xd.compile(step)(x)[0] == 2
    with pytest.raises(ValueError, match="'auto' or 'trace'"):
        xd.config.watch = "replay"  # type: ignore[assignment]
    with pytest.raises(ValueError, match='"auto", "trace" or "replay"'):
        xd.compile(step, watch="always")


def test_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    step = falling(summed)
    x = torch.ones(4, device="xla")
    fallback = step._fallback
    assert fallback is not None
    error = xd.DataDependentError("no")
    monkeypatch.setattr(processes, "several", lambda: True)
    from xla_dtensor.compilation.step.fallback import Begun

    assert not fallback.serves(error, Begun())
    assert "in several this is an error" in error.__notes__[0]
    monkeypatch.undo()
    assert step(x) == "4.0"


def test_iterators_among_the_arguments() -> None:
    step = falling(lambda rows: json.dumps(next(rows).sum().item()))
    with pytest.raises(xd.DataDependentError):
        step(iter([torch.ones(2, device="xla")] * 3))


def _smaller(kept: dict[str, Any], x: Any) -> Any:
    kept["b"].resize_(len(kept["b"]) - 1).add_(2.0)
    return kept["b"].sum() * x.sum()


def _transposed(kept: dict[str, Any], x: Any) -> Any:
    kept["m"].t_()
    return kept["m"][0].sum() + x.sum()


def _other_memory(kept: dict[str, Any], x: Any) -> Any:
    kept["b"].set_(torch.cat([x, kept["b"]]))
    return kept["b"].sum()


def _another_dim(kept: dict[str, Any], x: Any) -> Any:
    kept["m"].unsqueeze_(0)
    return kept["m"].sum(0).prod() * x.sum()


def _a_row_by_tensor(kept: dict[str, Any], x: Any) -> Any:
    kept["m"][x.argmax()].add_(1)
    return kept["m"].sum()


def _swapped(kept: dict[str, Any], x: Any) -> Any:
    kept["m"].add_(x)  # before what can't be traced: it must be there once
    kept["m"].transpose_(0, 1)
    kept["m"].transpose_(0, 1)
    return kept["m"].sum()


@pytest.mark.parametrize(
    "step", [_smaller, _transposed, _other_memory, _another_dim, _a_row_by_tensor, _swapped]
)
def test_what_eager_code_alone_can_do(step: Callable[[dict[str, Any], Any], Any]) -> None:
    """It gives what CPU torch gives, and with ``watch="trace"`` says that it can't."""

    def kept(device: str) -> dict[str, Any]:
        return {"b": torch.ones(4).to(device), "m": torch.arange(12.0).view(3, 4).to(device)}

    x, on_cpu, on_xla = torch.tensor([0.0, 1.0, 2.0, 1.0]), kept("cpu"), kept("xla")
    compiled = xd.compile(functools.partial(step, on_xla), watch="auto")
    for _ in range(3):
        assert compiled(x.to("xla")).item() == step(on_cpu, x).item()
        for name, right in on_cpu.items():
            assert torch.equal(on_xla[name].cpu(), right)
    with pytest.raises(xd.NotInStepError):
        xd.compile(functools.partial(step, kept("xla")), watch="trace")(x.to("xla"))


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, xd.UnsupportedOpError])
def test_errors_of_the_users(kind: type[Exception]) -> None:
    """One that has nothing to do with values is raised by the trace; one behind an item by the
    Python that runs, alone, with torch's effects up to there."""
    weight = torch.zeros(2, device="xla")

    def step(x: torch.Tensor, asks: bool) -> torch.Tensor:
        weight.add_(1)
        if asks:
            json.dumps(x.sum().item())
        raise kind("the user's")

    compiled = falling(step)
    x = torch.ones(2, device="xla")
    with pytest.raises(kind, match="the user's"):
        compiled(x, False)
    assert weight.tolist() == [0, 0]
    for calls in (1, 2):
        with pytest.raises(kind, match="the user's") as error:
            compiled(x, True)
        assert error.value.__context__ is None
        assert weight.tolist() == [calls, calls]


# --- threads and interrupts ----------------------------------------------------------------------


def test_threads_share_it() -> None:
    state = {"n": 0}

    def step(x: torch.Tensor) -> str:
        state["n"] += 1
        return json.dumps((x.sum() * 2).item())

    compiled = falling(step)
    found: list[tuple[int, str]] = []

    def work(i: int) -> None:
        found.extend((i, compiled(torch.full((4,), float(i), device="xla"))) for _ in range(5))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and all(text == json.dumps(8.0 * i) for i, text in found)
    assert state["n"] == 20


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_an_interrupt_comes_into_its_python() -> None:
    weight = torch.zeros(2, device="xla")

    def step(x: torch.Tensor, waits: bool) -> str:
        text = json.dumps(x.sum().item())
        if waits:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        weight.add_(1)
        return text

    compiled = falling(step)
    x = torch.ones(2, device="xla")
    assert compiled(x, False) == "2.0"
    begin = time.monotonic()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compiled(x, True)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - begin < 10
    assert weight.tolist() == [1, 1]
    assert compiled(x, False) == "2.0" and weight.tolist() == [2, 2]


def test_a_scaler_that_the_step_makes() -> None:
    """Its scale would be an input of the program that the first call is traced for."""
    kept: dict[str, Any] = {}

    def step(x: Any) -> Any:
        if "scaler" not in kept:
            kept["scaler"] = torch.amp.GradScaler("xla", init_scale=64.0)
        return kept["scaler"].scale(x.sum())

    x = torch.ones(3, device="xla")
    with pytest.raises(xd.DataDependentError, match=r"GradScaler.*outside"):
        xd.compile(step, watch="trace")(x)
    assert not kept
    compiled = xd.compile(step, watch="auto")
    assert [compiled(x).item() for _ in range(3)] == [192.0] * 3
    assert kept["scaler"].get_scale() == 64.0


class _Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def _another_class(model: Any, x: Any) -> Any:
    y = model.first(x)
    model.first.__class__ = _Doubled
    return y


def _rotated_and_swapped(model: Any, x: Any) -> Any:
    y = model.first(x) + model.parts[0](x)
    model.first, model.other = model.other, model.first
    model.parts.append(model.parts.pop(0))
    return y


def _caught(model: Any, x: Any) -> Any:
    try:
        model.first.bias.data.resize_(1, 3)
        model.kept.t_()
    except Exception:
        return model.first(x) * 0
    return model.first(x) + model.kept[0].sum()


@pytest.mark.parametrize("step", [_another_class, _rotated_and_swapped, _caught])
def test_modules_that_the_step_changes(step: Callable[[Any, Any], Any]) -> None:
    def program(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Module()
        model.first, model.other = nn.Linear(3, 3), nn.Linear(3, 3)
        model.parts = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        model.kept = torch.arange(6.0).view(2, 3).to(device)
        model.to(device)
        run = functools.partial(step, model)
        if device == "xla":
            run = xd.compile(run, watch="auto")
        x = torch.ones(2, 3, device=device)
        found = [run(x * i).detach().cpu() for i in range(4)]
        return [*found, *(p.detach().cpu() for p in model.parameters())]

    for mine, right in zip(program("xla"), program("cpu"), strict=True):
        torch.testing.assert_close(mine, right)
