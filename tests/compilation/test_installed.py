"""Steps that use installed packages: of their code what runs is followed, and nothing else."""

from __future__ import annotations

import collections
import contextlib
import cProfile
import importlib
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from xla_dtensor.compilation.code import installed
from xla_dtensor.compilation.watch import watch

PACKAGE = {
    "__init__.py": """
        from somepackage import heavy
        from somepackage.layers import Layer, Meter, Odd, Trainer, remembering, scaled
        from somepackage import changing
        from somepackage.hooked import Hooked, by_name, first, on_another_object, plainly

        ROWS = [heavy.one, heavy.two]
        def log(value):
            heavy.run(ROWS, value)
    """,
    "heavy.py": """
        import torch
        DATA = [[i] for i in range(20000)]
        def one(): return [two(), DATA, torch]
        def two(): return [one(), DATA]
        def run(rows, value):
            for row in rows: row()
    """,
    "hooked.py": """
        import torch
        def register(layer):
            layer.inner.register_forward_hook(lambda m, a, out: layer.got.append(out.detach()))
        def by_name(layer):
            register(layer)
            setattr(layer, "hooked", True)
        def plainly(layer):
            register(layer)
            layer.hooked = True
        def first(layer):
            layer.__dict__["hooked"] = True
            register(layer)
        def on_another_object(layer):
            register(layer)
            layer.notes["hooked"] = True
        class Hooked(torch.nn.Module):
            def __init__(self, install):
                super().__init__()
                self.inner = torch.nn.Linear(6, 6, bias=False)
                torch.nn.init.eye_(self.inner.weight)
                self.install, self.notes, self.hooked = install, {}, False
            def forward(self, x):
                if not (self.hooked or self.notes):
                    self.install(self)
                self.got = []
                return self.inner(x), self.got
    """,
    "changing.py": """
        import collections, functools
        import torch
        from torch import nn
        COUNT, SEEN = 0, []
        @functools.lru_cache
        def table(size, device): return torch.arange(float(size), device=device) + 1
        def counts(m):
            m.calls += 1
            m.log.append(m.calls)
            m.by_name["n"] = m.by_name.get("n", 0) + 1
            m.late.append(m.calls)
            m.settings.inner["n"] = m.settings.inner.get("n", 0) + 1
            return float(m.calls + len(m.log) + sum(m.by_name.values()) + len(m.late))
        def counts_in_globals(m):
            global COUNT
            COUNT += 1
            SEEN.append(COUNT)
            Changing.total += 1
            return float(COUNT + len(SEEN) + Changing.total)
        def remembers(m): return table(6, m.first.weight.device)
        def rotates(m):
            m.parts.append(m.parts.pop(0))
            return 1.0
        def rotates_and_swaps(m):
            m.parts.append(m.parts.pop(0))
            m.first, m.other = m.other, m.first
            return 1.0
        def hides(m):
            m.parts = nn.ModuleList(list(m.parts)[::-1])
            m.flag = not getattr(m, "flag", False)
            return 2.0 if m.flag else 1.0
        class Settings:
            def __init__(self): self.inner = {}
        class Changing(nn.Module):
            total = 0
            def __init__(self, change):
                super().__init__()
                linear = lambda: nn.Linear(6, 6)
                self.first, self.other = linear(), linear()
                self.parts = nn.ModuleList([linear(), linear()])
                self.change, self.calls, self.log, self.by_name = change, 0, [], {}
                self.late, self.settings = collections.deque(), Settings()
            def forward(self, x):
                y = self.first(x) + self.parts[0](x)
                return y * self.change(self)
    """,
    "layers.py": """
        import functools
        import torch
        FLAGS = {"factor": 2.0}
        COUNT = 0
        def factor():
            global COUNT
            COUNT += 1
            return FLAGS["factor"]
        def scaled(x):
            return x * factor()
        class Config:
            def __init__(self): self.bias = 1.0
        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.arange(1.0, 7.0))
                self.config = Config()
                self.calls = 0
            def forward(self, x):
                self.calls += 1
                return helper(self, x)
        def helper(layer, x):
            layer.last = x.sum().detach()
            return x * layer.weight + getattr(layer.config, "bi" + "as")
        def states(optimizer): return len(optimizer.state)
        class Trainer:
            def __init__(self, model, optimizer, report):
                self.model, self.optimizer, self.report = model, optimizer, report
            def forward_backward(self, x):
                loss = self.model(x).square().mean()
                loss.backward()
                return loss.detach() * (states(self.optimizer) if self.report else 1)
        class Meter:
            def __init__(self): self.total, self.count = torch.zeros(()), 0
            def update(self, x):
                self.total = self.total.to(x.device) + x
                self.count += 1
        def remembering(function):
            @functools.wraps(function)
            def call(*args):
                return function(*args)
            return call
        class Odd(dict):
            def items(self): raise RuntimeError("asked")
            keys = values = __iter__ = __len__ = items
    """,
}


def _install(folder: Path) -> None:
    (folder / "somepackage-1.0.dist-info").mkdir()
    (folder / "somepackage").mkdir()
    for name, text in PACKAGE.items():
        (folder / "somepackage" / name).write_text(textwrap.dedent(text))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """Imports the package; it is another one each time."""
    _install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(installed, "_executed", frozenset())

    def forget() -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] == "somepackage"]:
            del sys.modules[name]

    def make() -> ModuleType:
        forget()
        importlib.invalidate_caches()
        return importlib.import_module("somepackage")

    yield make
    forget()


def batches(device: str, count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 6, generator=generator).to(device) for _ in range(count)]


def both(
    package: Callable[[], ModuleType], program: Callable[[ModuleType, str, Any], Iterator[Any]]
) -> xd.CompiledStep:
    """Compare what a program yields on the CPU with what it yields compiled."""
    expected = list(program(package(), "cpu", lambda step: step))
    steps: list[xd.CompiledStep] = []

    def compile_(step: Any) -> xd.CompiledStep:
        steps.append(xd.compile(step))
        return steps[-1]

    actual = list(program(package(), "xla", compile_))
    assert len(actual) == len(expected)
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        for a, e in zip(mine, theirs, strict=True):
            if isinstance(e, torch.Tensor):
                torch.testing.assert_close(a.detach().cpu(), e.detach(), msg=f"after {i}")
            else:
                assert a == e, f"after {i}: {mine} is not {theirs}"
    return steps[0]


def test_what_is_installed(package: Callable[[], ModuleType]) -> None:
    package()
    assert installed.is_installed("somepackage.layers") and installed.is_installed("pytest")
    for name in ("torch.nn", "jax", "collections", "__main__", __name__, "xla_dtensor.mesh", "no"):
        assert not installed.is_installed(name)


def test_code_that_does_not_run_is_not_followed(package: Callable[[], ModuleType]) -> None:
    somepackage = package()
    debug = False

    def step(x: torch.Tensor) -> torch.Tensor:
        if debug:
            somepackage.log(x)
        return x * 2

    compiled = xd.compile(step)
    for x in batches("xla"):
        assert torch.equal(compiled(x).cpu(), x.cpu() * 2)
    assert compiled.traces == 1
    assert compiled._last is not None
    found = compiled._last[1].watch.reached.found
    assert len(found) < 40 and not any("heavy" in one.path for one in found)


@pytest.mark.parametrize("report", [False, True])
def test_the_state_of_an_optimizer_that_steps_elsewhere(
    package: Callable[[], ModuleType], report: bool
) -> None:
    """It comes after the first call, and matters only if the code that names it runs."""

    def program(somepackage: ModuleType, device: str, compile_: Any) -> Iterator[Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 3).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        trainer = somepackage.Trainer(model, optimizer, report)
        run = compile_(trainer.forward_backward)
        for x in batches(device):
            yield run(x), model.weight.grad
            optimizer.step()
            optimizer.zero_grad()

    assert both(package, program).traces == 1 + report


def test_a_flag_of_a_module_that_a_function_reads(package: Callable[[], ModuleType]) -> None:
    def program(somepackage: ModuleType, device: str, compile_: Any) -> Iterator[Any]:
        scaled = somepackage.scaled
        step = compile_(lambda x: scaled(x))
        layers = sys.modules["somepackage.layers"]
        for factor in (2.0, 2.0, 3.0, 3.0):
            layers.FLAGS["factor"] = factor
            for x in batches(device, 2):
                yield (step(x),)
        layers.FLAGS = {"factor": 5.0}
        yield (step(batches(device)[0]),)
        layers.factor = lambda: 7.0
        yield (step(batches(device)[0]),)

    both(package, program)


def test_modules_and_their_settings(package: Callable[[], ModuleType]) -> None:
    def program(somepackage: ModuleType, device: str, compile_: Any) -> Iterator[Any]:
        layer = somepackage.Layer().to(device)
        step = compile_(lambda x: layer(x).detach())
        for i, x in enumerate(batches(device, 6)):
            layer.config.bias = 1.0 if i < 3 else 4.0
            yield step(x), layer.calls, layer.last

    step = both(package, program)
    assert step.traces <= 5


def test_objects_that_count(package: Callable[[], ModuleType]) -> None:
    def program(somepackage: ModuleType, device: str, compile_: Any) -> Iterator[Any]:
        meter = somepackage.Meter()

        def function(x: torch.Tensor) -> torch.Tensor:
            meter.update(x.sum())
            return x * meter.count

        step = compile_(function)
        for x in batches(device, 6):
            yield step(x), meter.total, meter.count

    both(package, program)


def test_a_wrapper_around_the_users_function(package: Callable[[], ModuleType]) -> None:
    """What the user's code changes is known before the wrapper has run."""

    def program(somepackage: ModuleType, device: str, compile_: Any) -> Iterator[Any]:
        calls = collections.Counter[str]()
        state = {"scale": 2.0, "last": None}

        @somepackage.remembering
        def function(x: torch.Tensor) -> torch.Tensor:
            calls["step"] += 1
            state["last"] = x.sum()
            return x * state["scale"]

        step = compile_(function)
        for i, x in enumerate(batches(device, 5)):
            state["scale"] = 2.0 if i < 3 else 3.0
            yield step(x), calls["step"], state["last"]

    both(package, program)


def test_a_container_with_methods_of_its_own(package: Callable[[], ModuleType]) -> None:
    """What is in it is found without them: they may import half of a package."""
    somepackage = package()
    table = somepackage.Odd(scale=2.0)
    step = xd.compile(lambda x: x * table["scale"])
    x = batches("xla")[0]
    for scale in (2.0, 3.0):
        table["scale"] = scale
        assert torch.equal(step(x).cpu(), x.cpu() * scale)


def test_another_step_gets_to_know_code(package: Callable[[], ModuleType]) -> None:
    """A program that stands doesn't look at more because another trace has run more."""
    somepackage = package()
    layer, other = somepackage.Layer().to("xla"), somepackage.Meter()
    fancy = False

    def function(x: torch.Tensor) -> torch.Tensor:
        if fancy:
            other.update(x.sum())
        return layer(x).detach()

    step = xd.compile(function)
    first, second = batches("xla", 2)
    step(first)
    step(second)
    traces = step.traces
    xd.compile(lambda x: other.update(x.sum()))(first)
    layer.config.bias = float("1.0")  # an equal one: look closer
    step(second)
    assert step.traces == traces


@pytest.mark.parametrize("kind", ["setprofile", "cProfile"])
def test_under_a_profiler(package: Callable[[], ModuleType], kind: str) -> None:
    """Before Python 3.12 nobody can tell what runs then: all code counts. The profiler stays."""
    somepackage = package()
    layer = somepackage.Layer().to("xla")
    step = xd.compile(lambda x: layer(x).detach())
    x = batches("xla")[0]
    with contextlib.ExitStack() as stack:
        if kind == "cProfile":
            profiler = stack.enter_context(cProfile.Profile())
        else:
            sys.setprofile(seen := lambda *args: None)
            stack.callback(sys.setprofile, None)
        for bias in (1.0, 2.0):
            layer.config.bias = bias
            expected = x.cpu() * layer.weight.cpu() + bias
            torch.testing.assert_close(step(x).cpu(), expected.detach())
        if kind == "setprofile":
            assert sys.getprofile() is seen
    if kind == "cProfile":
        assert any("forward" in str(entry.code) for entry in profiler.getstats())
    assert bool(installed._executed) == hasattr(sys, "monitoring")


class Reading(torch.optim.SGD):
    """Its code names `state`, and runs inside of a function of the package that has its name."""

    def step(self, closure: Any = None) -> Any:
        for _ in self.state.values():
            pass
        return super().step(closure)


def test_code_of_the_package_is_none_of_the_users() -> None:
    """Another optimizer of a user's, which some other step had, was found by our code around its
    ``step``, and what it reads followed: SGD's first step was traced twice."""
    made = [Reading([torch.nn.Parameter(torch.ones(2, device="xla"))], lr=0.1)]
    weight = torch.nn.Parameter(torch.ones(2, device="xla"))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def function(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()

    step = xd.compile(function)
    for _ in range(3):
        step(torch.ones(2, device="xla"))
    assert made and step.traces == 1
    root = Path(xd.__file__).parent
    assert all(map(installed._is_foreign_file, map(str, root.rglob("*.py"))))


def test_a_trace_that_was_ended_between_two_lines() -> None:
    """By a signal, before it could stop noting what runs: the next one isn't blind."""
    noting = installed._noting(set())
    noting.__enter__()
    step = xd.compile(lambda x: x * 2)
    assert step(torch.ones(2, device="xla")).sum().item() == 4
    assert sys.getprofile() is None and not installed.CodeRecorder()._blind
    del noting


def test_a_step_that_raises_in_a_package(package: Callable[[], ModuleType]) -> None:
    somepackage = package()
    meter = somepackage.Meter()
    meter.total = "nothing"
    step = xd.compile(lambda x: meter.update(x))
    for _ in range(2):
        with pytest.raises(AttributeError, match="'str' object"):
            step(batches("xla")[0])
    assert meter.total == "nothing" and meter.count == 0


def test_the_order_in_which_code_is_met(package: Callable[[], ModuleType]) -> None:
    """Each branch runs other code of the package for the first time."""

    def program(somepackage: ModuleType, device: str, compile_: Any) -> Iterator[Any]:
        layer, meter, scaled = somepackage.Layer().to(device), somepackage.Meter(), None
        scaled = somepackage.scaled

        def function(x: torch.Tensor, which: str) -> torch.Tensor:
            if "layer" in which:
                x = layer(x).detach()
            if "meter" in which:
                meter.update(x.sum())
            return scaled(x) if "scaled" in which else x

        step = compile_(function)
        names = ("layer", "meter", "scaled")
        choices = ["+".join(c) for n in range(4) for c in itertools.combinations(names, n)]
        for choice in (*choices, *reversed(choices)):
            yield step(batches(device)[0], choice), layer.calls, meter.total, meter.count

    both(package, program)


def test_a_trace_that_is_made_again_begins_with_what_is_known(
    package: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk before it meets no new name; what the first could read is not looked for."""
    made = package()
    layer = made.Layer().to("xla")
    rounds: list[list[bool]] = []

    def counted(roots: Any, begin: Callable[[], Any]) -> Any:
        walks: list[bool] = []
        rounds.append(walks)

        def one() -> Any:
            walk = begin()
            walks.append(walk.expecting)
            return walk

        return reach(roots, one)

    reach = watch.reach
    monkeypatch.setattr(watch, "reach", counted)
    step = xd.compile(lambda x: layer(x))
    x = torch.ones(6)
    for calls in (1, 2):
        assert torch.equal(step(x.to("xla")).cpu().detach(), made.Layer()(x).detach())
        assert layer.calls == calls
    before, question, again, after = rounds[:4]
    assert [walks[0] for walks in rounds[:4]] == [True, True, True, False]
    assert len(again) == 1 < len(question) + len(before) and len(after) > 1


@pytest.mark.parametrize("decides", [False, True], ids=["one program", "replayed"])
@pytest.mark.parametrize("how", ["by_name", "plainly", "first", "on_another_object"])
def test_hooks_that_it_registers_in_the_first_call(
    package: Callable[[], ModuleType], how: str, decides: bool
) -> None:
    """A module that notes that it has registered them (transformers' for its hidden states): a
    trace that is made again takes back both."""

    def program(device: str) -> list[Any]:
        somepackage = package()
        layer = somepackage.Hooked(getattr(somepackage, how)).to(device)

        def step(x: torch.Tensor) -> torch.Tensor:
            y, seen = layer(x)
            y = y * len(seen) + sum(seen)
            return y * 2 if decides and y.sum() > 1e9 else y

        run = xd.compile(step, watch="auto") if device == "xla" else step
        found = []
        for x in batches(device, 3):
            y = run(x).detach().cpu()
            found += [y, len(layer.inner._forward_hooks), bool(layer.notes or layer.hooked)]
        return [*found, len(layer(batches(device, 1)[0])[1])]

    for mine, right in zip(program("xla"), program("cpu"), strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize(
    "change",
    [
        "counts",
        "counts_in_globals",
        "remembers",
        "rotates",
        "rotates_and_swaps",
        "hides",
    ],
)
def test_what_it_changes_happens_once(package: Callable[[], ModuleType], change: str) -> None:
    """In the first call, too, whose trace is made again, or left to replay."""

    def program(device: str) -> list[Any]:
        changing = package().changing
        torch.manual_seed(0)
        model = changing.Changing(getattr(changing, change)).to(device)
        run = xd.compile(lambda x: model(x), watch="auto") if device == "xla" else model
        found = []
        for x in batches(device, 4):
            found += [run(x).detach().cpu(), model.calls, len(model.log), dict(model.by_name)]
            found += [list(model.late), changing.COUNT, changing.Changing.total]
            found += [part.weight.detach().cpu() for part in (model.first, *model.parts)]
        return [*found, model(batches(device, 1)[0]).detach().cpu()]

    for mine, right in zip(program("xla"), program("cpu"), strict=True):
        if isinstance(right, torch.Tensor):
            torch.testing.assert_close(mine, right)
        else:
            assert mine == right
