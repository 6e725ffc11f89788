"""What a step's code finds when it asks for the type of a number that is an input: torch's values,
and one program for all of them where the code doesn't compare by identity."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import xla_dtensor as xd

X = torch.ones(())
Number = float
KINDS = {float: 2, int: 3, np.float32: 4, np.float64: 5, np.int64: 6}


class Names:
    kind = float


def kind_of(n: Any) -> Any:
    return type(n)


def kept(n: Any) -> Any:
    kind = type(n)
    del n
    return kind


@functools.singledispatch
def dispatched(n: Any) -> int:
    return 3


@dispatched.register
def _(n: float) -> int:
    return 2


def by_class(n: Any) -> int:
    match n:
        case Number():
            return 2
    return 3


# By what is the same for a number that is an input.
FREE: dict[str, Callable[[Any], Any]] = {
    "==": lambda n: 2 if type(n) == Number else 3,  # noqa: E721
    "in a tuple": lambda n: 2 if type(n) in (Number,) else 3,
    "in a set": lambda n: 2 if type(n) in {Number} else 3,
    "in a table": lambda n: KINDS[type(n)],
    "in a table, from a helper": lambda n: KINDS[kind_of(n)],
    "isinstance": lambda n: 2 if isinstance(n, Number) else 3,
    "isinstance of many": lambda n: 2 if isinstance(n, int | np.floating | Number) else 3,
    "an abstract class": lambda n: 2 if isinstance(n, numbers.Real) else 3,
    "issubclass": lambda n: 2 if issubclass(kept(n), Number) else 3,
    "issubclass of an abstract class": lambda n: 2 if issubclass(kept(n), numbers.Integral) else 3,
    "match": by_class,
    "its name": lambda n: len(type(n).__name__),
    "its text": lambda n: len(f"{type(n)}"),
    "its module": lambda n: len(type(n).__module__),
    "its bases": lambda n: 2 if Number in type(n).__mro__ else 3,
    "__class__": lambda n: 2 if n.__class__ is Number else 3,
    "singledispatch": dispatched,
    "of something else": lambda n: float(len(type(KINDS).__name__)) if type(n) != dict else 3,  # noqa: E721
}
# By identity, for which a program for each value is right.
ASKED: dict[str, Callable[[Any], Any]] = {
    "is": lambda n: 2 if type(n) is Number else 3,
    "is, of a class": lambda n: 2 if type(n) is Names.kind else 3,
    "is, the other way round": lambda n: 2 if Number is type(n) else 3,
    "is the type of another": lambda n: 2 if type(n) is type(X.item()) else 3,
    "is, from a helper": lambda n: 2 if kind_of(n) is Number else 3,
    "is, from a variable": lambda n: sum(2 if kind is Number else 3 for kind in [type(n)]),
    "by another name": lambda n, ask=type: 2 if ask(n) is Number else 3,
}
VALUES: dict[str, tuple[Any, ...]] = {
    "float": (1.5, 2.5, 3.5, 4.5),
    "int": (1, 2, 3, 4),
    "float32": tuple(map(np.float32, (1.5, 2.5, 3.5, 4.5))),
    "float64": tuple(map(np.float64, (1.5, 2.5, 3.5, 4.5))),
    "int64": tuple(map(np.int64, (1, 2, 3, 4))),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))
@pytest.mark.parametrize("ask", [*FREE.values(), *ASKED.values()], ids=[*FREE, *ASKED])
def test_as_torch(ask: Callable[[Any], Any], values: tuple[Any, ...]) -> None:
    function = lambda x, n: x * n * ask(n)
    step = xd.compile(function)
    x = torch.tensor([1.0, 2.0])
    for n in values:
        torch.testing.assert_close(step(x.to("xla"), n).cpu(), function(x, n))


@pytest.mark.parametrize("ask", FREE.values(), ids=list(FREE))
def test_programs(ask: Callable[[Any], Any]) -> None:
    step = xd.compile(lambda x, n: x * n * ask(n))
    x = torch.ones(2, device="xla")
    for n in VALUES["float"]:
        step(x, n)
    assert step.compilations <= 2, step.recompilations


@pytest.mark.parametrize("ask", [*FREE.values(), *ASKED.values()], ids=[*FREE, *ASKED])
def test_item_of_a_cpu_tensor(ask: Callable[[Any], Any]) -> None:
    """Which is an input as it is, without having changed."""
    scale = torch.tensor(1.5)
    function = lambda x: x * scale.item() * ask(scale.item())
    step = xd.compile(function)
    x = torch.tensor([1.0, 2.0])
    for value in VALUES["float"]:
        scale.fill_(value)
        torch.testing.assert_close(step(x.to("xla")).cpu(), function(x))
