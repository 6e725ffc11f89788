"""Which object an argument is, and what the user has put on it."""

from __future__ import annotations

import dataclasses
import enum
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.compilation.changes._table import Program, row, rows
from tests.compilation.changes._world import World, numbers

# --- identity --------------------------------------------------------------------------------

ExternalStorage = Callable[[Any], Callable[[], Any]]


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def _in_a_cell(value: Any) -> Callable[[], Any]:
    return lambda: value


def _in_an_attribute(value: Any) -> Callable[[], Any]:
    holder = Holder(value)
    return lambda: holder.value


def _in_a_list(value: Any) -> Callable[[], Any]:
    held = [None, value]
    return lambda: held[1]


def _in_a_dict(value: Any) -> Callable[[], Any]:
    held = {"it": value}
    return lambda: held["it"]


CAPTURED: dict[str, ExternalStorage] = {
    "cell": _in_a_cell,
    "attribute": _in_an_attribute,
    "list": _in_a_list,
    "dict": _in_a_dict,
}


@rows(CAPTURED)
def tensor_compared_with_a_captured_one(world: World, captured: ExternalStorage) -> Program:
    """The captured one isn't computed with."""
    mine = world.batch(0)
    get = captured(mine)
    step = world.compile(lambda x: x * 2 if x is get() else x * 3)
    others = [world.batch(1), mine, mine.detach(), mine.view_as(mine), world.batch(2), mine]
    for x in others:
        yield step(x if world.changes else others[0])
    world.traced_at_most(4, step)


@row()
def captured_tensor_first(world: World) -> Program:
    mine = world.batch(0)
    step = world.compile(lambda x: (x is mine, x * 2 + mine))
    for x in (mine, mine.detach(), world.batch(1), mine):
        yield step(x if world.changes else mine)


@row()
def parameter_compared(world: World) -> Program:
    model = world.module(nn.Linear(6, 8))

    def function(w: torch.Tensor, x: torch.Tensor) -> Any:
        return [w is p for p in model.parameters()], x * 2, any(w is p for p in model.parameters())

    step = world.compile(torch.no_grad()(function))
    for w in (world.batch(1), model.weight, model.bias, model.weight.data, model.weight):
        yield step(w if world.changes else world.batch(1), world.batch(0))


PAIRS: dict[str, Callable[[torch.Tensor], tuple[Any, Any]]] = {
    "detached": lambda x: (x, x.detach()),
    "view": lambda x: (x, x.view_as(x)),
    "alias": lambda x: (x.detach(), x.detach()),
    "clone": lambda x: (x, x.clone()),
}


@rows(PAIRS)
def two_arguments_compared(world: World, make: Callable) -> Program:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * (2 if a is b else 3)

    step = world.compile(function)
    for same in (True, False, True):
        x = world.batch(0)
        yield step(x, x) if same or not world.changes else step(*make(x))


@row()
def table_by_id(world: World) -> Program:
    a, b, c = (world.batch(i) for i in range(3))
    table = {id(a): 2.0, id(b): 3.0}
    step = world.compile(lambda x: x * table.get(id(x), 5.0))
    for x in (a, b, c, a.detach(), b, a):
        yield step(x if world.changes else a)


@row()
def ids_of_what_is_captured(world: World) -> Program:
    """A new argument in each call is one program still."""
    w = world.batch(7)
    state = {id(w): 2.0}
    step = world.compile(lambda x: x * state[id(w)])
    for i in range(4):
        yield step(world.batch(i if world.changes else 0))
    world.traced_at_most(1, step)


@row()
def table_by_tensor(world: World) -> Program:
    a, b = world.batch(0), world.batch(1)
    table = {a: 2.0, b: 3.0}
    step = world.compile(lambda x: x * table.get(x, 5.0))
    for x in (a, b, world.batch(2), a):
        yield step(x if world.changes else a)


@dataclasses.dataclass(eq=False)
class Data:
    x: torch.Tensor
    scale: float = 2.0


Point = namedtuple("Point", "x y")


class Scales(list):
    """A list with attributes and a method."""

    factor = 1.0

    def total(self) -> float:
        return sum(self) * self.factor


CONTAINERS: dict[str, Callable[[World], Any]] = {
    "list": lambda w: [w.batch(0), 1.0],
    "dict": lambda w: {"x": w.batch(0)},
    "set": lambda w: {1.0, 2.0},
    "empty": lambda w: [],
    "dataclass": lambda w: Data(w.batch(0)),
    "namespace": lambda w: SimpleNamespace(x=w.batch(0)),
    "list_of_a_class": lambda w: Scales([1.0]),
    "tuple": lambda w: (w.batch(0), 3.0),
}


@rows(CONTAINERS)
def container_compared_with_a_captured_one(world: World, make: Callable) -> Program:
    mine = make(world)
    step = world.compile(lambda x, c: x * (2 if c is mine else 3))
    for c in (make(world), mine, make(world), mine):
        yield step(world.batch(1), c if world.changes else make(world))
    world.traced_at_most(2, step)


@rows(CONTAINERS)
def containers_compared(world: World, make: Callable) -> Program:
    step = world.compile(lambda x, a, b: x * (2 if a is b else 3))
    for same in (False, True, False):
        a = make(world)
        yield step(world.batch(1), a, a if same and world.changes else make(world))


@row()
def containers_inside_of_others(world: World) -> Program:
    def function(x: torch.Tensor, c: list) -> torch.Tensor:
        c[0][0] = 5.0
        return x * (c[1][0] if c[0] is c[1] else 3)

    step = world.compile(function)
    for same in (False, True, True, False):
        a, b = [1.0], [1.0]
        pair = [a, a] if same and world.changes else [a, b]
        yield step(world.batch(1), pair), pair


@row()
def list_that_contains_itself(world: World) -> Program:
    def function(c: list) -> torch.Tensor:
        return c[0] * (2 if c[1] is c else 3)

    step = world.compile(function)
    for itself in (False, True, True, False):
        c = [world.batch(0), None]
        c[1] = c if itself and world.changes else []
        yield step(c)


@row()
def list_whose_numbers_change_compared(world: World) -> Program:
    mine = [1.0]
    step = world.compile(lambda x, c: x * c[0] * (2 if c is mine else 3))
    for i in range(5):
        c = mine if i % 2 and world.changes else [0.0]
        c[0] = float(i)
        yield step(world.batch(1), c)


@row()
def new_containers_are_one_program(world: World) -> Program:
    mine = [1.0]
    step = world.compile(lambda b: b["x"][0] * (2 if b is mine else 3))
    for i in range(4):
        yield step({"x": [world.batch(i if world.changes else 0), (world.batch(1),)]})
    world.traced_at_most(1, step)


# --- attributes of tensors ---------------------------------------------------------------------


VALUES: dict[str, tuple[Any, Any, Callable]] = {
    "number": (2.0, 3.0, lambda x, v: x * v),
    "string": ("a", "bb", lambda x, v: x * len(v)),
    "list": ([1.0], [1.0, 2.0], lambda x, v: x * sum(v)),
    "tensor": (numbers(1, 6), numbers(2, 6), lambda x, v: x * v),
    "enum": (None, 1.0, lambda x, v: x * 2 if v is None else x),
}


@rows(VALUES)
def attribute_of_an_argument(world: World, case: tuple) -> Program:
    before, after, use = case
    place = lambda v: world.tensor(v, None) if isinstance(v, torch.Tensor) else v
    step = world.compile(lambda x: use(x, x.k))
    x, y = world.batch(0), world.batch(1)
    x.k = y.k = place(before)
    yield step(x)
    yield step(y)
    world.change(setattr, x, "k", place(after))
    yield step(x)
    yield step(y)


@row()
def attribute_that_may_be_absent(world: World) -> Program:
    step = world.compile(lambda x: x * getattr(x, "mult", 1.0) + hasattr(x, "more"))
    x = world.batch(0)
    yield step(x)
    world.change(setattr, x, "mult", 2.0)
    yield step(x)
    world.change(setattr, x, "more", 2.0)
    yield step(x)
    world.change(delattr, x, "mult")
    yield step(x)


@row(unseen=True)
def attribute_that_is_not_read(world: World) -> Program:
    step = world.compile(lambda x: x * 2)
    for i in range(4):
        x = world.batch(i)
        world.change(setattr, x, "label", f"batch {i}")
        yield step(x)
    world.traced_at_most(1, step)


@row()
def attribute_of_a_tensor_in_a_dataclass(world: World) -> Program:
    step = world.compile(lambda d: d.x * d.x.k)
    d = Data(world.batch(0))
    d.x.k = 2.0
    yield step(d)
    world.change(setattr, d.x, "k", 3.0)
    yield step(d)


@row()
def attribute_of_a_captured_tensor(world: World) -> Program:
    w = world.batch(1)
    w.k = 2.0
    step = world.compile(lambda x: x * w.k)
    yield step(world.batch(0))
    world.change(setattr, w, "k", 3.0)
    yield step(world.batch(0))


@row()
def versions_of_arguments(world: World) -> Program:
    step = world.compile(lambda x: (x * 2, x._version))
    x = world.batch(0)
    start = x._version

    def told(result: tuple) -> tuple:
        return result[0], result[1] - start

    yield told(step(x))
    world.change(x.add_, 1)
    yield told(step(x))
    world.change(x.add_, 1)
    yield told(step(x))


@row()
def an_argument_made_in_inference_mode(world: World) -> Program:
    step = world.compile(lambda x: x * (2 if x.is_inference() else 3))
    given = [world.batch(0)]
    with torch.inference_mode():
        other = world.batch(0)
    yield step(given[0])
    world.change(given.__setitem__, 0, other)
    yield step(given[0])


@row()
def version_of_a_captured_tensor(world: World) -> Program:
    w = world.batch(1)
    start = w._version
    step = world.compile(lambda x: x * (w._version - start))
    yield step(world.batch(0))
    world.change(w.add_, 1)
    yield step(world.batch(0))


def _results(step: Callable, x: Any, *names: str) -> list:
    result = step(x)
    return [result, *(getattr(x, name, None) for name in names)]


PUT: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "number": lambda x, n: 7.0,
    "string": lambda x, n: "seen",
    "tensor": lambda x, n: x * 2,
    "argument": lambda x, n: x,
    "list": lambda x, n: [x + 1, 3.0],
    "computed": lambda x, n: n * 2 + 1,
    "dataclass": lambda x, n: Data(x.sum()),
}


@rows(PUT)
def attribute_put_on_an_argument(world: World, make: Callable) -> Program:
    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        if world.changes:
            x.seen = make(x, n)
        return x * 2

    step = world.compile(function)
    for i in range(4):
        x = world.batch(i)
        result = step(x, i)
        seen = getattr(x, "seen", None)
        yield result, "x" if seen is x else seen
    world.traced_at_most(3, step)


@row()
def attribute_put_once_more(world: World) -> Program:
    """It is there already, with the same value, when the step is traced."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.seen = 7.0
        return x * 2

    step = world.compile(function if world.changes else lambda x: x * 2)
    x = world.batch(0)
    x.seen = 7.0
    yield step(x), x.seen
    for i in range(3):
        y = world.batch(i)
        yield step(y), getattr(y, "seen", None)
        yield step(x), x.seen


@row()
def attribute_counted_on_an_argument(world: World) -> Program:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.count = getattr(x, "count", 0) + 1
        return x * x.count

    step = world.compile(function if world.changes else lambda x: x * 1)
    x, y = world.batch(0), world.batch(1)
    for z in (x, y, x, x, y):
        yield step(z), getattr(z, "count", 0)


@row()
def attribute_deleted_from_an_argument(world: World) -> Program:
    def function(x: torch.Tensor) -> torch.Tensor:
        del x.k
        return x * 2

    step = world.compile(function if world.changes else lambda x: x * 2)
    for i in range(3):
        x = world.batch(i)
        x.k, x.other = 1.0, 2.0
        yield step(x), getattr(x, "k", None), x.other


@rows(PUT)
def attribute_put_on_a_captured_tensor(world: World, make: Callable) -> Program:
    w = world.batch(9)

    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        if world.changes:
            w.seen = make(x, n)
        return x * w

    step = world.compile(function)
    for i in range(4):
        x = world.batch(i)
        result = step(x, i)
        seen = getattr(w, "seen", None)
        yield result, "x" if seen is x else seen


@rows(PUT)
def attribute_put_on_a_result(world: World, make: Callable) -> Program:
    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        y = x * 3
        if world.changes:
            y.tag = make(x, n)
            y.itself = y
        return y

    step = world.compile(function)
    for i in range(4):
        x = world.batch(i)
        y = step(x, i)
        tag = getattr(y, "tag", None)
        yield y, "x" if tag is x else tag, getattr(y, "itself", None) is y


@row()
def attribute_put_on_a_parameter(world: World) -> Program:
    model = world.module(nn.Linear(6, 4))

    def function(x: torch.Tensor) -> torch.Tensor:
        for p in model.parameters():
            p.seen = x.sum()
            p.used = True
        return model(x).detach()

    step = world.compile(function if world.changes else lambda x: model(x).detach())
    for i in range(3):
        result = step(world.batch(i))
        yield result, [[getattr(p, n, None) for n in ("seen", "used")] for p in model.parameters()]


# --- values with methods ----------------------------------------------------------------------

FACTOR = 2.0


class Mode(enum.Enum):
    TIMES = 1
    PLUS = 2

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR * self.scale

    scale = property(lambda self: getattr(self, "own", 1.0))


class Count(int):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * int(self) * FACTOR * getattr(self, "own", 1.0)


class Ratio(float):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self) * FACTOR * getattr(self, "own", 1.0)


class Name(str):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(self) * FACTOR * getattr(self, "own", 1.0)


class Two(namedtuple("Two", "a b")):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a * FACTOR * getattr(self, "own", 1.0)


class Listed(list):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * self[0] * FACTOR * getattr(self, "own", 1.0)


class Tabled(dict):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * self["a"] * FACTOR * getattr(self, "own", 1.0)


@dataclasses.dataclass
class Recorded:
    a: float = 2.0

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scaled * getattr(self, "own", 1.0)

    @property
    def scaled(self) -> float:
        return self.a * FACTOR


WITH_METHODS: dict[str, Callable[[], Any]] = {
    "enum": lambda: Mode.TIMES,
    "int": lambda: Count(3),
    "float": lambda: Ratio(3.0),
    "str": lambda: Name("abc"),
    "named_tuple": lambda: Two(2.0, 3.0),
    "list": lambda: Listed([2.0]),
    "dict": lambda: Tabled(a=2.0),
    "dataclass": lambda: Recorded(),
}


@rows(WITH_METHODS)
def global_that_a_method_reads(world: World, make: Callable) -> Program:
    global FACTOR
    FACTOR = 2.0
    step = world.compile(lambda x, v: v.of(x))
    yield step(world.batch(0), make())
    if world.changes:
        FACTOR = 3.0
    yield step(world.batch(0), make())
    FACTOR = 2.0
    yield step(world.batch(0), make())


@rows(WITH_METHODS)
def method_that_is_replaced(world: World, make: Callable) -> Program:
    step = world.compile(lambda x, v: v.of(x))
    yield step(world.batch(0), make())
    cls = type(make())
    before = cls.of
    try:
        world.change(setattr, cls, "of", lambda self, x: x * 10)
        yield step(world.batch(0), make())
    finally:
        cls.of = before
    yield step(world.batch(0), make())


@rows(WITH_METHODS)
def attribute_of_a_value(world: World, make: Callable) -> Program:
    step = world.compile(lambda x, v: v.of(x))
    value = make()
    try:
        yield step(world.batch(0), value)
        world.change(setattr, value, "own", 2.0)
        yield step(world.batch(0), value)
        world.change(setattr, value, "own", 3.0)
        yield step(world.batch(0), value)
    finally:
        vars(value).pop("own", None)
