"""Changes of arguments: aliasing, views, layouts, unhashable values, objects, numbers."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.compilation.changes._table import Program, row, rows
from tests.compilation.changes._world import COLUMNS, Mesh, World, numbers


def write_first(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return b * 2


@row()
def two_tensors_then_one_twice(world: World) -> Program:
    a, b = world.batch(0), world.batch(1)
    step = world.compile(write_first)
    yield step(a, b), a, b
    c, d = world.batch(2), world.batch(3)
    yield step(c, c if world.changes else d), c, d
    yield step(a, b), a, b


@row()
def one_tensor_twice_then_two(world: World) -> Program:
    a, b = world.batch(0), world.batch(1)
    step = world.compile(write_first)
    yield step(a, a), a, b
    yield step(a, b if world.changes else a), a, b
    yield step(b, b), a, b


@row()
def one_tensor_twice_that_is_only_read(world: World) -> Program:
    a, b = world.batch(0), world.batch(1)
    step = world.compile(lambda a, b: a * 2 + b)
    yield step(a, b)
    yield step(a, a if world.changes else b)
    yield step(b, a)


@row()
def which_of_three_are_one(world: World) -> Program:
    a, b = world.batch(0), world.batch(1)

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        x.add_(1)
        y.mul_(2)
        return [x + y, z * 1]

    step = world.compile(function)
    yield step(a, b, b), a, b
    yield step(a, b, a) if world.changes else step(a, b, b), a, b
    yield step(a, a, b) if world.changes else step(a, b, b), a, b
    yield step(a, a, a) if world.changes else step(a, b, b), a, b


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda e: e[:2],
    "row": lambda e: e[1],
    "column": lambda e: e[:, 2],
    "transpose": lambda e: e.mT,
    "flat": lambda e: e.view(-1),
    "alias": lambda e: e.detach(),
    "strided": lambda e: e[::2],
    "expanded": lambda e: e[:1].expand(4, 6),
}


@rows(VIEWS)
def view_of_an_argument(world: World, view: Callable) -> Program:
    """The first is written; the second is a view of it, or a tensor of its own."""
    step = world.compile(write_first)
    a = world.batch(0)
    yield step(a, view(world.batch(1))), a
    b = world.batch(2)
    yield step(b, view(b if world.changes else world.batch(2))), b
    yield step(a, view(world.batch(3))), a


@rows({name: VIEWS[name] for name in ("slice", "transpose", "alias")})
def view_that_is_written(world: World, view: Callable) -> Program:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.add_(1)
        return a * 2

    step = world.compile(function)
    a = world.batch(0)
    yield step(a, view(a)), a
    b, c = world.batch(2), world.batch(2)
    yield step(b, view(c if world.changes else b)), b, c


@rows({"overlapping": (0, 2, 1, 3), "same": (0, 2, 0, 2), "apart": (0, 2, 2, 4)})
def two_views_of_one_tensor(world: World, case: tuple[int, int, int, int]) -> Program:
    start, stop, other_start, other_stop = case
    step = world.compile(write_first)
    a, b = world.batch(0), world.batch(1)
    yield step(a[:2], b[:2]), a, b
    other = a if world.changes else b
    yield step(a[start:stop], other[other_start:other_stop]), a, b


@rows({"written_argument": True, "written_capture": False})
def argument_that_is_captured(world: World, argument: bool) -> Program:
    captured = world.batch(0)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        (x if argument else captured).add_(1)
        return [x * 2, captured * 3]

    step = world.compile(function)
    a = world.batch(1)
    yield step(a), a, captured
    yield step(captured if world.changes else a), a, captured
    yield step(a), a, captured


@row()
def captured_argument_first(world: World) -> Program:
    captured = world.batch(0)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        x.add_(1)
        return [x * 2, captured * 3]

    step = world.compile(function)
    a = world.batch(1)
    yield step(captured), a, captured
    yield step(a if world.changes else captured), a, captured


@row()
def view_of_a_captured_tensor(world: World) -> Program:
    captured = world.batch(0)

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return captured * 3

    step = world.compile(function)
    yield step(world.batch(1)[:2]), captured
    yield step((captured if world.changes else world.batch(2))[:2]), captured


@row()
def a_parameter_as_argument(world: World) -> Program:
    model = world.module(nn.Linear(6, 8))
    world.watch(model=model)

    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = (model(x) * (x @ weight.T)).sum()
        loss.backward()
        return loss.detach()

    step = world.compile(function)
    other = world.parameter(numbers(5, 8, 6))
    yield step(other, world.batch(0)), model.weight.grad
    yield step(model.weight if world.changes else other, world.batch(0)), model.weight.grad


@row()
def one_tensor_in_a_list_twice(world: World) -> Program:
    def function(tensors: list[torch.Tensor]) -> torch.Tensor:
        for tensor in tensors:
            tensor.add_(1)
        return sum(tensors)

    step = world.compile(function)
    a, b = world.batch(0), world.batch(1)
    yield step([a, b]), a, b
    yield step([a, a] if world.changes else [a, b]), a, b


@rows({"plain": "kept", "of_the_name_of_one_of_tensors": "_kept"})
def attribute_that_the_step_assigns(world: World, name: str) -> Program:
    def function(state: Any, x: torch.Tensor) -> torch.Tensor:
        setattr(state, name, "seen")
        return x + 1

    step = world.compile(function)
    for i in range(3):
        state = SimpleNamespace(**{name: "new"})
        out = step(state, world.batch(i if world.changes else 0))
        yield out, getattr(state, name)


FORMS: dict[str, Callable[[World, torch.Tensor], torch.Tensor]] = {
    "strides": lambda w, x: x.mT.contiguous().mT,
    "transposed": lambda w, x: w.tensor(numbers(0, 6, 4)).mT,
    "requires_grad": lambda w, x: x.clone().requires_grad_(),
    "dtype": lambda w, x: x.bfloat16(),
    "int": lambda w, x: (x * 10).int(),
    "shape": lambda w, x: w.batch(0, (2, 6)),
    "dims": lambda w, x: x[None],
    "empty": lambda w, x: x[:0],
    "scalar": lambda w, x: x[0, 0],
    "parameter": lambda w, x: nn.Parameter(x.clone()),
    "on_the_cpu": lambda w, x: numbers(0, 4, 6)[0, 0],
    "number": lambda w, x: 2.5,
    "none": lambda w, x: None,
    "tuple": lambda w, x: (x, x),
}


# Those that plain torch doesn't have.
LAYOUTS: dict[str, Callable[[World, torch.Tensor], torch.Tensor]] = {
    "replicated": lambda w, x: w.tensor(numbers(0, 4, 6), None),
    "columns": lambda w, x: w.tensor(numbers(0, 4, 6), COLUMNS),
    "partial": lambda w, x: (
        w.tensor(numbers(0, 4, 6), [Partial(), Replicate()]) if isinstance(w, Mesh) else x
    ),
    "both_dims": lambda w, x: w.tensor(numbers(0, 4, 6), [Shard(0), Shard(1)]),
}


def tell(x: Any) -> list[Any]:
    """What the step was called with."""
    if not isinstance(x, torch.Tensor):
        return [str(type(x))]
    is_parameter = isinstance(x, nn.Parameter)
    return [x * 2, x.requires_grad, is_parameter, list(x.shape), x.is_contiguous()]


@rows(FORMS)
def form(world: World, make: Callable[[World, torch.Tensor], Any]) -> Program:
    step = world.compile(torch.no_grad()(tell))
    yield step(world.batch(0))
    yield step(make(world, world.batch(0)) if world.changes else world.batch(0))
    yield step(world.batch(0))


@rows(LAYOUTS, unseen=True)
def layout(world: World, make: Callable[[World, torch.Tensor], Any]) -> Program:
    step = world.compile(tell)
    yield step(world.batch(0))
    yield step(make(world, world.batch(0)))
    yield step(world.batch(0))


@rows({"in_place": True, "new": False})
def numpy_array(world: World, in_place: bool) -> Program:
    step = world.compile(lambda x, by: x * float(by[0]))
    array = np.full(3, 1.0)
    for i in range(6):
        if in_place and world.changes:
            array[:] = i
        elif world.changes:
            array = np.full(3, float(i))
        yield step(world.batch(0), array)


@row()
def numpy_array_captured(world: World) -> Program:
    array = np.full(3, 1.0)
    step = world.compile(lambda x: x * float(array[0]))
    yield step(world.batch(0))
    yield step(world.batch(0))
    world.change(array.fill, 2.0)
    yield step(world.batch(0))


@row()
def numpy_array_as_a_tensor(world: World) -> Program:
    array = np.full(6, 1.0, dtype=np.float32)
    step = world.compile(lambda x, by: x * torch.from_numpy(by))
    yield step(world.batch(0), array)
    yield step(world.batch(0), array)
    world.change(array.fill, 2.0)
    yield step(world.batch(0), array)
    yield step(world.batch(0), array * 2)


UNHASHABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable]] = {
    "list": (lambda: [1.0], lambda o: o.__setitem__(0, 2.0), lambda o, x: x * o[0]),
    "nested_list": (lambda: [[1.0]], lambda o: o[0].append(5.0), lambda o, x: x * sum(o[0])),
    "dict": (lambda: {"a": 1.0}, lambda o: o.update(a=2.0), lambda o, x: x * o["a"]),
    "dict_keys": (lambda: {"a": 1.0}, lambda o: o.update(b=2.0), lambda o, x: x * len(o)),
    "set": (lambda: {1.0}, lambda o: o.add(2.0), lambda o, x: x * sum(o)),
    "bytearray": (
        lambda: bytearray(b"\1"),
        lambda o: o.__setitem__(0, 2),
        lambda o, x: x * o[0],
    ),
    "list_of_arrays": (
        lambda: [np.ones(2)],
        lambda o: o[0].fill(2.0),
        lambda o, x: x * float(o[0][0]),
    ),
    "list_of_cpu_tensors": (
        lambda: [torch.ones(6)],
        lambda o: o[0].fill_(2.0),
        lambda o, x: x * o[0],
    ),
}


@rows(UNHASHABLE)
def unhashable(world: World, case: tuple[Callable, Callable, Callable]) -> Program:
    """One object, whose content changes."""
    make, change, function = case
    value = make()
    step = world.compile(function)
    yield step(value, world.batch(0))
    yield step(value, world.batch(0))
    world.change(change, value)
    yield step(value, world.batch(0))


@rows(UNHASHABLE)
def unhashable_and_new_in_every_call(world: World, case: tuple) -> Program:
    """Objects that may be made where the last one was."""
    make, change, function = case
    step = world.compile(function)
    for i in range(5):
        value = make()
        if i % 2:
            world.change(change, value)
        results = step(value, world.batch(0))
        del value
        gc.collect(1)
        yield results


class Plain:
    """Hashable by identity, with attributes that change."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


@row()
def objects_made_where_the_last_one_was(world: World) -> Program:
    step = world.compile(lambda o, x: x * o.scale)
    for i in range(5):
        value = Plain(float(i) if world.changes else 0.0)
        results = step(value, world.batch(0))
        del value
        gc.collect(1)
        yield results


@row()
def functions_made_where_the_last_one_was(world: World) -> Program:
    step = world.compile(lambda f, x: f(x))
    for i in range(5):
        by = float(i) if world.changes else 0.0
        yield step(lambda x, by=by: x * by, world.batch(0))


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0


class Hashed(Batch):
    __hash__ = object.__hash__


@rows({"eq": Batch, "hashed": Hashed})
def dataclass_of_tensors(world: World, kind: type[Batch]) -> Program:
    step = world.compile(lambda b: b.x * b.scale)
    batch = kind(world.batch(0))
    yield step(batch)
    yield step(batch)
    world.change(setattr, batch, "x", world.batch(1))
    yield step(batch)
    world.change(setattr, batch, "scale", 3.0)
    yield step(batch)
    yield step(kind(world.batch(2)))


@row()
def dataclass_whose_tensor_is_written(world: World) -> Program:
    def function(batch: Batch) -> torch.Tensor:
        batch.x.add_(1)
        return batch.x * 2

    step = world.compile(function)
    batches = [Batch(world.batch(0)), Batch(world.batch(1))]
    yield step(batches[0]), [b.x for b in batches]
    yield step(batches[1 if world.changes else 0]), [b.x for b in batches]


@row()
def namespace_of_tensors(world: World) -> Program:
    step = world.compile(lambda b: b.x * b.scale)
    batch = SimpleNamespace(x=world.batch(0), scale=2.0)
    yield step(batch)
    yield step(batch)
    world.change(setattr, batch, "x", world.batch(1))
    yield step(batch)


@row()
def float_that_changes_in_every_call(world: World) -> Program:
    step = world.compile(lambda x, by: x * by + by)
    for i in range(6):
        yield step(world.batch(0), 0.1 * (i if world.changes else 1))
    world.at_most(3, step)


@row()
def float_keyword_that_changes_in_every_call(world: World) -> Program:
    step = world.compile(lambda x, *, by: torch.addcmul(x, x, x, value=by))
    for i in range(6):
        yield step(world.batch(0), by=0.1 * (i if world.changes else 1))
    world.at_most(3, step)


@row()
def float_in_a_dict_that_changes_in_every_call(world: World) -> Program:
    step = world.compile(lambda x, options: x * options["by"])
    for i in range(6):
        yield step(world.batch(0), {"by": 0.1 * (i if world.changes else 1)})


@row()
def float_that_decides(world: World) -> Program:
    step = world.compile(lambda x, t: x * t if t > 0.25 else x + t)
    for i in range(6):
        yield step(world.batch(0), 0.1 * (i if world.changes else 1))


@rows(
    {
        "int": lambda x, t: x * int(t * 10),
        "format": lambda x, t: x * float(f"{t:.3f}"),
        "math": lambda x, t: x * (2**t) + min(t, 0.25),
        "shape": lambda x, t: x.repeat(1 + int(t * 10), 1),
        "cpu_tensor": lambda x, t: x * torch.tensor(t),
        "full": lambda x, t: x + torch.full((6,), t),
        "dict_key": lambda x, t: x * {0.0: 5.0}.get(t, 1.0),
        "round": lambda x, t: x * round(t, 1),
        "result": lambda x, t: [x * t, t, t * 2],
        "clamp": lambda x, t: x.clamp(-t, t),
        "dropout": lambda x, t: nn.functional.dropout(x, 0.0 if t < 0.25 else 1.0),
        "index": lambda x, t: x[int(t * 10) % 4],
        "np": lambda x, t: x * np.float32(t).item(),
    }
)
def float_used_as(world: World, function: Callable) -> Program:
    """A number that became an input is still a number to the user's Python."""
    step = world.compile(function)
    for i in (0, 1, 2, 4, 5):
        yield step(world.batch(0), 0.1 * (i if world.changes else 1))


@rows(
    {
        "float": (1.0, 2.0, 3.0),
        "int": (1, 2, 3),
        "bool": (True, False, True),
        "none": (1.0, None, 1.0),
        "str": ("a", "bb", "a"),
        "zeros": (0.0, -0.0, 0.0),
        "nan": (float("nan"), 1.0, float("nan")),
        "inf": (float("inf"), -float("inf"), 1.0),
        "one": (1, 1.0, True),
        "big": (2**40, 2.0**40, 2**60),
        "numpy": (np.float32(1), np.float64(2), np.int64(3)),
        "tuple": ((1, 2), (1, 3), (1.0, 2)),
        "dtype": (torch.float32, torch.bfloat16, torch.int32),
    }
)
def values(world: World, case: tuple) -> Program:
    def function(x: torch.Tensor, value: Any) -> list:
        if isinstance(value, bool | str | tuple | type(None)):
            return [x * len(str(value)), str(value)]
        if isinstance(value, torch.dtype):
            return [x.to(value)]
        return [x.int() * value if value == value and abs(value) < 100 else x / value, str(value)]

    step = world.compile(function)
    for value in case:
        yield step(world.batch(0), value if world.changes else case[0])


@row()
def keywords_in_another_order(world: World) -> Program:
    step = world.compile(lambda **tensors: next(iter(tensors.values())) * 2)
    a, b = world.batch(0), world.batch(1)
    yield step(a=a, b=b)
    yield step(b=b, a=a) if world.changes else step(a=a, b=b)
    yield step(a=a, b=b)


@row()
def keyword_or_positional(world: World) -> Program:
    step = world.compile(lambda x, y=None, *more, z=1.0: (x * z, len(more), y is None))
    x = world.batch(0)
    yield step(x)
    yield step(x, z=2.0) if world.changes else step(x)
    yield step(x, None) if world.changes else step(x)
    yield step(x, x, x, x) if world.changes else step(x)
    yield step(x=x, y=3) if world.changes else step(x)


@row()
def dict_argument_in_another_order(world: World) -> Program:
    step = world.compile(lambda d: next(iter(d.values())) * 2)
    a, b = world.batch(0), world.batch(1)
    yield step({"a": a, "b": b})
    yield step({"b": b, "a": a} if world.changes else {"a": a, "b": b})


@row()
def argument_changed_in_place_between(world: World) -> Program:
    x = world.batch(0)
    step = world.compile(lambda x: x * 2)
    yield step(x)
    yield step(x)
    world.change(x.add_, 1)
    yield step(x)
    world.change(setattr, x, "data", world.batch(3))
    yield step(x)


@row()
def argument_with_a_gradient(world: World) -> Program:
    """A leaf as an argument: its ``.grad`` accumulates."""
    x = world.batch(0).requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        (x * x).sum().backward()
        return x.grad * 1

    step = world.compile(function)
    yield step(x), x
    yield step(x), x
    if world.changes:
        x.grad = None
    yield step(x), x


@row()
def structure_of_arguments(world: World) -> Program:
    step = world.compile(lambda tree: (tree[0] if isinstance(tree, list) else tree["a"]) * 2)
    yield step([world.batch(0)])
    yield step({"a": world.batch(1)} if world.changes else [world.batch(0)])
    yield step([world.batch(2), world.batch(3)])


ARITHMETIC: dict[str, Callable[[int], float]] = {
    "remainder": lambda n: n % 4,
    "negative_remainder": lambda n: n % -3,
    "quotient": lambda n: n // 2,
    "negative_quotient": lambda n: n // -3,
    "fraction": lambda n: n / 3,
    "remainder_by": lambda n: 20 % n,
    "quotient_by": lambda n: 20 // n,
    "fraction_by": lambda n: 20 / n,
    "remainder_of_a_float": lambda n: (n * 0.5) % 1.5,
    "mixed": lambda n: (n % 3) * 0.5 + n // 2 / 4,
}


@rows(ARITHMETIC)
def arithmetic_of_ints(world: World, compute: Callable) -> Program:
    """With Python's signs, exactly, and with its error where there is no result."""

    def function(x: torch.Tensor, n: int) -> tuple[torch.Tensor, float]:
        value = compute(n)
        return x * value, value

    step = world.compile(function)
    for n in (7, 9, -4, 3, 12, -7):
        yield step(world.batch(1), n if world.changes else 7)
    world.traced_at_most(2, step)
    try:
        yield step(world.batch(1), 0)
    except ZeroDivisionError as error:
        yield str(error)


@row()
def another_leaf_in_every_call(world: World) -> Program:
    """Each has a hook of ours, which makes no difference, and may have one of the user's."""
    weight = world.parameter(numbers(1, 4, 6))

    def function(x: torch.Tensor) -> torch.Tensor:
        (x * x * weight).sum().backward()
        weight.grad = None
        return x.detach() * 2

    step = world.compile(function)
    for i in range(4):
        x = world.batch(i).requires_grad_()
        yield step(x), x.grad
    world.traced_at_most(1, step)
    x = world.batch(5).requires_grad_()
    world.change(x.register_hook, lambda grad: grad * 2)
    yield step(x), x.grad


@row()
def the_index_of_a_row(world: World) -> Program:
    a = world.batch(0)
    step = world.compile(lambda a, n: a[n] * 2)
    for n in (0, 1, 2, -1 if world.changes else 2, 1):
        yield step(a, n), a


@row()
def the_position_that_is_written(world: World) -> Program:
    a = world.batch(0)

    def function(a: torch.Tensor, n: int) -> torch.Tensor:
        view = a[n]
        a[n, 1:3] = 5.0
        view.add_(1)
        return a * 2

    step = world.compile(function)
    for n in (0, 1, 2, 3 if world.changes else 2):
        yield step(a, n), a


@dataclasses.dataclass
class Scaled:
    scale: float
    times: int = 2


@row()
def a_number_in_a_dataclass_after_others(world: World) -> Program:
    a, one = world.batch(0), Scaled(0.5)
    step = world.compile(lambda a, s, t: a * s.scale + t.times)
    yield step(a, one, one)
    one.scale = 0.25
    yield step(a, one, one)
    yield step(a, Scaled(0.125, 7), one if not world.changes else Scaled(0.125, 9))
    yield step(a, one, one)


@row()
def a_dataclass_that_the_step_changes(world: World) -> Program:
    a, one = world.batch(0), Scaled(0.5)
    step = world.compile(lambda a, s: a * dataclasses.replace(s, times=s.times + 1).times)
    for times in (1, 2, 3, 5 if world.changes else 3):
        one.times = times
        yield step(a, one)


@row()
def a_scalar_of_numpy_of_another_precision(world: World) -> Program:
    a = world.batch(0)
    step = world.compile(lambda a, s: a * (s / 3) * 1e6)
    for s in (0.1, 0.2, 0.3):
        yield step(a, np.float32(s))
    yield step(a, np.float16(0.3) if world.changes else np.float32(0.3))


class Slotted(list):
    __slots__ = ("scale",)


class Labelled(str):
    __slots__ = ("scale",)


class HasScale:
    __slots__ = ("scale",)


@dataclasses.dataclass
class Inherits(HasScale):
    __slots__ = ("times",)
    times: float


class Times(functools.partial):
    pass


@rows(
    {
        "list_with_slots": lambda: Slotted([1.0]),
        "str_with_slots": lambda: Labelled("a"),
        "dataclass_with_slots_of_its_base": lambda: Inherits(1.0),
        "partial": lambda: functools.partial(torch.mul, other=2.0),
        "partial_of_a_class_of_its_own": lambda: Times(torch.mul, other=2.0),
    }
)
def an_attribute_of_an_object_of(world: World, make: Callable[[], Any]) -> Program:
    """As an argument, and outside."""
    a, thing, outside = world.batch(0), make(), make()
    step = world.compile(lambda a, thing: (a * thing.scale, a * outside.scale))
    thing.scale = outside.scale = 2.0
    yield step(a, thing)
    for given in (thing, outside):
        given.scale = 5.0 if world.changes else 2.0
        yield step(a, thing)


@row()
def what_hooks_of_an_argument_read(world: World) -> Program:
    a, scales = world.batch(0).requires_grad_(), [2.0]
    a.register_hook(lambda grad: grad * scales[0])

    def function(a: torch.Tensor) -> torch.Tensor:
        a.grad = None
        (a * a).sum().backward()
        return a.grad * 1

    step = world.compile(function)
    for scale in (2.0, 3.0, 5.0) if world.changes else (2.0, 2.0, 2.0):
        scales[0] = scale
        yield step(a)


@row()
def hooks_behind_the_gradient_of_an_argument(world: World) -> Program:
    a = world.batch(0).requires_grad_()

    def hook(a: torch.Tensor) -> None:
        a.grad.mul_(3)

    def function(a: torch.Tensor) -> torch.Tensor:
        a.grad = None
        (a * a).sum().backward()
        return a.grad * 1

    step = world.compile(function)
    yield step(a)
    if world.changes:
        a.register_post_accumulate_grad_hook(hook)
    yield step(a)


@rows({"float64": np.float64, "int32": np.int32, "float16": np.float16})
def a_tensor_of_a_scalar_of_numpy(world: World, kind: Any) -> Program:
    a = world.batch(0)
    step = world.compile(
        lambda a, n: (torch.tensor(n, device=a.device), torch.as_tensor([n, 2], device=a.device))
    )
    for n in (1, 2, 3 if world.changes else 2):
        made = step(a, kind(n))
        yield [t.cpu() for t in made], [str(t.dtype) for t in made]


@row()
def the_size_of_a_tensor(world: World) -> Program:
    a = world.batch(0)
    step = world.compile(lambda a, size: (a.expand(size) * size.numel(), size, a.shape))
    for n in (1, 2, 3 if world.changes else 2):
        result, size, shape = step(a, torch.Size((n, *a.shape)))
        yield result, size.numel(), shape.numel(), isinstance(shape, torch.Size)


@row()
def a_parameter_or_a_tensor(world: World) -> Program:
    """Which one it is asked by `isinstance`, which looks at an attribute of DTensors."""

    def function(x: torch.Tensor) -> torch.Tensor:
        kinds = isinstance(x, nn.Parameter), isinstance(x, nn.Buffer)
        return (x * (3 if kinds[0] else 5 if kinds[1] else 2)).detach()

    step = world.compile(function)
    yield step(world.batch(0))
    makers: list[Callable] = [nn.Parameter, nn.Buffer, lambda t: nn.Parameter(t, False)]
    for make in makers:
        yield step(make(world.batch(0)) if world.changes else world.batch(0))


@row()
def a_parameter_or_a_tensor_on_the_host(world: World) -> Program:
    step = world.compile(lambda x, t: x * (3 if isinstance(t, nn.Parameter) else 2))
    for make in (torch.clone, lambda t: nn.Parameter(t, requires_grad=False)):
        yield step(world.batch(0), make(numbers(1, 2)) if world.changes else numbers(1, 2))


@row()
def an_array_times_a_number(world: World) -> Program:
    """With a number that is an input it would be an array of objects."""
    array = np.array([1.0, 2.0], np.float32)

    def function(x: torch.Tensor, k: float) -> tuple:
        made = array * k + np.maximum(k, array)
        return x * torch.from_numpy(k - array).to(x.device).sum(), made, made.dtype.name

    step = world.compile(function)
    for k in (2.0, 3.0, 4.0):
        yield step(world.batch(0), k if world.changes else 2.0)
