"""Names that code makes up (from tables, from parts, as pickling does), tables that a step fills on
demand, and caches beside a step whose trace fails.

Each maker gives a function and a change, and the function computes something else after it.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import operator
import pickle
import types
from collections.abc import Callable
from typing import Any

import torch

from tests.compilation.changes import _helpers
from tests.compilation.changes._table import Program, rows
from tests.compilation.changes._world import World

Case = tuple[Callable[..., Any], Callable[[], Any]]
Space = types.SimpleNamespace

MADE_UP_SCALE = 2.0


def times_made_up(x: torch.Tensor) -> torch.Tensor:
    return x * MADE_UP_SCALE


def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def put_global(value: float) -> None:
    global MADE_UP_SCALE
    MADE_UP_SCALE = value


class Held:
    """What nobody names any attribute of."""


def held(**values: Any) -> Any:
    own = Held()
    own.__dict__.update(values)
    return own


# --- attributes ----------------------------------------------------------------------------------


def getattr_by_a_table(world: World) -> Case:
    own, table = held(gainOne=2.0), {"key": "gain" + "One"}
    return (lambda x: x * getattr(own, table["key"])), put(own, "gainOne", 3.0)


def getattr_by_a_method(world: World) -> Case:
    own, parts = held(gain_two=2.0), ["gain", "two"]
    return (lambda x: x * getattr(own, "_".join(parts))), put(own, "gain_two", 3.0)


def getattr_by_either(world: World) -> Case:
    own, other = held(gainThree=2.0), "gain" + "Three"
    which = [False]

    def f(x):
        return x * getattr(own, "scale" if which[0] else other)

    return f, put(own, "gainThree", 3.0)


def getattr_with_a_text_as_default(world: World) -> Case:
    own, name = held(gainFour="a"), ["gain", "Four"]
    made = "".join(name)

    def f(x):
        return x * (2 if getattr(own, made, "none") == "a" else 3)

    return f, put(own, "gainFour", "b")


def hasattr_by_a_table(world: World) -> Case:
    own, table = held(), {"key": "gain" + "Five"}
    return (lambda x: x * (2 if hasattr(own, table["key"]) else 3)), put(own, "gainFive", 3.0)


def methodcaller_by_a_table(world: World) -> Case:
    own, table = held(gainSix=lambda: 2.0), {"key": "gain" + "Six"}
    return (lambda x: x * operator.methodcaller(table["key"])(own)), put(
        own, "gainSix", lambda: 3.0
    )


def pickled(world: World) -> Case:
    own = held(gainSeven="a")
    return (lambda x: x * len(pickle.dumps(own))), put(own, "gainSeven", "abc")


def state_of_an_object(world: World) -> Case:
    own = held(gainEight=2.0)
    return (lambda x: x * sum(own.__getstate__().values())), put(own, "gainEight", 3.0)


def reduced(world: World) -> Case:
    own = held(gainNine=2.0)
    return (lambda x: x * sum(own.__reduce_ex__(2)[2].values())), put(own, "gainNine", 3.0)


def format_put_together(world: World) -> Case:
    own, name = held(gainTen=2), "gain" + "Ten"
    return (lambda x: x * float(("{0." + name + "}").format(own))), put(own, "gainTen", 3)


def position_in_a_librarys_pattern(world: World) -> Case:
    node = ast.Constant(2.0)

    def f(x):
        match node:
            case ast.Constant(found):
                return x * found

    return f, put(node, "value", 3.0)


# --- globals and Python modules ------------------------------------------------------------------


def global_by_a_format(world: World) -> Case:
    which = ["SCALE"]
    return (lambda x: x * globals()[f"MADE_UP_{which[0]}"]), lambda: put_global(3.0)


def global_by_a_sum(world: World) -> Case:
    which = "SCALE"
    return (lambda x: x * globals()["MADE_UP_" + which]), lambda: put_global(3.0)


def global_in_a_function_by_a_format(world: World) -> Case:
    which = ["made_up"]
    return (lambda x: globals()[f"times_{which[0]}"](x)), lambda: put_global(3.0)


HELPERS = ["tests", "compilation", "changes", "_helpers"]


def module_by_a_relative_name(world: World) -> Case:
    def f(x):
        return x * importlib.import_module("._helpers", "tests.compilation.changes").SCALE

    return f, put(_helpers, "SCALE", 3.0)


def _located(*names: str) -> Any:
    """As Hydra finds what a config names."""
    return getattr(importlib.import_module(".".join(HELPERS)), "".join(names))


def table_by_key(world: World) -> Case:
    table: dict[str, float] = {}
    key = ["a"]

    def f(x):
        if key[0] not in table:
            table[key[0]] = 2.0 * len(key[0])
        return x * table[key[0]]

    return f, lambda: key.__setitem__(0, "abc")


def table_emptied(world: World) -> Case:
    table: dict[str, float] = {}
    key, by = "a", [2.0]

    def f(x):
        if key not in table:
            table[key] = by[0]
        return x * table[key]

    def change() -> None:
        by[0] = 3.0
        table.clear()

    return f, change


def table_of_tensors(world: World) -> Case:
    config = Space(length=4)

    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, torch.Tensor] = {}

        def forward(self, x):
            if config.length not in self.tables:
                self.tables[config.length] = torch.linspace(0, config.length, 4, device=x.device)
            return x * self.tables[config.length]

    rotary = Rotary()
    return (lambda x: rotary(x)), put(config, "length", 8)


def dispatched_to_another_class(world: World) -> Case:
    @functools.singledispatch
    def apply(node, x):
        return x

    apply.register(int, lambda node, x: x * node)
    node: list[Any] = [3]
    return (lambda x: apply(node[0], x)), lambda: node.__setitem__(0, "a")


MAKERS: tuple[Callable[[World], Case], ...] = (
    getattr_by_a_table,
    getattr_by_a_method,
    getattr_by_either,
    getattr_with_a_text_as_default,
    hasattr_by_a_table,
    methodcaller_by_a_table,
    pickled,
    state_of_an_object,
    reduced,
    format_put_together,
    position_in_a_librarys_pattern,
    global_by_a_format,
    global_by_a_sum,
    global_in_a_function_by_a_format,
    module_by_a_relative_name,
    table_by_key,
    table_emptied,
    table_of_tensors,
    dispatched_to_another_class,
)


@rows({maker.__name__: maker for maker in MAKERS})
def read(world: World, make: Callable[[World], Case]) -> Program:
    function, change = make(world)
    step = world.compile(function)
    x = lambda seed: world.tensor(torch.full((4, 4), 1.0 + seed), None)
    try:
        yield step(x(0))
        world.change(change)
        yield step(x(0))
        yield step(x(1))
    finally:
        _helpers.reset()
        put_global(2.0)


@rows({"by_a_table": None})
def assigned(world: World, _: None) -> Program:
    own, table = held(gainEleven=1.0), {"key": "gain" + "Eleven"}

    def f(x):
        setattr(own, table["key"], getattr(own, table["key"]) + 1)
        return x * 2

    step = world.compile(f)
    for value in (None, 100.0, None):
        if value is not None:
            world.change(setattr, own, table["key"], value)
        yield [step(world.batch()), getattr(own, table["key"])]


class Phase(enum.Enum):
    WARM, MAIN, LAST = range(3)

    def next(self) -> Phase:
        every = list(Phase)
        return every[(every.index(self) + 1) % len(every)]


@rows({"by_its_method": None})
def state(world: World, _: None) -> Program:
    own = Space(phase=Phase.WARM)

    def f(x):
        own.phase = own.phase.next()
        return x * (1 + own.phase.value)

    step = world.compile(f)
    for _ in range(4):
        yield [step(world.batch()), own.phase.name]
    world.change(setattr, own, "phase", Phase.WARM)
    yield [step(world.batch()), own.phase.name]


@rows({"of_others": None, "by_number": 1})
def cache_beside_a_failed_trace(world: World, number: int | None) -> Program:
    """A number that a cache holds can't be an input: what else caches hold stays."""
    made, by = [], [1.0]

    @functools.cache
    def settings() -> Any:
        made.append(1)
        return Space(n=0)

    @functools.cache
    def table(key):
        return by[0] * (len(key) if number is None else key)

    settings().n = 7
    step = world.compile(lambda x, key: x * table(key))
    keys = ["a", "ab", "abc"] if number is None else [1, 2, 3]
    yield step(world.batch(), keys[0])
    yield step(world.batch(), keys[1])
    world.change(by.__setitem__, 0, 10.0)
    for key in (keys[2], keys[0], keys[1]):
        yield [step(world.batch(), key), settings().n, len(made)]
