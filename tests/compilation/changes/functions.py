"""Changes of what the step's own Python reads: closures, globals, defaults, helpers, objects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import xla_dtensor as xd
from tests.compilation.changes import _helpers
from tests.compilation.changes._table import Program, row, rows
from tests.compilation.changes._world import World, numbers

SCALE: Any = 1.0
SETTINGS: dict[str, float] = {}


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def negative(x: torch.Tensor) -> torch.Tensor:
    return -x


# Before, after.
NUMBERS: dict[str, tuple[Any, Any]] = {
    "float": (2.0, 3.0),
    "int": (2, 3),
    "bool": (True, False),
    "none": (2.0, None),
    "str": ("2", "3"),
    "tuple": ((2.0, 1.0), (2.0, 5.0)),
    "int_to_float": (2, 2.5),
    "negative_zero": (0.0, -0.0),
    "nan": (1.0, float("nan")),
    "one_to_true": (1, True),
    "complex": (1j, 2j),
    "dtype": (torch.float32, torch.float16),
    "device_free_function": (twice, negative),
    "builtin": (torch.sin, torch.cos),
    "lambda": (lambda x: x + 1, lambda x: x + 2),
    "slice": (slice(0, 2), slice(1, 3)),
    "ellipsis_to_index": (..., 0),
    "frozenset": (frozenset({2}), frozenset({3})),
    "range": (range(2), range(3)),
}


def use(x: torch.Tensor, value: Any) -> Any:
    """A result that shows what ``value`` is, for each of `NUMBERS`."""
    if isinstance(value, torch.dtype):
        return x.to(value)
    if isinstance(value, slice | type(...)):
        return x[value]
    if value is None or isinstance(value, bool):
        return x - 1 if value else x + 1
    if isinstance(value, str | tuple):
        return x * float(value[-1])
    if isinstance(value, frozenset | range):
        return x * sum(value)
    if isinstance(value, complex):
        return x * value.imag
    if callable(value):
        return value(x)
    return x[0] if value == 0 and type(value) is int else torch.copysign(x.abs() * value, x) / value


@rows(NUMBERS)
def closure(world: World, case: tuple[Any, Any]) -> Program:
    value, later = case
    x = world.batch(0)
    step = world.compile(lambda: use(x, value))
    if value == 0.0:
        step = world.compile(lambda: x / value)
    elif isinstance(value, int | float) and not isinstance(later, bool | None):
        step = world.compile(lambda: x * value)
    yield step()
    yield step()
    if world.changes:
        value = later
    yield step()
    yield step()


@rows({name: NUMBERS[name] for name in ("float", "int", "str", "none", "device_free_function")})
def a_global(world: World, case: tuple[Any, Any]) -> Program:
    global SCALE
    SCALE, later = case
    step = world.compile(lambda x: SCALE(x) if callable(SCALE) else x * float(SCALE or 5.0))
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        SCALE = later
    yield step(world.batch(0))


@rows({"xla": True, "cpu": False})
def a_global_tensor(world: World, placed: bool) -> Program:
    global SCALE
    make = lambda v: world.tensor(torch.tensor(v), None) if placed else torch.tensor(v)
    SCALE = make(2.0)
    step = world.compile(lambda x: x * SCALE)
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        SCALE = make(3.0)
    yield step(world.batch(0))


@row()
def a_global_dict(world: World) -> Program:
    SETTINGS.update(scale=2.0)
    step = world.compile(lambda x: x * SETTINGS["scale"])
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(SETTINGS.update, scale=3.0)
    yield step(world.batch(0))


@row()
def a_global_defined_later(world: World) -> Program:
    """A name that the step looks for, and finds only later."""
    globals().pop("LATER", None)
    step = world.compile(lambda x: x * globals().get("LATER", 2.0))
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        globals()["LATER"] = 3.0
    yield step(world.batch(0))


@row()
def a_builtin_shadowed(world: World) -> Program:
    globals().pop("abs", None)
    step = world.compile(lambda x: abs(x))
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        globals()["abs"] = torch.neg
    try:
        results = step(world.batch(0))
    finally:
        globals().pop("abs", None)
    yield results


@rows({"tensor": 0, "parameter": 1})
def a_tensor_rebound(world: World, kind: int) -> Program:
    make = world.parameter if kind else world.tensor
    weight = make(numbers(1, 4, 6))

    def step(x: torch.Tensor) -> torch.Tensor:
        return (x * weight).detach()

    compiled = world.compile(step)
    yield compiled(world.batch(0))
    yield compiled(world.batch(0))
    if world.changes:
        weight = make(numbers(2, 4, 6))
    yield compiled(world.batch(0))
    yield compiled(world.batch(1))


@row()
def a_tensor_rebound_to_another_shape(world: World) -> Program:
    weight = world.tensor(numbers(1, 4, 6))
    compiled = world.compile(lambda x: x * weight)
    yield compiled(world.batch(0))
    yield compiled(world.batch(0))
    if world.changes:
        weight = world.tensor(numbers(2, 1, 6), None)
    yield compiled(world.batch(0))


@row()
def a_module_rebound(world: World) -> Program:
    model = world.module(nn.Linear(6, 8))
    compiled = world.compile(lambda x: model(x).detach())
    yield compiled(world.batch(0))
    yield compiled(world.batch(0))
    if world.changes:
        model = world.module(nn.Linear(6, 8))
    yield compiled(world.batch(0))


@row()
def a_closure_cell_of_a_closure(world: World) -> Program:
    scale = 2.0
    inner = lambda x: x * scale
    middle = lambda x: inner(x)
    step = world.compile(lambda x: middle(x))
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        scale = 3.0
    yield step(world.batch(0))


@row()
def a_helper_in_a_closure_rebound(world: World) -> Program:
    helper = twice
    outer = lambda x: helper(x)
    step = world.compile(lambda x: outer(x))
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        helper = negative
    yield step(world.batch(0))


DEFAULTS: dict[str, Callable[[Callable], Any]] = {
    "positional": lambda f: setattr(f, "__defaults__", (3.0,)),
    "keyword_only": lambda f: f.__kwdefaults__.update(offset=3.0),
    "keyword_only_replaced": lambda f: setattr(f, "__kwdefaults__", {"offset": 3.0}),
    "code": lambda f: setattr(f, "__code__", (lambda x, scale=2.0, *, offset=1.0: x).__code__),
}


@rows(DEFAULTS)
def defaults(world: World, change: Callable) -> Program:
    def function(x: torch.Tensor, scale: float = 2.0, *, offset: float = 1.0) -> torch.Tensor:
        return x * scale + offset

    step = world.compile(function)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change, function)
    yield step(world.batch(0))


@rows(DEFAULTS)
def defaults_of_a_helper(world: World, change: Callable) -> Program:
    def function(x: torch.Tensor, scale: float = 2.0, *, offset: float = 1.0) -> torch.Tensor:
        return x * scale + offset

    step = world.compile(lambda x: function(x))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change, function)
    yield step(world.batch(0))


HELPERS: dict[str, tuple[Callable, Callable[[], Any]]] = {
    "global": (_helpers.scaled, lambda: setattr(_helpers, "SCALE", 3.0)),
    "global_of_a_helpers_helper": (
        _helpers.scaled_by_helper,
        lambda: setattr(_helpers, "SCALE", 3.0),
    ),
    "module_attribute": (lambda x: x * _helpers.SCALE, lambda: setattr(_helpers, "SCALE", 3.0)),
    "nested_module_attribute": (
        lambda x: x * _helpers.CONFIG.inner.scale,
        lambda: setattr(_helpers.CONFIG.inner, "scale", 3.0),
    ),
    "function_replaced": (
        lambda x: _helpers.helper(x),
        lambda: setattr(_helpers, "helper", negative),
    ),
    "function_replaced_in_helper": (
        _helpers.calls_helper,
        lambda: setattr(_helpers, "helper", negative),
    ),
    "class_attribute": (
        lambda x: _helpers.Scaler()(x),
        lambda: setattr(_helpers.Scaler, "scale", 3.0),
    ),
    "static_method": (
        lambda x: _helpers.Scaler.static(x),
        lambda: setattr(_helpers.Scaler, "static", staticmethod(negative)),
    ),
    "class_method": (
        lambda x: _helpers.Scaler.by_class(x),
        lambda: setattr(_helpers.Scaler, "scale", 3.0),
    ),
    "decorated": (_helpers.decorated, lambda: setattr(_helpers, "SCALE", 3.0)),
    "generator": (
        lambda x: sum(_helpers.parts(x)),
        lambda: setattr(_helpers, "SCALE", 3.0),
    ),
    "list_comprehension": (
        lambda x: sum([x * _helpers.SCALE for _ in range(2)]),
        lambda: setattr(_helpers, "SCALE", 3.0),
    ),
    "cached": (_helpers.cached, lambda: _helpers.SCALE_LIST.__setitem__(0, 3.0)),
    "property": (
        lambda x: x * _helpers.SCALER.double,
        lambda: setattr(_helpers.SCALER, "own", 3.0),
    ),
    "torch_function_replaced": (
        lambda x: _helpers.F.relu(x),
        lambda: setattr(_helpers.F, "relu", negative),
    ),
    "autograd_function": (
        lambda x: _helpers.Times.apply(x),
        lambda: setattr(_helpers, "SCALE", 3.0),
    ),
    "environment": (
        lambda x: x * float(_helpers.os.environ["XLA_DTENSOR_TEST_SCALE"]),
        lambda: _helpers.os.environ.update(XLA_DTENSOR_TEST_SCALE="3"),
    ),
    "a_switch": (
        lambda x: x * (xd.config.expert_capacity or 2.0),
        lambda: setattr(xd.config, "expert_capacity", 3.0),
    ),
    "environment_in_bytes": (
        lambda x: x * float(_helpers.os.environb[b"XLA_DTENSOR_TEST_SCALE"]),
        lambda: _helpers.os.environ.update(XLA_DTENSOR_TEST_SCALE="3"),
    ),
}


@rows(HELPERS)
def of_a_helper(world: World, case: tuple[Callable, Callable]) -> Program:
    function, change = case
    _helpers.reset()
    step = world.compile(function)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change)
    try:
        results = step(world.batch(0))
    finally:
        _helpers.reset()
    yield results


class Doubling(list):
    def __getitem__(self, position: Any) -> Any:
        return super().__getitem__(position) * 2


class DoublingTable(dict):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) * 2

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key, default) * 3

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value + 1)


OWN_CONTAINERS: dict[str, Callable[[], Any]] = {
    "list": lambda: Doubling([2.0]),
    "dict": lambda: DoublingTable({0: 2.0}),
}


@rows(OWN_CONTAINERS)
def numbers_in_a_container_of_ones_own(world: World, make: Callable) -> Program:
    """What its methods make of the number is the step's doing, in each call once."""
    held = make()
    step = world.compile(lambda x: x * held[0])
    for number in range(4):
        yield step(world.batch(0))
        world.change(held.__setitem__, 0, 3.0 + number)


class Multiplier:
    def times(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    sizes: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Fallback:
    """Its attributes are made by ``__getattr__``."""

    def __init__(self) -> None:
        self.table = {"scale": 2.0}

    def __getattr__(self, name: str) -> Any:
        return self.table[name]


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "namespace": (
        lambda: SimpleNamespace(scale=2.0),
        lambda o, x: x * o.scale,
        lambda o: setattr(o, "scale", 3.0),
    ),
    "nested": (
        lambda: SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=2.0))),
        lambda o, x: x * o.a.b.c,
        lambda o: setattr(o.a.b, "c", 3.0),
    ),
    "nested_replaced": (
        lambda: SimpleNamespace(a=SimpleNamespace(b=2.0)),
        lambda o, x: x * o.a.b,
        lambda o: setattr(o, "a", SimpleNamespace(b=3.0)),
    ),
    "dataclass": (Config, lambda o, x: x * o.scale, lambda o: setattr(o, "scale", 3.0)),
    "dataclass_list": (Config, lambda o, x: x * sum(o.sizes), lambda o: o.sizes.append(3)),
    "frozen_in_dataclass": (
        lambda: Config(inner=Frozen(2.0)),
        lambda o, x: x * o.inner.scale,
        lambda o: setattr(o, "inner", Frozen(3.0)),
    ),
    "slots": (Slots, lambda o, x: x * o.scale, lambda o: setattr(o, "scale", 3.0)),
    "getattr": (Fallback, lambda o, x: x * o.scale, lambda o: o.table.update(scale=3.0)),
    "getattr_by_name": (
        lambda: SimpleNamespace(scale=2.0),
        lambda o, x: x * getattr(o, "sca" + "le"),
        lambda o: setattr(o, "scale", 3.0),
    ),
    "missing_attribute": (
        SimpleNamespace,
        lambda o, x: x * (o.scale if hasattr(o, "scale") else 2.0),
        lambda o: setattr(o, "scale", 3.0),
    ),
    "vars": (
        lambda: SimpleNamespace(scale=2.0),
        lambda o, x: x * sum(vars(o).values()),
        lambda o: setattr(o, "more", 3.0),
    ),
    "class_attribute": (
        lambda: type("Own", (), {"scale": 2.0})(),
        lambda o, x: x * o.scale,
        lambda o: setattr(type(o), "scale", 3.0),
    ),
    "instance_over_class": (
        lambda: type("Own", (), {"scale": 2.0})(),
        lambda o, x: x * o.scale,
        lambda o: setattr(o, "scale", 3.0),
    ),
    "property": (
        lambda: type("Own", (), {"base": 1.0, "scale": property(lambda s: s.base * 2)})(),
        lambda o, x: x * o.scale,
        lambda o: setattr(o, "base", 3.0),
    ),
    "list": (lambda: [2.0, 1.0], lambda o, x: x * o[0], lambda o: o.__setitem__(0, 3.0)),
    "list_length": (
        lambda: [2.0, 1.0],
        lambda o, x: x * len(o),
        lambda o: o.append(0.0),
    ),
    "list_order": (lambda: [2.0, 1.0], lambda o, x: x * o[0], lambda o: o.reverse()),
    "list_in_list": (lambda: [[2.0]], lambda o, x: x * o[0][0], lambda o: o[0].insert(0, 3.0)),
    "list_empty": (
        list,
        lambda o, x: x * 3 if o else x,
        lambda o: o.append(1),
    ),
    "dict": (lambda: {"a": 2.0}, lambda o, x: x * o["a"], lambda o: o.update(a=3.0)),
    "dict_key": (lambda: {"a": 2.0}, lambda o, x: x * len(o), lambda o: o.update(b=3.0)),
    "dict_in": (dict, lambda o, x: x * 2 if "a" in o else x, lambda o: o.update(a=3.0)),
    "dict_get": (dict, lambda o, x: x * o.get("a", 2.0), lambda o: o.update(a=3.0)),
    "dict_order": (
        lambda: {"a": 2.0, "b": 3.0},
        lambda o, x: x * next(iter(o.values())),
        lambda o: o.update(a=o.pop("a")),
    ),
    "set": (lambda: {1, 2}, lambda o, x: x * sum(o), lambda o: o.add(3)),
    "list_of_tensors": (
        lambda: [torch.ones(4, 6)],
        lambda o, x: sum((x * t for t in o), x * 0),
        lambda o: o.append(torch.ones(4, 6)),
    ),
    "tensor_in_namespace": (
        lambda: SimpleNamespace(t=torch.ones(4, 6)),
        lambda o, x: x * o.t,
        lambda o: setattr(o, "t", torch.full((4, 6), 3.0)),
    ),
    "callable": (
        lambda: SimpleNamespace(f=twice),
        lambda o, x: o.f(x),
        lambda o: setattr(o, "f", negative),
    ),
}


@rows(OBJECTS)
def captured_object(world: World, case: tuple[Callable, Callable, Callable]) -> Program:
    make, function, change = case
    value = make()
    step = world.compile(lambda x: function(value, x))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change, value)
    yield step(world.batch(0))


@rows({n: OBJECTS[n] for n in ("namespace", "nested", "dataclass", "slots", "list", "dict", "set")})
def argument_object(world: World, case: tuple[Callable, Callable, Callable]) -> Program:
    """The same object, passed in every call."""
    make, function, change = case
    value = make()
    step = world.compile(lambda o, x: function(o, x))
    yield step(value, world.batch(0))
    yield step(value, world.batch(0))
    world.change(change, value)
    yield step(value, world.batch(0))


@rows({n: OBJECTS[n] for n in ("namespace", "nested", "dataclass", "list", "dict", "callable")})
def partial_argument(world: World, case: tuple[Callable, Callable, Callable]) -> Program:
    make, function, change = case
    value = make()
    step = world.compile(functools.partial(function, value))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change, value)
    yield step(world.batch(0))


@row()
def object_rebound(world: World) -> Program:
    config = Config()
    step = world.compile(lambda x: x * config.scale)
    yield step(world.batch(0))
    yield step(world.batch(0))
    if world.changes:
        config = Config(scale=3.0)
    yield step(world.batch(0))


class Trainer:
    """A user's trainer: a method is compiled, or the object is called."""

    factor = 1.0

    def __init__(self, world: World) -> None:
        self.scale, self.weight = 2.0, world.parameter(numbers(3, 4, 6))
        self.helper = twice

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(x * self.weight.detach()) * self.scale * self.factor

    __call__ = step


TRAINER: dict[str, Callable[[Trainer, World], Any]] = {
    "attribute": lambda t, w: setattr(t, "scale", 3.0),
    "tensor": lambda t, w: setattr(t, "weight", w.parameter(numbers(4, 4, 6))),
    "function": lambda t, w: setattr(t, "helper", negative),
    "class_attribute": lambda t, w: setattr(t, "factor", 3.0),
    "deleted": lambda t, w: delattr(t, "scale") or setattr(type(t), "scale", 5.0),
}


@rows(
    {
        f"{how}-{name}": (how, change)
        for how in ("bound_method", "callable_object", "partial_of_method")
        for name, change in TRAINER.items()
    }
)
def of_a_trainer(world: World, case: tuple[str, Callable]) -> Program:
    how, change = case
    own = type("Own", (Trainer,), {})(world)
    target = {
        "bound_method": own.step,
        "callable_object": own,
        "partial_of_method": functools.partial(own.step),
    }[how]
    step = world.compile(target)
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(change, own, world)
    yield step(world.batch(0))
