"""Names and elements that come, go and change between two calls of a compiled step."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import xla_dtensor as xd
from xla_dtensor.compilation.watch.watch import Watch

MODULE = """
import torch
offset = 1.0

def step(x):
    try:
        scale = scale_of_user
    except NameError:
        scale = 1.0
    return (x * scale + offset).sum() * len([x])
"""


def of_source(source: str, **names: Any) -> Any:
    module = types.ModuleType("of_a_user")
    vars(module).update(names)
    exec(compile(source, "of_a_user.py", "exec"), vars(module))
    return module


def test_a_global_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the next cell of a notebook defines one: nothing is looked for again."""
    namespace = vars(of_source(MODULE))
    step, x = xd.compile(namespace["step"], audit=0), torch.ones(3).to("xla")
    assert step(x).item() == step(x).item() == 6
    monkeypatch.setattr(Watch, "differences", None)
    for i in range(3):
        namespace[f"other{i}"] = torch.randn(3)
        assert step(x).item() == 6
    del namespace["other0"]
    assert step(x).item() == 6 and step.traces == 1


@pytest.mark.parametrize(
    ("change", "result"),
    [
        (lambda namespace: namespace.update(scale_of_user=3.0), 12),
        (lambda namespace: namespace.update(len=lambda _: 5), 30),
        (lambda namespace: namespace.update(offset=2.0), 9),
        (lambda namespace: namespace.update(offset=2.0, other=1), 9),
        (lambda namespace: (namespace.pop("other"), namespace.update(scale_of_user=3.0)), 12),
        (lambda namespace: (namespace.pop("other"), namespace.update(another=1)), 6),
    ],
    ids=[
        "a name that was missing",
        "a builtin's",
        "another number",
        "and one that nobody reads",
        "a missing one comes as another goes",
        "one that nobody reads comes as another goes",
    ],
)
def test_a_global_that_is_read(change: Callable[..., None], result: int) -> None:
    namespace = vars(of_source(MODULE))
    step, x = xd.compile(namespace["step"], audit=0), torch.ones(3).to("xla")
    assert step(x).item() == 6
    namespace["other"] = 0
    assert step(x).item() == 6
    change(namespace)
    assert step(x).item() == result


def test_a_name_of_a_module_that_is_read_as_an_attribute() -> None:
    module = of_source(MODULE)
    function = xd.compile(
        lambda x: module.step(x) * getattr(module, "late", 1) + hasattr(module, "later"), audit=0
    )
    x = torch.ones(3).to("xla")
    assert function(x).item() == 6
    module.unrelated = 1
    assert function(x).item() == 6
    module.late = 2
    assert function(x).item() == 12
    module.later = 0
    assert function(x).item() == 13


class Aside:
    """An object."""


STEPS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a constant name": (
        "def step(x): return x * globals().get('q', 1)",
        lambda m: setattr(m, "q", 3),
    ),
    "a name that the step may store": (
        "F = False\ndef step(x):\n    global n\n    if F: n = 5\n    try: return x * n\n"
        "    except NameError: return x",
        lambda m: setattr(m, "n", 3),
    ),
    "__getattr__ of a module": (
        "import sys\nf = lambda x: x\ndef step(x): return o.f(x) * getattr(o, 'q', 1)",
        lambda m: setattr(m, "__getattr__", lambda name: 7),
    ),
    "an object that has the globals": (
        "ns.__dict__ = globals()\ntype(ns).extra = 1\ndef step(x): return x * ns.extra",
        lambda m: setattr(m, "extra", 3),
    ),
    "from one list's end to the next one's beginning": (
        "a, b = [1, 2], [3]\ndef step(x): return x * sum(a) + 10 * sum(b)",
        lambda m: m.b.insert(0, m.a.pop()),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_comes_is_seen(name: str) -> None:
    source, change = STEPS[name]
    module = of_source(source, ns=Aside())
    module.o = module
    x = torch.arange(3.0)
    step = xd.compile(module.step, audit=0)
    for _ in range(2):
        torch.testing.assert_close(step(x.to("xla")).cpu(), module.step(x))
    change(module)
    torch.testing.assert_close(step(x.to("xla")).cpu(), module.step(x))
