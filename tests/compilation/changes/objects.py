"""What a step is given and gives away besides tensors and numbers: containers that it changes,
iterators, functions, arrays, slices."""

from __future__ import annotations

import array
import copy
import dataclasses
import functools
import itertools
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.compilation.changes._table import Program, row, rows
from tests.compilation.changes._world import World

SCALE = 2.0
Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Box:
    x: Any
    n: Any = 1.0


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    n: Any = 1.0


class Own(list):
    pass


# --- the step changes its arguments ---------------------------------------------------------------


def _set(key: Any, value: Callable) -> Callable:
    def change(c: Any, x: torch.Tensor) -> None:
        c[key] = value(x)

    return change


def _call(name: str, *args: Any) -> Callable:
    def change(c: Any, x: torch.Tensor) -> None:
        getattr(c, name)(*(a(x) if callable(a) else a for a in args))

    return change


def _attribute(name: str, value: Callable) -> Callable:
    return lambda c, x: setattr(c, name, value(x))


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


WRITTEN: dict[str, tuple[Callable[[torch.Tensor], Any], Callable]] = {
    "list_number": (lambda x: [1.0, x], _set(0, lambda x: 7.0)),
    "list_tensor": (lambda x: [1.0, x], _set(1, _double)),
    "list_tensor_given": (lambda x: [1.0, None], _set(1, lambda x: x)),
    "list_appended": (lambda x: [x], _call("append", _double)),
    "list_popped": (lambda x: [x, 2.0], _call("pop")),
    "list_reversed": (lambda x: [x, 2.0], _call("reverse")),
    "list_cleared": (lambda x: [x, 2.0], _call("clear")),
    "dict_number": (lambda x: {"k": 1.0}, _set("k", lambda x: 7.0)),
    "dict_tensor": (lambda x: {"k": 1.0}, _set("k", _double)),
    "dict_new_key": (lambda x: {"k": x}, _set("new", _double)),
    "dict_deleted": (lambda x: {"k": x, "l": 1}, _call("pop", "k")),
    "dict_moved": (lambda x: OrderedDict(k=x, l=1), _call("move_to_end", "k")),
    "defaultdict": (lambda x: defaultdict(list, k=x), _set("new", _double)),
    "counter": (lambda x: Counter(a=1), _call("update", ["a", "b"])),
    "set": (lambda x: {1.0, 2.0}, _call("add", 3.0)),
    "set_popped": (lambda x: {1.0}, _call("pop")),
    "deque": (lambda x: deque([x, 1.0], maxlen=2), _call("append", _double)),
    "dataclass": (lambda x: Box(x), _attribute("n", _double)),
    "dataclass_slots": (lambda x: Slotted(x), _attribute("n", _double)),
    "dataclass_new": (lambda x: Box(x), _attribute("new", lambda x: 5.0)),
    "namespace": (lambda x: SimpleNamespace(a=x), _attribute("b", _double)),
    "own_list": (lambda x: Own([x, 1.0]), _set(1, _double)),
    "own_list_attribute": (lambda x: Own([x, 1.0]), _attribute("k", _double)),
    "nested": (lambda x: ({"a": [x, 1.0]},), lambda c, x: c[0]["a"].__setitem__(1, x + 1)),
    "in_a_partial": (
        lambda x: functools.partial(_double, [x]),
        lambda c, x: c.args[0].append(x + 1),
    ),
    "an_object_there": (lambda x: [Box(x)], lambda c, x: setattr(c[0], "n", x.sum())),
}


def _content(value: Any) -> Any:
    """What is in an object, as something that the table can compare."""
    if isinstance(value, functools.partial):
        return [_content(v) for v in value.args]
    if isinstance(value, dict):
        return [[str(k), _content(v)] for k, v in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple | deque):
        own = getattr(value, "__dict__", {})
        return [*map(_content, value), *map(_content, own.values())]
    if isinstance(value, Slotted):
        return [_content(value.x), _content(value.n)]
    if dataclasses.is_dataclass(value) or isinstance(value, SimpleNamespace):
        return [[k, _content(v)] for k, v in vars(value).items()]
    return value


@rows(WRITTEN)
def container_that_the_step_changes(world: World, case: tuple) -> Program:
    """Each call's own."""
    make, change = case

    def function(c: Any, x: torch.Tensor) -> torch.Tensor:
        if world.changes:
            change(c, x)
        return x * 3

    step = world.compile(function)
    for i in range(4):
        x = world.batch(i)
        c = make(x)
        yield step(c, x), _content(c)
    world.traced_at_most(2, step)


@rows(WRITTEN)
def one_container_changed_in_each_call(world: World, case: tuple) -> Program:
    make, change = case

    def function(c: Any, x: torch.Tensor) -> torch.Tensor:
        if world.changes:
            change(c, x)
        return x * 3

    step = world.compile(function)
    c = make(world.batch(0))
    for i in range(3):
        try:
            result = step(c, world.batch(i))
        except (KeyError, IndexError):
            result = "nothing left"
        yield result, _content(c)


@row()
def number_in_a_list_counted_up(world: World) -> Program:
    def function(c: list, x: torch.Tensor) -> torch.Tensor:
        c[0] += 1
        c[1] = c[1] * 2 if c[0] > 3 else c[1]
        return x * c[0]

    step = world.compile(function if world.changes else lambda c, x: x * 1)
    c = [0, 1.5]
    for i in range(6):
        yield step(c, world.batch(i)), c
    yield step([0, 1.5], world.batch(0)), c


@row()
def keyword_dict_changed(world: World) -> Program:
    def function(x: torch.Tensor, *, out: dict, **more: Any) -> torch.Tensor:
        if world.changes:
            out["y"] = x * 2
            more["z"] = x
        return x * 3

    step = world.compile(function)
    for i in range(3):
        out: dict = {}
        more: dict = {"a": 1}
        yield step(world.batch(i), out=out, **more), out, more


@row()
def default_that_the_step_changes(world: World) -> Program:
    def function(x: torch.Tensor, log: list = [0.0]) -> torch.Tensor:  # noqa: B006
        if world.changes:
            log[0] = log[0] + 1
        return x * 2

    step = world.compile(function)
    default = function.__defaults__[0]
    for i in range(4):
        own = [5.0]
        yield step(world.batch(i)), default
        yield step(world.batch(i), own), default, own


@row()
def arrays_that_the_step_writes_to(world: World) -> Program:
    def function(x: torch.Tensor, a: Any) -> torch.Tensor:
        if world.changes:
            a[0] = 7
        return x * 2

    step = world.compile(function)
    for i in range(2):
        a = np.zeros(2)
        yield step(world.batch(i), a), a


# --- results --------------------------------------------------------------------------------------


def _generated(x: torch.Tensor, n: int) -> Any:
    for i in range(2):
        yield x * (i + n)


class OutputRecipes:
    def __init__(self, x: torch.Tensor, n: Any) -> None:
        self.x, self.n = x, n
        self.me = self

    def times(self, by: float) -> torch.Tensor:
        return self.x * by * SCALE


ITERATORS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "generator_expression": lambda x, n: (x * i for i in range(1, 4)),
    "generator_of_a_list": lambda x, n: (y * n for y in [x, x + 1]),
    "generator": lambda x, n: _generated(x, n),
    "map": lambda x, n: map(lambda y: y * n, [x, x + 1]),  # noqa: C417
    "map_of_a_function": lambda x, n: map(torch.sin, [x, x + 1]),
    "filter": lambda x, n: filter(lambda y: y is not None, [x, None, x + 1]),
    "enumerate": lambda x, n: enumerate([x, x + n]),
    "zip": lambda x, n: zip([x, x + n], [1, 2], strict=True),
    "iter": lambda x, n: iter([x, x + n]),
    "iter_tuple": lambda x, n: iter((x, x + n)),
    "reversed": lambda x, n: reversed([x, x + n]),
    "values": lambda x, n: {"a": x, "b": x + n}.values(),
    "items": lambda x, n: {"a": x, "b": x + n}.items(),
    "keys": lambda x, n: {"a": x, "b": x + n}.keys(),
    "ordered_values": lambda x, n: OrderedDict(a=x, b=x + n).values(),
    "iter_values": lambda x, n: iter({"a": x, "b": x + n}.values()),
    "chain": lambda x, n: itertools.chain([x], (x + n,)),
    "islice": lambda x, n: itertools.islice([x, x * 2, x + n], 1, 3),
    "product": lambda x, n: itertools.product([1, 2], ["a"]),
    "iterators_in_a_dict": lambda x, n: iter([x * n]),
    "split": lambda x, n: iter(x.split(2)),
    "nested": lambda x, n: map(_product, zip([x], (i + n for i in [1.0]), strict=True)),
    "begun": lambda x, n: _begun([x, x + n, x * 2]),
}


def _product(pair: tuple) -> Any:
    return pair[0] * pair[1]


def _begun(values: list) -> Any:
    iterator = iter(values)
    next(iterator)
    return iterator


@rows(ITERATORS)
def iterator_returned(world: World, make: Callable) -> Program:
    step = world.compile(lambda x, n: {"it": make(x, n), "y": x * 2})
    for i in range(4):
        result = step(world.batch(i if world.changes else 0), 1)
        if make is not ITERATORS["iter_values"]:
            assert type(result["it"]) is type(make(world.batch(0), 1))
        yield [_content(v) for v in result["it"]], result["y"]
    world.traced_at_most(1, step)


@row()
def iterator_computed_when_it_is_taken_from(world: World) -> Program:
    """By what is there then, as in Python."""
    held = [2.0]
    step = world.compile(lambda x: (x * held[0] for _ in range(2)))
    for i in range(3):
        iterator = step(world.batch(i))
        first = next(iterator)
        world.change(held.__setitem__, 0, 3.0 + i)
        yield first, next(iterator), list(iterator)


@row()
def generator_that_the_step_has_begun(world: World) -> Program:
    def function(x: torch.Tensor) -> Any:
        iterator = _generated(x, 1)
        next(iterator)
        return iterator

    step = world.compile(function)
    for i in range(2):
        yield list(step(world.batch(i if world.changes else 0)))


MADE: dict[str, Callable[[torch.Tensor, float], tuple[Any, Callable]]] = {
    "list_twice": lambda x, n: ([a := [x * n], a], lambda r: [r[0], r[0] is r[1]]),
    "dict_twice": lambda x, n: ([d := {"a": x * n}, {"d": d}], lambda r: [r, r[0] is r[1]["d"]]),
    "object_twice": lambda x, n: ([b := Box(x * n), b], lambda r: [r[0], r[0] is r[1]]),
    "itself": lambda x, n: (OutputRecipes(x * 2, n), lambda r: [r.x, r.n, r.me is r, r.times(2.0)]),
    "method": lambda x, n: (OutputRecipes(x * 2, n).times, lambda r: r(3.0)),
    "closure": lambda x, n: (lambda y: x * y * n, lambda r: r(3.0)),
    "partial": lambda x, n: (functools.partial(torch.mul, x * n), lambda r: r(3.0)),
    "set": lambda x, n: ({1, 2}, lambda r: [sorted(r), r.add(3)]),
    "deque": lambda x, n: (deque([x, n], 3), lambda r: [list(r), r.maxlen, r.append(1)]),
    "proxy": lambda x, n: (types.MappingProxyType({"a": x * n}), lambda r: r["a"]),
    "slice": lambda x, n: ([slice(1, 3), x], lambda r: r[1][r[0]]),
    "named": lambda x, n: (Pair(x * n, 2), lambda r: [r.a, r.b, type(r) is Pair]),
    "max": lambda x, n: (x.max(0), lambda r: [r.values, r.indices]),
    "own_list": lambda x, n: (Own([x * n]), lambda r: [r[0], type(r) is Own, r.append(1)]),
    "defaultdict": lambda x, n: (defaultdict(list, a=x * n), lambda r: [r["a"], r["b"]]),
    "counter": lambda x, n: (Counter("aab"), lambda r: [r["a"], r.update("a")]),
    "slotted": lambda x, n: (Slotted(x * n), lambda r: [r.x, r.n]),
    "array": lambda x, n: (np.ones(2), lambda r: [r.tolist(), r.fill(5)]),
    "object_array": lambda x, n: (
        _objects([x * n, None]),
        lambda r: [r[0], r.fill(5)],
    ),
    "bytearray": lambda x, n: (bytearray(b"ab"), lambda r: [list(r), r.append(1)]),
}


@rows(MADE)
def made_anew_in_each_call(world: World, make: Callable) -> Program:
    look = make(torch.ones(4, 6), 1.0)[1]
    step = world.compile(lambda x, n: (make(x, n)[0], x * 2))
    for i in range(4):
        made, y = step(world.batch(i if world.changes else 0), 1.0)
        yield look(made), y


GIVEN_BACK: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda x: [x, 1.0],
    "dict": lambda x: {"a": x},
    "set": lambda x: {1.0},
    "dataclass": lambda x: Box(x),
    "namespace": lambda x: SimpleNamespace(x=x),
    "tuple": lambda x: (x, 1.0),
    "array": lambda x: np.ones(2),
    "bytearray": lambda x: bytearray(2),
    "deque": lambda x: deque([x]),
    "partial": lambda x: functools.partial(torch.mul, x),
    "object": lambda x: OutputRecipes(x, 1.0),
    "iterator": lambda x: iter([x]),
}


@rows(GIVEN_BACK)
def argument_given_back(world: World, make: Callable) -> Program:
    """The very object."""
    step = world.compile(lambda c, x: [c, {"inside": c}, x * 2] if world.changes else [0, {}, x])
    for i in range(4):
        c = make(world.batch(i))
        a, b, y = step(c, world.batch(i))
        yield a is c, b.get("inside") is c, y


@rows({k: v for k, v in GIVEN_BACK.items() if k not in ("iterator",)})
def captured_object_given_back(world: World, make: Callable) -> Program:
    c = make(world.batch(0))
    step = world.compile(lambda x: [c, {"inside": c}, x * 2] if world.changes else [0, {}, x])
    for i in range(3):
        a, b, y = step(world.batch(i))
        yield a is c, b.get("inside") is c, y


@row()
def argument_left_in_an_attribute(world: World) -> Program:
    holder = SimpleNamespace(last=None)

    def function(c: Any, x: torch.Tensor) -> torch.Tensor:
        if world.changes:
            holder.last = c
            c[0] = x * 2
        return x * 3

    step = world.compile(function)
    for i in range(3):
        c = [1.0]
        yield step(c, world.batch(i)), holder.last is c, c


# --- kinds of arguments ---------------------------------------------------------------------------


class Attributed(np.ndarray):
    pass


def _attributed(value: float) -> Any:
    made = np.ones(2).view(Attributed)
    made.k = value
    return made


def _masked(value: float) -> Any:
    return np.ma.MaskedArray([1.0, 2.0, 3.0], mask=[False, value > 1, False])


def _structured(value: float) -> Any:
    return np.array([(value, 2)], dtype=[("a", "f4"), ("b", "i4")])


class Calls:
    def __init__(self, by: float) -> None:
        self.by = by

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by * SCALE


class Cls2:
    by = 1.0


class Cls3:
    by = 3.0


OF_A_NUMBER: dict[str, tuple[Callable[[float], Any], Callable]] = {
    "slice": (lambda v: slice(0, int(v) + 1), lambda x, a: x[a]),
    "slices": (lambda v: (slice(0, int(v)), slice(None)), lambda x, a: x[a]),
    "slice_in_a_dict": (lambda v: {"at": slice(int(v), None)}, lambda x, a: x[a["at"]]),
    "ellipsis": (lambda v: (..., slice(int(v))), lambda x, a: x[a]),
    "range": (lambda v: range(int(v)), lambda x, a: x * len(a)),
    "object_array": (lambda v: np.array([v, "a"], dtype=object), lambda x, a: x * a[0]),
    "array_of_lists": (lambda v: _objects([[v], None]), lambda x, a: x * a[0][0]),
    "masked_array": (_masked, lambda x, a: x * float(a.sum())),
    "array_with_attributes": (_attributed, lambda x, a: x * a.k),
    "structured_array": (_structured, lambda x, a: x * float(a["a"][0])),
    "bytes": (lambda v: bytes([int(v)]), lambda x, a: x * a[0]),
    "memoryview": (lambda v: memoryview(bytes([int(v)])), lambda x, a: x * a[0]),
    "array": (lambda v: array.array("d", [v]), lambda x, a: x * a[0]),
    "set": (lambda v: {v, 5.0}, lambda x, a: x * sum(a)),
    "frozenset": (lambda v: frozenset([v, 5.0]), lambda x, a: x * sum(a)),
    "deque": (lambda v: deque([v]), lambda x, a: x * a[0]),
    "deque_maxlen": (lambda v: deque([1.0], int(v)), lambda x, a: x * a.maxlen),
    "ordered": (lambda v: OrderedDict(a=v), lambda x, a: x * a["a"]),
    "ordered_order": (
        lambda v: OrderedDict([("a", 2.0), ("b", 3.0)] if v > 1 else [("b", 3.0), ("a", 2.0)]),
        lambda x, a: x * next(iter(a.values())),
    ),
    "defaultdict": (
        lambda v: defaultdict(lambda: v),
        lambda x, a: x * copy.copy(a)["new"],
    ),
    "counter": (lambda v: Counter(a=int(v)), lambda x, a: x * a["a"]),
    "proxy": (lambda v: types.MappingProxyType({"a": v}), lambda x, a: x * a["a"]),
    "dict_values": (lambda v: {"a": v}.values(), lambda x, a: x * sum(a)),
    "named": (lambda v: Pair(v, 1), lambda x, a: x * a.a),
    "partial": (lambda v: functools.partial(torch.mul, other=v), lambda x, a: a(x)),
    "method": (lambda v: Calls(v).method, lambda x, a: a(x)),
    "builtin_method": (lambda v: [v].index, lambda x, a: x * (2 if _has(a, 1.0) else 3)),
    "class": (lambda v: Cls2 if v > 1 else Cls3, lambda x, a: x * a.by),
    "module": (lambda v: itertools if v > 1 else torch, lambda x, a: x * len(a.__name__)),
    "dtype": (lambda v: torch.float32 if v > 1 else torch.float64, lambda x, a: x * a.itemsize),
    "device": (lambda v: torch.device("cpu", int(v)), lambda x, a: x * a.index),
    "size": (lambda v: torch.Size([int(v), 2]), lambda x, a: x * a[0]),
    "complex": (lambda v: complex(v, 1), lambda x, a: x * a.real),
    "key_types": (lambda v: {1: 2.0} if v > 1 else {True: 2.0}, lambda x, a: x * len(str(a))),
    "function": (lambda v: lambda x: x * v, lambda x, a: a(x)),
    "lru_cache": (lambda v: functools.lru_cache(lambda: v), lambda x, a: x * a()),
}


def _objects(values: list) -> Any:
    made = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        made[i] = value
    return made


def _has(index: Callable, value: float) -> bool:
    try:
        index(value)
    except ValueError:
        return False
    return True


@rows(OF_A_NUMBER)
def argument_made_of_a_number(world: World, case: tuple) -> Program:
    make, use = case
    step = world.compile(lambda x, a: use(x, a))
    for v in (1.0, 2.0, 1.0, 2.0):
        yield step(world.batch(0), make(v if world.changes else 1.0))


@rows({k: OF_A_NUMBER[k] for k in ("method", "partial", "dict_values", "proxy", "slice", "deque")})
def made_anew_is_one_program(world: World, case: tuple) -> Program:
    make, use = case
    if use is OF_A_NUMBER["method"][1]:
        method = Calls(2.0)
        make = lambda v: method.method
    step = world.compile(lambda x, a: use(x, a))
    for i in range(4):
        yield step(world.batch(i if world.changes else 0), make(2.0))
    world.traced_at_most(1, step)


WITH_TENSORS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable]] = {
    "set": (lambda x: {x}, lambda a: next(iter(a)) * 2),
    "deque": (lambda x: deque([x]), lambda a: a[0] * 2),
    "keys": (lambda x: {x: 2.0}, lambda a: next(iter(a)) * 2),
    "object_array": (lambda x: _objects([x, 1]), lambda a: a[0] * 2),
    "partial": (lambda x: functools.partial(torch.mul, x), lambda a: a(2.0)),
    "method": (lambda x: x.mul, lambda a: a(2.0)),
    "proxy": (lambda x: types.MappingProxyType({"x": x}), lambda a: a["x"] * 2),
    "values": (lambda x: {"x": x}.values(), lambda a: next(iter(a)) * 2),
    "attribute": (lambda x: _with(x), lambda a: a * a.other),
    "max": (lambda x: x.max(0), lambda a: a.values * 2),
    "closure": (lambda x: lambda: x * 3, lambda a: a() * 2),
    "own_list": (lambda x: Own([x]), lambda a: a[0] * 2),
}


def _with(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.other = x + 1
    return y


@rows(WITH_TENSORS)
def tensors_in_an_argument(world: World, case: tuple) -> Program:
    make, use = case
    step = world.compile(lambda a: use(a))
    for i in range(4):
        yield step(make(world.batch(i if world.changes else 0)))
    world.traced_at_most(1, step)


@rows(WITH_TENSORS)
def tensors_with_a_history_in_an_argument(world: World, case: tuple) -> Program:
    make, use = case
    step = world.compile(lambda a: use(a).sum())
    for i in range(3):
        x = world.batch(i if world.changes else 0).requires_grad_()
        loss = step(make(x.exp()))
        loss.backward()
        yield loss.detach(), x.grad


# --- iterators among the arguments ----------------------------------------------------------------


STREAMS: dict[str, Callable[[list], Any]] = {
    "iter": iter,
    "generator": lambda values: (v for v in values),
    "map": lambda values: map(lambda v: v, values),  # noqa: C417
    "zip": lambda values: zip(values, range(9), strict=False),
    "enumerate": enumerate,
    "chain": lambda values: itertools.chain(values),
}


def _one(element: Any) -> torch.Tensor:
    """The tensor in what an iterator gives."""
    if isinstance(element, tuple):
        return element[0] * (1 + element[1])
    return element * 1


@rows(STREAMS)
def iterator_that_is_used_up(world: World, make: Callable) -> Program:
    step = world.compile(lambda it, x: sum(map(_one, it)) + x)
    for count in (2, 2, 3, 1, 2):
        values = [world.batch(i + count) for i in range(count if world.changes else 2)]
        yield step(make(values), world.batch(0))
    world.traced_at_most(3, step)


@rows(STREAMS)
def iterator_that_is_taken_from(world: World, make: Callable) -> Program:
    """What the step doesn't take is there for the caller."""
    step = world.compile(lambda it, x: _one(next(it)) + x)
    for i in range(4):
        iterator = make([world.batch(3 * i + k if world.changes else k) for k in range(3)])
        yield step(iterator, world.batch(0)), _one(next(iterator))
        yield step(iterator, world.batch(0)), len(list(iterator))
    world.traced_at_most(3, step)


@row()
def numbers_of_an_iterator(world: World) -> Program:
    step = world.compile(lambda x, it: [x * v for v in it])
    for i in range(5):
        yield step(world.batch(0), map(float, [1, i if world.changes else 0]))
    world.at_most(2, step)


@row()
def iterator_given_on(world: World) -> Program:
    def function(it: Any) -> Any:
        return next(it) * 2, it

    step = world.compile(function)
    for i in range(3):
        iterator = iter([world.batch(i if world.changes else 0), world.batch(7)])
        y, same = step(iterator)
        yield y, same is iterator, next(same)


@row()
def iterator_of_which_less_is_taken(world: World) -> Program:
    def function(it: Any, flag: float) -> Any:
        return next(it) * 2 if flag > 1 else next(it) + next(it)

    step = world.compile(function)
    for flag in (2.0, 0.5, 3.0, 0.25):
        iterator = iter([world.batch(k) for k in range(3)])
        yield step(iterator, flag if world.changes else 2.0), len(list(iterator))


# --- arrays that the step finds ------------------------------------------------------------------


FOUND_ARRAYS: dict[str, tuple[Callable[[], Any], Callable, Callable]] = {
    "objects": (
        lambda: _objects([1.0, [2.0]]),
        lambda a: a.__setitem__(0, 3.0),
        lambda x, a: x * a[0],
    ),
    "list_in_it": (
        lambda: _objects([1.0, [2.0]]),
        lambda a: a[1].__setitem__(0, 5.0),
        lambda x, a: x * a[1][0],
    ),
    "mask": (
        lambda: np.ma.MaskedArray([1.0, 2.0], mask=[False, False]),
        lambda a: a.mask.__setitem__(0, True),
        lambda x, a: x * float(a.sum()),
    ),
    "attribute": (
        lambda: _attributed(2.0),
        lambda a: setattr(a, "k", 3.0),
        lambda x, a: x * a.k,
    ),
    "structured": (
        lambda: _structured(2.0),
        lambda a: a["a"].__setitem__(0, 5.0),
        lambda x, a: x * float(a["a"][0]),
    ),
}


@rows(FOUND_ARRAYS)
def array_that_is_captured(world: World, case: tuple) -> Program:
    make, change, use = case
    a = make()
    step = world.compile(lambda x: use(x, a))
    yield step(world.batch(0))
    world.change(change, a)
    yield step(world.batch(0))
    yield step(world.batch(1))


@rows(FOUND_ARRAYS)
def array_that_is_given(world: World, case: tuple) -> Program:
    make, change, use = case
    a = make()
    step = world.compile(lambda x, a: use(x, a))
    yield step(world.batch(0), a)
    world.change(change, a)
    yield step(world.batch(0), a)
    yield step(world.batch(1), make())


# --- copies of steps ------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.linear = world.module(nn.Linear(6, 4))
        self.forward = world.compile(self.forward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@row()
def model_with_a_compiled_forward_copied(world: World) -> Program:
    torch.manual_seed(0)
    model = Net(world)
    x = world.batch(0)
    with torch.no_grad():
        yield model(x)
        other = copy.deepcopy(model)
        world.change(lambda: other.linear.weight.mul_(2))
        yield model(x), other(x)
        world.change(lambda: model.linear.weight.mul_(3))
        yield model(x), other(x)


@row()
def step_copied(world: World) -> Program:
    model = world.module(nn.Linear(6, 4))
    step = world.compile(model)
    x = world.batch(0)
    with torch.no_grad():
        yield step(x)
        other = copy.deepcopy(step)
        world.change(lambda: model.weight.mul_(2))
        yield step(x), other(x)


ARRAY_VIEWS: dict[str, Callable[[np.ndarray], Any]] = {
    "slice": lambda a: a[1:],
    "reversed_column": lambda a: a[::-1, 1],
    "transposed": lambda a: a.T,
    "as_integers": lambda a: a.view(np.int64),
    "shown_by_a_tensor": lambda a: CPU.numpy()[1:],
    "its_own": lambda a: (lambda made: [made, made[1:], made.T])(np.arange(6.0).reshape(2, 3)),
    "a_tensor": lambda a: torch.from_numpy(a),
    "part_of_a_tensor": lambda a: torch.from_numpy(a[::2])[1:, 1],
    "twice_as_tensors": lambda a: (lambda made: [made, made.t(), made])(torch.from_numpy(a)),
    "tensor_of_integers": lambda a: torch.as_tensor(a.view(np.int64)).view(torch.float64)[:, 1:],
}
CPU = torch.zeros(3)


@rows(
    {
        f"{name}_of_{how}": (f, how == "an_argument")
        for name, f in ARRAY_VIEWS.items()
        for how in ("a_captured_one", "an_argument")
    }
)
def view_of_an_array_given_away(world: World, case: tuple) -> Program:
    """The caller writes to what a step has returned or left, and looks at all that shares it."""
    view, given = case
    array, holder = np.arange(12.0).reshape(4, 3), SimpleNamespace(left=None)
    CPU.zero_()
    world.watch(array=array, holder=holder, cpu=CPU)

    def function(x: torch.Tensor, own: np.ndarray) -> list[Any]:
        shown = view(own if given else array)
        holder.left = [shown]
        return [x * 2, shown]

    step = world.compile(function)
    for n in range(3):
        own = np.ones((6, 3))[n : n + 4]
        found = step(world.batch(n), own)
        if world.changes:
            last = found[1][-1] if isinstance(found[1], list) else found[1]
            last[0] = n + 5
        yield found, own


def _record(x: torch.Tensor) -> Any:
    return SimpleNamespace(loss=x.sum(), more={})


TWICE: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "dict": (lambda x: {"loss": x.sum()}, lambda made: made.__setitem__("rate", 0.1)),
    "list": (lambda x: [x.sum()], lambda made: made.append(0.1)),
    "record": (_record, lambda made: made.more.update(rate=0.1)),
    "array": (lambda x: np.zeros(3), lambda made: made.__setitem__(1, 0.1)),
}


@rows(TWICE)
def returned_and_left(world: World, case: tuple) -> Program:
    """One object that is a result, and in an attribute, a list of the caller's, another object."""
    make, change = case
    holder = SimpleNamespace(last=None, history=None)
    world.watch(holder=holder)

    def function(x: torch.Tensor, seen: list) -> Any:
        made = holder.last = make(x)
        holder.history = (made, 1)
        seen.append(made)
        return made

    step = world.compile(function)
    for i in range(3):
        seen: list[Any] = []
        found = step(world.batch(i), seen)
        if world.changes:
            change(found)
        yield found, seen, [found is other for other in (holder.last, holder.history[0], *seen)]
