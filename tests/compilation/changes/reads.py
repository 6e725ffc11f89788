"""Reads in ways of their own: made-up attributes, proxies, views, registries, library objects."""

from __future__ import annotations

import abc
import contextvars
import datetime
import decimal
import functools
import hashlib
import itertools
import operator
import threading
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributions

from tests.compilation.changes._table import Program, row, rows
from tests.compilation.changes._world import World


class Holder:
    def __init__(self) -> None:
        self.scale = 2.0


class Forwarding:
    """Has the attributes of another object."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Looking:
    """Has what a dict holds as attributes."""

    def __init__(self, values: dict[str, float]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values[name]


class Strict:
    """Knows the attributes that are in its dict, and no others."""

    def __init__(self, values: dict[str, float]) -> None:
        object.__setattr__(self, "_values", values)

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, "_values")[name]


class StrictAndCalled(Strict):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def scaled_by(thing: Any) -> Callable:
    return lambda x: x * thing.scale


def _forwarding() -> tuple[Callable, Callable]:
    inner = Holder()
    return scaled_by(Forwarding(inner)), lambda: setattr(inner, "scale", 3.0)


def _looking() -> tuple[Callable, Callable]:
    values = {"scale": 2.0}
    return scaled_by(Looking(values)), lambda: values.update(scale=3.0)


def _strict() -> tuple[Callable, Callable]:
    values = {"scale": 2.0}
    return scaled_by(Strict(values)), lambda: values.update(scale=3.0)


def _strict_called() -> tuple[Callable, Callable]:
    values = {"scale": 2.0}
    strict = StrictAndCalled(values)
    return lambda x: strict(x), lambda: values.update(scale=3.0)


def _thread_local() -> tuple[Callable, Callable]:
    local = threading.local()
    local.scale = 2.0
    return scaled_by(local), lambda: setattr(local, "scale", 3.0)


class Local(threading.local):
    scale = 2.0


def _thread_local_class() -> tuple[Callable, Callable]:
    local = Local()
    return scaled_by(local), lambda: setattr(local, "scale", 3.0)


def _proxy() -> tuple[Callable, Callable]:
    holder = Holder()
    return scaled_by(weakref.proxy(holder)), lambda: setattr(holder, "scale", 3.0)


def _proxy_of_a_module() -> tuple[Callable, Callable]:
    model = torch.nn.Identity()
    model.scale = 2.0
    return scaled_by(weakref.proxy(model)), lambda: setattr(model, "scale", 3.0)


def _values() -> tuple[Callable, Callable]:
    table = {"a": 2.0}
    view = table.values()
    return lambda x: x * next(iter(view)), lambda: table.update(a=3.0)


def _items() -> tuple[Callable, Callable]:
    table = OrderedDict(a=2.0)
    view = SimpleNamespace(items=table.items())
    return lambda x: x * sum(v for _, v in view.items), lambda: table.update(b=3.0)


def _keys() -> tuple[Callable, Callable]:
    table = {"a": 2.0}
    keys = table.keys()
    return lambda x: x * len(keys) if "b" in keys else x, lambda: table.update(b=3.0)


def _class_getitem() -> tuple[Callable, Callable]:
    class Settings:
        values = {"scale": 2.0}

        def __class_getitem__(cls, name: str) -> float:
            return cls.values[name]

    return lambda x: x * Settings["scale"], lambda: Settings.values.update(scale=3.0)


class Slotted:
    __slots__ = ("scale",)


class SlottedAndMore(Slotted):
    def __init__(self) -> None:
        self.scale = 2.0
        self.other = 1.0


class SlottedList(list):
    __slots__ = ("scale",)


class SlottedModule(Slotted, torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0


def _slots() -> tuple[Callable, Callable]:
    holder = SlottedAndMore()
    return scaled_by(holder), lambda: setattr(holder, "scale", 3.0)


def _slots_of_a_list() -> tuple[Callable, Callable]:
    holder = SlottedList()
    holder.scale = 2.0
    return scaled_by(holder), lambda: setattr(holder, "scale", 3.0)


def _slots_of_a_module() -> tuple[Callable, Callable]:
    holder = SlottedModule()
    return scaled_by(holder), lambda: setattr(holder, "scale", 3.0)


def _name_from_data() -> tuple[Callable, Callable]:
    holder, names = Holder(), ["scale"]

    def function(x: torch.Tensor) -> torch.Tensor:
        for name in names:
            if hasattr(holder, name):
                x = x * getattr(holder, name)
        return x

    return function, lambda: setattr(holder, "scale", 3.0)


def _is_there() -> tuple[Callable, Callable]:
    holder, names = Holder(), ["scale", "bias"]

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * sum(hasattr(holder, name) for name in names)

    return function, lambda: setattr(holder, "bias", 3.0)


def _path_of_names() -> tuple[Callable, Callable]:
    outer = SimpleNamespace(inner=Holder())

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * functools.reduce(getattr, ["inner", "scale"], outer)

    return function, lambda: setattr(outer.inner, "scale", 3.0)


def _module_getattr() -> tuple[Callable, Callable]:
    module = ModuleType("made_up_settings")
    values = module.__dict__["values"] = {"scale": 2.0}
    exec("def __getattr__(name):\n    return values[name]", module.__dict__)
    return scaled_by(module), lambda: values.update(scale=3.0)


def _registered() -> tuple[Callable, Callable]:
    scaling = abc.ABCMeta("Scaling", (), {})
    other = type("Other", (Holder,), {})
    holder = other()
    return (
        lambda x: x * 3 if isinstance(holder, scaling) else x,
        lambda: scaling.register(other),
    )


def _registered_with_a_subclass() -> tuple[Callable, Callable]:
    scaling = abc.ABCMeta("Scaling", (), {})
    inner = abc.ABCMeta("Inner", (scaling,), {})
    other = type("Other", (Holder,), {})
    holder = other()
    return (
        lambda x: x * 3 if isinstance(holder, scaling) else x,
        lambda: inner.register(other),
    )


def _spelled_in_full() -> tuple[Callable, Callable]:
    return (
        lambda x: torch.nn.functional.softsign(x),
        lambda: setattr(torch.nn.functional, "softsign", torch.tanh),
    )


SCALE = 2.0


def _replaced_function_reads() -> tuple[Callable, Callable]:
    """A function of the user's in torch's place, and what it reads."""
    torch.nn.functional.softsign = lambda x: x * SCALE
    return lambda x: torch.nn.functional.softsign(x), lambda: globals().update(SCALE=3.0)


def _set_by_a_name_from_data() -> tuple[Callable, Callable]:
    holder, names = Holder(), ["scale"]

    def function(x: torch.Tensor) -> torch.Tensor:
        for name in names:
            setattr(holder, name, 4.0)
        return x * 1 if holder.scale == 4.0 else x * 2

    def change() -> None:
        names.clear()
        holder.scale = 2.0

    return function, change


def _mangled_slot() -> tuple[Callable, Callable]:
    class Hidden:
        __slots__ = ("__scale",)

        def __init__(self) -> None:
            self.__scale = 2.0

        def set(self, scale: float) -> None:
            self.__scale = scale

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.__scale

    hidden = Hidden()
    return lambda x: hidden(x), lambda: hidden.set(3.0)


def _default_factory() -> tuple[Callable, Callable]:
    table: defaultdict[str, float] = defaultdict(lambda: SCALE)

    def change() -> None:
        globals().update(SCALE=3.0)
        table["a"]

    return lambda x: x * table.get("a", 5.0), change


def _decimal_context() -> tuple[Callable, Callable]:
    context, ten = decimal.Context(prec=3), decimal.Decimal(10)
    divided = lambda: float(context.divide(ten, decimal.Decimal(3)))
    return lambda x: x * divided(), lambda: setattr(context, "prec", 1)


def _digest(name: str, *length: int) -> Callable[[], tuple[Callable, Callable]]:
    def make() -> tuple[Callable, Callable]:
        kept = hashlib.new(name, b"a")
        return lambda x: x * kept.digest(*length)[0], lambda: kept.update(b"b")

    return make


def _seed_of_a_generator() -> tuple[Callable, Callable]:
    generator = torch.Generator().manual_seed(3)
    return lambda x: x * generator.initial_seed(), lambda: generator.manual_seed(5)


def _scripted(made: Any, key: Any) -> Callable[[], tuple[Callable, Callable]]:
    def make() -> tuple[Callable, Callable]:
        with warnings.catch_warnings():  # torch.jit.script is deprecated
            warnings.simplefilter("ignore")
            kept = torch.jit.script(made)
        return lambda x: x * kept[key], lambda: kept.__setitem__(key, 3.0)

    return make


def _flat() -> tuple[Callable, Callable]:
    array = np.ones((2, 2))
    flat = array.flat
    return lambda x: x * float(flat[1]), lambda: array.__setitem__((0, 1), 5.0)


class Zone(datetime.tzinfo):
    hours = 1

    def utcoffset(self, when: Any) -> datetime.timedelta:
        return datetime.timedelta(hours=self.hours)


def _time_zone() -> tuple[Callable, Callable]:
    zone = Zone()
    noon = datetime.datetime(2024, 1, 1, 12, tzinfo=zone)
    return lambda x: x * len(noon.isoformat()), lambda: setattr(zone, "hours", 1.001)


def _counter_shown() -> tuple[Callable, Callable]:
    counter = itertools.count(1)
    return lambda x: x * int(repr(counter)[6:-1]), lambda: next(counter)


def _how_much_is_left() -> tuple[Callable, Callable]:
    waiting = iter([1, 2, 3])
    return lambda x: x * operator.length_hint(waiting), lambda: next(waiting)


READS: dict[str, Callable[[], tuple[Callable, Callable]]] = {
    "forwarded": _forwarding,
    "looked_up": _looking,
    "strict": _strict,
    "strict_and_called": _strict_called,
    "thread_local": _thread_local,
    "thread_local_class": _thread_local_class,
    "proxy": _proxy,
    "proxy_of_a_module": _proxy_of_a_module,
    "values": _values,
    "items": _items,
    "keys": _keys,
    "class_getitem": _class_getitem,
    "slots": _slots,
    "slots_of_a_list": _slots_of_a_list,
    "slots_of_a_module": _slots_of_a_module,
    "name_from_data": _name_from_data,
    "is_there": _is_there,
    "path_of_names": _path_of_names,
    "module_getattr": _module_getattr,
    "registered": _registered,
    "registered_with_a_subclass": _registered_with_a_subclass,
    "spelled_in_full": _spelled_in_full,
    "replaced_function_reads": _replaced_function_reads,
    "set_by_a_name_from_data": _set_by_a_name_from_data,
    "mangled_slot": _mangled_slot,
    "default_factory": _default_factory,
    "decimal_context": _decimal_context,
    "digest": _digest("sha256"),
    "digest_of_any_length": _digest("shake_128", 4),
    "seed_of_a_generator": _seed_of_a_generator,
    "scripted_dict": _scripted({"a": 1.0}, "a"),
    "scripted_list": _scripted([1.0, 2.0], 0),
    "flat": _flat,
    "time_zone": _time_zone,
    "counter_shown": _counter_shown,
    "how_much_is_left": _how_much_is_left,
}


@rows(READS)
def read(world: World, make: Callable[[], tuple[Callable, Callable]]) -> Program:
    softsign = torch.nn.functional.softsign
    try:
        function, change = make()
        step = world.compile(function)
        yield step(world.batch(0))
        yield step(world.batch(0))
        world.change(change)
        yield step(world.batch(0))
        yield step(world.batch(1))
        # What is set by a name from data counts as read before.
        world.at_most(3 if make is _set_by_a_name_from_data else 2, step)
    finally:
        torch.nn.functional.softsign = softsign
        globals().update(SCALE=2.0)


FACTOR = 2.0


class Settings(NamedTuple):
    scale: float

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * FACTOR


@row()
def method_of_a_named_tuple(world: World) -> Program:
    """As an argument; its method reads a global."""
    global FACTOR
    step = world.compile(lambda x, settings: settings.apply(x))
    try:
        yield step(world.batch(0), Settings(2.0))
        world.change(_set_factor, 3.0)
        yield step(world.batch(0), Settings(2.0))
        yield step(world.batch(1), [Settings(2.0)][0])
    finally:
        FACTOR = 2.0


def _set_factor(value: float) -> None:
    global FACTOR
    FACTOR = value


@row()
def strict_argument(world: World) -> Program:
    values = {"scale": 2.0}
    strict = Strict(values)
    step = world.compile(lambda x, thing: x * thing.scale)
    yield step(world.batch(0), strict)
    world.change(values.update, scale=3.0)
    yield step(world.batch(0), strict)


@row()
def thread_local_of_another_thread(world: World) -> Program:
    local = Local()
    step = world.compile(scaled_by(local))
    x = world.batch(0)
    yield step(x)
    found: list[torch.Tensor] = []

    def other() -> None:
        if world.changes:
            local.scale = 5.0
        found.append(step(x))

    for _ in range(2):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        yield found[-1], step(x)


def _counted(local: Any, x: torch.Tensor) -> torch.Tensor:
    local.count = getattr(local, "count", 0) + 1
    return x * local.count


def _kept(local: Any, x: torch.Tensor) -> torch.Tensor:
    local.state = x if not hasattr(local, "state") else local.state * 0.5 + x
    return local.state * 2


def _left(local: Any, x: torch.Tensor) -> torch.Tensor:
    local.last = x.sum()
    return x * 2


@rows({"count": _counted, "state": _kept, "last": _left})
def thread_local_written(world: World, function: Callable) -> Program:
    """Each thread has a state of its own."""
    local = threading.local()
    step = world.compile(lambda x: function(local, x))
    found: list[Any] = []

    def calls(x: torch.Tensor) -> None:
        found.extend([step(x), dict(vars(local))] for _ in range(3))

    for i in range(2):
        calls(world.batch(i))
        yield found[-3:]
        if world.changes:
            thread = threading.Thread(target=calls, args=(world.batch(i + 2),))
            thread.start()
            thread.join()
        yield found[-3:], vars(local)


# Their checks look at values.
normal = functools.partial(distributions.Normal, validate_args=False)
DISTRIBUTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "log_prob": (
        lambda scale: normal(scale * 0, scale),
        lambda d, x: d.log_prob(x),
    ),
    "property": (lambda scale: normal(scale * 0, scale), lambda d, x: x * d.stddev),
    "entropy": (lambda scale: normal(scale * 0, scale), lambda d, x: x * d.entropy()),
    "sample": (
        lambda scale: normal(scale * 0 + 1, scale),
        lambda d, x: (d.rsample((3,)) - d.loc) / d.scale * 0 + d.scale,
    ),
    "nested": (
        lambda scale: distributions.Independent(
            normal(scale.expand(6) * 0, scale.expand(6)), 1, validate_args=False
        ),
        lambda d, x: d.log_prob(x),
    ),
    "transformed": (
        lambda scale: distributions.LogNormal(scale * 0, scale, validate_args=False),
        lambda d, x: d.log_prob(x.abs() + 0.1) + d.mean,
    ),
}


def _last(distribution: Any) -> Any:
    while hasattr(distribution, "base_dist"):
        distribution = distribution.base_dist
    return distribution


@rows(DISTRIBUTIONS)
def distribution(world: World, case: tuple[Callable[..., Any], Callable[..., Any]]) -> Program:
    make, use = case
    holder = SimpleNamespace(it=make(world.tensor(torch.tensor(2.0), None)))
    step = world.compile(lambda x: use(holder.it, x))
    yield step(world.batch(0))
    inner = _last(holder.it)
    world.change(
        setattr, inner, "scale", world.tensor(torch.tensor(3.0), None).expand_as(inner.scale)
    )
    yield step(world.batch(0))
    if world.changes:
        holder.it = make(world.tensor(torch.tensor(4.0), None))
    yield step(world.batch(0))


@row()
def distribution_with_a_number(world: World) -> Program:
    """Its scale is a Python number, which `Uniform` and others make a tensor of."""
    distribution = SimpleNamespace(
        it=distributions.Bernoulli(logits=world.tensor(torch.zeros(4, 6)), validate_args=False)
    )
    distribution.it.scale = 2.0
    step = world.compile(
        lambda x: distribution.it.log_prob((x > 0).float()) * distribution.it.scale
    )
    yield step(world.batch(0))
    world.change(setattr, distribution.it, "scale", 3.0)
    yield step(world.batch(0))
    world.change(setattr, distribution.it, "logits", world.tensor(torch.ones(4, 6)))
    yield step(world.batch(0))


class Iterated:
    def __init__(self) -> None:
        self.parts = {"a": 2.0}

    def __iter__(self) -> Iterator[float]:
        return iter(self.parts.values())


@row()
def iterated_object(world: World) -> Program:
    parts = Iterated()

    def function(x: torch.Tensor) -> torch.Tensor:
        for part in parts:
            x = x * part
        return x

    step = world.compile(function)
    yield step(world.batch(0))
    world.change(parts.parts.update, b=3.0)
    yield step(world.batch(0))


@row()
def an_array_of_records(world: World) -> Program:
    """NumPy's ``recarray`` has a ``__getattribute__`` of its own."""
    array = np.rec.array([(2.0, 1)], dtype=[("scale", float), ("times", int)])
    step, x = world.compile(lambda x: x * float(array.scale[0])), world.batch(0)
    yield step(x)
    array.scale[0] = 5.0 if world.changes else 2.0
    yield step(x)


@row()
def what_an_exception_was_made_with(world: World) -> Program:
    error = ValueError(2.0)
    step, x = world.compile(lambda x: x * error.args[0]), world.batch(0)
    yield step(x)
    world.change(setattr, error, "args", (5.0,))
    yield step(x)


@row()
def filters_of_warnings(world: World) -> Program:
    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            warnings.warn("small", UserWarning, stacklevel=1)
        except UserWarning:
            return x * 3
        return x * 2

    step = world.compile(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield step(world.batch(0))
        world.change(warnings.simplefilter, "error")
        yield step(world.batch(0))


@row()
def filters_of_warnings_set_in_the_step(world: World) -> Program:
    def function(x: torch.Tensor) -> torch.Tensor:
        warnings.simplefilter("error" if world.changes else "ignore")
        return x * 2

    step = world.compile(function)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield step(world.batch(0)), warnings.filters[0][0]


@row()
def default_of_a_context_variable(world: World) -> Program:
    """A variable that nobody has set gives the object that it was made with."""
    variable = contextvars.ContextVar("variable", default={"k": 1.0})  # noqa: B039
    step = world.compile(lambda x: x * variable.get()["k"])
    x = world.batch()
    yield step(x)
    world.change(variable.get().update, k=2.0)
    yield step(x)
    world.change(variable.set, {"k": 3.0})
    yield step(x)
