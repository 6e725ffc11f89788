"""What changes from call to call and needn't be traced for: how often a step's Python runs, and how
often XLA compiles. Values are those of plain CPU torch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.compilation.program import programs

Function = Callable[..., Any]

X = torch.arange(16 * 8.0).reshape(16, 8) / 10


def on_mesh(mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(X, mesh, [Shard(0), Replicate()])


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()


def outcome(function: Function, *args: Any) -> Any:
    """Its result on the CPU, or the kind of error that it raises."""
    try:
        return whole(function(*args))
    except (IndexError, ValueError, RuntimeError, ArithmeticError, TypeError) as error:
        return type(error)


def assert_same(actual: Any, expected: Any, text: object) -> None:
    if isinstance(expected, type):
        assert actual is expected, text
    else:
        assert not isinstance(actual, type), (text, actual)
        torch.testing.assert_close(actual, expected, msg=str(text))


# --- positions -----------------------------------------------------------------------------------


def written(x: torch.Tensor, n: int) -> torch.Tensor:
    y = x * 1
    y[n] = 7.0
    y[:, n].add_(3)
    y.select(0, n).mul_(2)
    return y


def written_range(x: torch.Tensor, n: int) -> torch.Tensor:
    y = x * 1
    y[n : n + 2] = x[2:4]
    y.narrow(1, n, 3).zero_()
    return y


def gradients(x: torch.Tensor, n: int) -> torch.Tensor:
    w = x.detach().clone().requires_grad_()
    (w[n].sin().sum() + (w[:, n : n + 2] ** 2).sum() + w.narrow(0, n, 3).cos().sum()).backward()
    return w.grad


def written_behind(x: torch.Tensor, n: int) -> torch.Tensor:
    """The view shows what is written to what it is of."""
    y = x * 1
    row = y[n]
    y.add_(1)
    return row * 2


INDEXED: dict[str, Function] = {
    "row": lambda x, n: x[n] * 2,
    "column": lambda x, n: x[:, n] * 2,
    "from_the_end": lambda x, n: x[-n - 1] * 2,
    "computed": lambda x, n: x[2 * n % 5 + 1] * 2,
    "element": lambda x, n: x[n, n] + 1,
    "ellipsis_and_new_dim": lambda x, n: x[..., n, None] * n,
    "of_a_view": lambda x, n: x.view(4, 4, 8)[1, n % 4, 1:].t() * 2,
    "of_a_constant": lambda x, n: torch.arange(30, device=x.device)[n] * x,
    "then_others": lambda x, n: x[n].unsqueeze(0)[0, 1:3] + 0,
    "with_a_mask": lambda x, n: x[n, torch.arange(3, device=x.device)] * 1,
    "select": lambda x, n: x.select(1, n) + 1,
    "narrow": lambda x, n: x.narrow(0, n, 3) * 2,
    "range": lambda x, n: x[n + 1 : n + 4] * 2,
    "written": written,
    "written_range": written_range,
    "written_behind": written_behind,
    "gradients": gradients,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(INDEXED))
def test_positions_are_inputs(mesh_2x4: DeviceMesh, name: str) -> None:
    function = INDEXED[name]
    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for n in (3, 1, 2, 4, 5, 3, 1):
        torch.testing.assert_close(whole(step(x, n)), function(X, n), msg=f"{name} {n}")
    assert step.traces == 2, step.recompilations


OTHERWISE: dict[str, Function] = {
    "a_view_is_returned": lambda x, n: x[n],
    "a_view_of_a_view": lambda x, n: (x * 1)[n][1:],
    "as_strided": lambda x, n: (x * 1)[n].as_strided((2,), (1,)) * 1,
    "where_it_begins": lambda x, n: x * x[n].storage_offset(),
    "prefix": lambda x, n: x[:n] * 2,
    "suffix": lambda x, n: x[n:] * 2,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [*INDEXED, *OTHERWISE])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_position_is_what_torch_makes_of_it(mesh_2x4: DeviceMesh, name: str, seed: int) -> None:
    """Negative ones, and those out of range, for which it raises."""
    function = (INDEXED | OTHERWISE)[name]
    step, draw = xd.compile(function), random.Random(f"{name} {seed}")
    placed = draw.choice(([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]))
    x = X.to("xla") if name == "where_it_begins" else distribute_tensor(X, mesh_2x4, placed)
    for _ in range(9):
        n = draw.choice((draw.randint(-9, 9), draw.randint(-20, 20), True, 2**40))
        assert_same(outcome(step, x, n), outcome(function, X, n), (name, n))


def test_a_view_at_a_number_that_is_kept_shares_memory() -> None:
    """A step that gives it away has a program per position, and its other numbers stay inputs."""
    step = xd.compile(lambda x, n, t: (x * t, x[n]))
    x = X.to("xla")
    for n, t in ((1, 0.5), (2, 0.25), (2, 0.125), (1, 3.0), (2, 7.0)):
        scaled, row = step(x, n, t)
        torch.testing.assert_close(whole(scaled), X * t)
        row.add_(1)
        X_now = whole(x)
        torch.testing.assert_close(whole(row), X_now[n])
        row.sub_(1)
    assert step.traces == 3


# --- numbers that aren't arguments themselves -----------------------------------------------------


@dataclasses.dataclass
class Settings:
    scale: float
    shift: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    scale: float
    shift: int = 1


class Holder:
    scale: float = 1.0

    def __init__(self) -> None:
        self.scale = 1.0
        self.table = {"k": 1}
        self.list = [1.0, 2.0]


SCALE = 1.0


def of_closure() -> tuple[Function, Function]:
    n = 1.0

    def change(i: Any) -> tuple[Any, ...]:
        nonlocal n
        n = i
        return ()

    return lambda x: x * n, change


def of_global() -> tuple[Function, Function]:
    def change(i: Any) -> tuple[Any, ...]:
        global SCALE
        SCALE = i
        return ()

    return lambda x: x * SCALE, change


def of_attributes() -> tuple[Function, Function]:
    holder = Holder()

    def change(i: Any) -> tuple[Any, ...]:
        holder.scale, holder.table["k"], holder.list[1] = i, i * 2, i + 1
        return ()

    return lambda x: x * holder.scale + holder.table["k"] * holder.list[1], change


def of_a_class() -> tuple[Function, Function]:
    class Own(Holder):
        pass

    def change(i: Any) -> tuple[Any, ...]:
        Own.scale = i
        return ()

    return lambda x: x * Own.scale, change


def of_a_module() -> tuple[Function, Function]:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    module = Scaled()

    def change(i: Any) -> tuple[Any, ...]:
        module.scale = i
        return ()

    return lambda x: module(x), change


def of_a_captured_dataclass() -> tuple[Function, Function]:
    settings = Settings(1.0)

    def change(i: Any) -> tuple[Any, ...]:
        settings.scale, settings.shift = i, i
        return ()

    return lambda x: x * settings.scale + settings.shift, change


def argument(function: Function, make: Function) -> Function:
    return lambda: (function, lambda i: (make(i),))


PLACES: dict[str, Function] = {
    "closure": of_closure,
    "global": of_global,
    "attributes": of_attributes,
    "class": of_a_class,
    "module": of_a_module,
    "captured_dataclass": of_a_captured_dataclass,
    "dataclass": argument(lambda x, d: x * d.scale + d.shift, lambda i: Settings(i, i)),
    "frozen_dataclass": argument(lambda x, d: x * d.scale + d.shift, lambda i: Frozen(i, i)),
    "dataclass_in_another": argument(
        lambda x, d: x * d["a"].scale.scale + d["a"].shift, lambda i: {"a": Frozen(Settings(i), i)}
    ),
    "iterator": argument(lambda x, ns: x * next(ns) + next(ns), lambda i: iter([i] * 4)),
    "replaced_dataclass": argument(
        lambda x, d: x * dataclasses.replace(d, shift=3).scale, lambda i: Settings(i, 4)
    ),
    "dataclasses_in_a_list": argument(
        lambda x, ds: x * ds[0].scale + ds[1].scale, lambda i: [Settings(i), Settings(i + 1)]
    ),
    "float32": argument(lambda x, s: x * s + (s * 3 - 1), np.float32),
    "float64": argument(lambda x, s: x * s - s / 3, np.float64),
    "int64": argument(lambda x, s: x * s - s // 3, np.int64),
    "int32": argument(lambda x, s: x + (s * s) % 7, lambda i: np.int32(i)),
}


@pytest.mark.parametrize("name", list(PLACES))
def test_numbers_that_change_are_inputs(mesh_2x4: DeviceMesh, name: str) -> None:
    function, change = PLACES[name]()
    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for i in range(8):
        args = change(i)
        torch.testing.assert_close(whole(step(x, *args)), function(X, *args), msg=f"{name} {i}")
    assert (step.traces, step.compilations) == (2, 2), step.recompilations


VALUES = (0.0, -0.0, 1, 1.0, True, 3, -2, 0.3, 2**40, 2**70, -1.5, False, 0, np.float32(0.1))


def decided(value: Any) -> Any:
    if value > 2:
        return value * 2
    return 1.0 / value if value else np.copysign(3.0, value)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [n for n in PLACES if n not in ("int64", "int32")])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_number_in_any_place(mesh_2x4: DeviceMesh, name: str, seed: int) -> None:
    """Types, signs of zero and large numbers change from call to call."""
    function, change = PLACES[name]()
    step, x, draw = xd.compile(function), on_mesh(mesh_2x4), random.Random(f"{name} {seed}")
    for _ in range(12):
        value = draw.choice(VALUES)
        if "float" in name and not isinstance(value, np.generic) and abs(value) > 2**60:
            continue
        args = change(value)
        expected, actual = outcome(function, X, *args), outcome(step, x, *args)
        assert_same(actual, expected, (name, value))
        if not isinstance(expected, type):
            assert torch.equal(actual.signbit(), expected.signbit()), (name, value)


def test_decisions_by_scalars_of_numpy(mesh_2x4: DeviceMesh) -> None:
    """They divide by zero, and round in their own precision."""
    step, x = xd.compile(lambda x, s: x * decided(s)), on_mesh(mesh_2x4)
    with np.errstate(divide="ignore"):
        for value in (0.1, 3.0, 0.0, -0.0, -1.5, 2.5, 0.3):
            for kind in (np.float32, np.float64, np.float16):
                expected = X * decided(kind(value))
                torch.testing.assert_close(whole(step(x, kind(value))), expected, msg=f"{value}")


def test_one_dataclass_twice_is_not_two(mesh_2x4: DeviceMesh) -> None:
    def function(x: torch.Tensor, a: Settings, b: Settings) -> torch.Tensor:
        return x * a.scale + b.scale

    step, x = xd.compile(function), on_mesh(mesh_2x4)
    for i in range(3):
        one = Settings(float(i))
        torch.testing.assert_close(whole(step(x, one, one)), function(X, one, one))
    for i in range(3):
        two = Settings(float(i)), Settings(i + 5.0)
        torch.testing.assert_close(whole(step(x, *two)), function(X, *two))
        assert [two[0].scale, two[1].scale] == [float(i), i + 5.0]


# --- what is printed -----------------------------------------------------------------------------

LOG = logging.getLogger("tests.cliffs")


def test_numbers_that_are_only_printed(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    def function(x: torch.Tensor, n: int, t: float) -> torch.Tensor:
        print(f"step {n:03d} of {t:.2f}", n, "%d" % n, f"{n} {t}", str(n), repr(t))  # noqa: UP031
        print("step " + str(n), end="\n")
        LOG.info("n is %d, t is %.1f", n, t)
        LOG.info(f"{n!r} and {t}")
        LOG.warning("%(n)s", {"n": n})
        return x * n * t

    step = xd.compile(function, audit=0)  # which would print, too
    x = torch.ones(2, device="xla")
    with caplog.at_level("INFO", LOG.name):
        for n, t in ((1, 0.5), (2, 0.25), (3, 0.75), (4, 0.5), (5, 0.125)):
            assert step(x, n, t).tolist() == [n * t] * 2
    assert step.traces == 2
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "step 001 of 0.50 1 1 1 0.5 1 0.5",
        "step 1",
        "step 002 of 0.25 2 2 2 0.25 2 0.25",
        "step 2",
    ]
    logged = [r.getMessage() for r in caplog.records if r.name == LOG.name]
    assert logged == ["n is 1, t is 0.5", "1 and 0.5", "1", "n is 2, t is 0.2", "2 and 0.25", "2"]


def test_numbers_in_variables_that_are_only_printed(capsys: pytest.CaptureFixture) -> None:
    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        text = f"step {n}"
        text += f" of {n + 10}"
        if x.ndim:
            print(text)
        LOG.info("%s!", text)
        print(", ".join(f"{i}" for i in (n, n + 1)), file=sys.stderr)
        return x * n

    step = xd.compile(function, audit=0)
    for n in range(1, 6):
        assert step(torch.ones(2, device="xla"), n).tolist() == [n] * 2
    assert step.traces == 2
    out = capsys.readouterr()
    assert out.out.splitlines() == ["step 1 of 11", "step 2 of 12"]
    assert out.err.splitlines() == ["1, 2", "2, 3"]


def kept_text(x: torch.Tensor, n: int) -> Any:
    text = f"{n}"
    print(text)
    return x * len(text), text


def key_text(x: torch.Tensor, n: int) -> Any:
    return x * {"1": 3, "22": 5}.get(f"{n}", 7), n


def printed_elsewhere(x: torch.Tensor, n: int) -> Any:
    buffer = io.StringIO()
    print(f"{n}", file=buffer)
    return x, buffer.getvalue()


def redirected(x: torch.Tensor, n: int) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as buffer:
        print(f"{n}", n)
    return x, buffer.getvalue()


def passed_on(x: torch.Tensor, n: int) -> Any:
    found: list[str] = []
    print(found.append(f"{n}"))
    return x, found[0]


def walrus(x: torch.Tensor, n: int) -> Any:
    print(text := f"{n}")
    return x, text


def own_print(x: torch.Tensor, n: int) -> Any:
    found: list[str] = []

    def print(text: str) -> None:
        found.append(text)

    print(f"{n}")
    return x, found[0]


def compared(x: torch.Tensor, n: int) -> Any:
    print(f"{n}" == "22", f"{n}" if n > 2 else str(n))
    return x * (2 if f"{n}" == "22" else 3), n


def read_twice(x: torch.Tensor, n: int) -> Any:
    text = f"{n}"
    print(text)
    return x, [text]


def raised_text(x: torch.Tensor, n: int) -> Any:
    """An error that is caught may be looked at."""
    try:
        raise KeyError(f"{n}")
    except KeyError as error:
        return x, error.args[0]


def called_by_a_function(x: torch.Tensor, n: int) -> Any:
    texts: list[str] = []

    def described(n: int) -> str:
        texts.append(text := f"{n}")
        return text

    print(described(n))
    return x, texts


TEXTS = (
    *(read_twice, raised_text, called_by_a_function, kept_text, key_text, printed_elsewhere),
    *(redirected, passed_on, walrus, own_print, compared),
)


@pytest.mark.parametrize("function", TEXTS, ids=lambda f: f.__name__)
def test_text_that_goes_elsewhere_is_right(function: Function) -> None:
    step, plain = xd.compile(function), torch.ones(2)
    for n in (1, 22, 333, 22, 1, 4444):
        result, text = step(plain.to("xla"), n)
        expected, wanted = function(plain, n)
        assert (result.tolist(), text) == (expected.tolist(), wanted)


def test_a_counter_that_is_printed(capsys: pytest.CaptureFixture) -> None:
    class Counter:
        def __init__(self) -> None:
            self.n = 0

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            print(f"step {self.n}")
            return x * self.n

    counter = Counter()
    step = xd.compile(counter.step)
    for i in range(1, 9):
        assert step(torch.ones(2, device="xla")).tolist() == [i, i]
    assert counter.n == 8
    assert step.traces <= 3


# --- many programs, and what is said of them -----------------------------------------------------


def repeated(x: torch.Tensor, n: int) -> torch.Tensor:
    for _ in range(n + 1):
        x = x + 1
    return x


def test_twenty_programs_in_rotation() -> None:
    step, x = xd.compile(repeated), torch.zeros(2, device="xla")
    for i in range(60):
        assert step(x, i % 20).tolist() == [i % 20 + 1.0] * 2
        if i == 20:
            traces = step.traces
    assert step.traces == traces == 21  # the first number was a constant


def test_memory_bounds_how_many_programs_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(programs, "KEPT_BYTES", 0)
    monkeypatch.setattr(programs, "KEPT", 3)
    step, x = xd.compile(repeated), torch.zeros(2, device="xla")
    with caplog.at_level("WARNING", "xla_dtensor"):
        for n in (0, 1, 2, 3, 4, 4, 3, 2, 1, 2):
            assert step(x, n).tolist() == [n + 1.0] * 2
    assert step.traces == 6  # 1 was the one not used longest
    told = [m for m in caplog.messages if "programs for arguments of one kind" in m]
    assert len(told) == 1


def line_of(text: str) -> int:
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if line.strip() == text)


def test_the_line_that_decided_is_named(caplog: pytest.LogCaptureFixture) -> None:
    step, x = xd.compile(repeated), torch.zeros(2, device="xla")
    with caplog.at_level("WARNING", "xla_dtensor"):
        for n in range(8):
            step(x, n)
    where = f"(range(n + 1) at {__file__}:{line_of('for _ in range(n + 1):')})"
    assert f"the step decided (argument [1] + 1) == 2 {where}, which holds no longer" in (
        step.recompilations
    )
    (told,) = [m for m in caplog.messages if "has been traced" in m]
    assert where in told
    assert "each value has a program" in told


def test_one_line_that_decides_again_and_again_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Though other calls come in between."""
    step, x = xd.compile(repeated), torch.zeros(2, device="xla")
    with caplog.at_level("WARNING", "xla_dtensor"):
        for n in range(9):
            step(x, n)
            step(x, n)
    (told,) = [m for m in caplog.messages if "because of one line" in m]
    assert "range(n + 1)" in told


# --- errors --------------------------------------------------------------------------------------


def test_an_element_taken_from_a_set() -> None:
    numbers, same = {7, 8, 9}, {7, 8, 9}
    step, x = xd.compile(lambda x: x * numbers.pop()), torch.ones(2, device="xla")
    for _ in range(3):
        assert step(x).tolist() == [same.pop()] * 2
        assert numbers == same
    with pytest.raises(KeyError, match="empty set"):
        step(x)


def test_a_module_that_changes_its_dtype_is_refused_by_name() -> None:
    module = torch.nn.Linear(2, 2).to("xla")

    def function(x: torch.Tensor) -> torch.Tensor:
        module.double()
        return module(x.double())

    with pytest.raises(xd.DataDependentError, match=r"double\(\), half\(\) or to\(\)"):
        xd.compile(function)(torch.ones(2, device="xla"))
    assert module.weight.dtype is torch.float32


def test_a_dataclass_that_is_found_elsewhere_too(mesh_2x4: DeviceMesh) -> None:
    """What the user assigns later stays."""
    both = Settings(1.0)
    step, x = xd.compile(lambda x, s: x * s.scale + both.scale), on_mesh(mesh_2x4)
    for i in range(6):
        both.scale = i / 2
        torch.testing.assert_close(whole(step(x, both)), X * both.scale + both.scale)
        assert both.scale == i / 2
    assert step.traces <= 3


@pytest.mark.parametrize("audit", [1])
def test_audits_of_positions_and_places(mesh_2x4: DeviceMesh, audit: int) -> None:
    holder = Holder()
    step = xd.compile(lambda x, n: x[n] * holder.scale, audit=audit)
    for n in (1, 2, 3, -1, 5):
        holder.scale = n * 0.5
        torch.testing.assert_close(whole(step(on_mesh(mesh_2x4), n)), X[n] * n * 0.5)
    assert step.traces <= 4


OTHERS = ["Rprop", "Adam", "Adadelta", "Adagrad", "NAdam", "RAdam", "Adafactor"]


@pytest.mark.parametrize(
    "name", ["ASGD", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_several_parameters_of_one_optimizer(name: str) -> None:
    """Of all parameters the step count, and what is made of it, stays one value."""

    def trained(device: str) -> tuple[Function, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        model.to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, list(model.parameters())

    step, parameters = trained("xla")
    step = xd.compile(step)
    expected, own = trained("cpu")
    for _ in range(6):
        torch.testing.assert_close(step(X.to("xla")).cpu(), expected(X))
    assert step.traces <= 2, step.recompilations
    for parameter, same in zip(parameters, own, strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), same.detach())
