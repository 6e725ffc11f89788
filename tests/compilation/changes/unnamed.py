"""Reads that no name in the code tells of: functions that read under other names than their own,
protocols, files in memory, handlers of logging, and state that Python and NumPy keep.

Each maker gives a function and a change, and the function computes something else after it.
"""

from __future__ import annotations

import contextvars
import copy
import copyreg
import functools
import io
import logging
import logging.handlers
import operator
import os
import queue
import random
import threading
import types
import typing
import weakref
from builtins import getattr as looked_up
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.compilation.changes import _helpers
from tests.compilation.changes._table import Program, rows
from tests.compilation.changes._world import World

Case = tuple[Callable[..., Any], Callable[[], Any]]
Space = types.SimpleNamespace


def scale() -> list[str]:
    """A name that is made up."""
    return ["sca", "le"]


def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


# --- functions under other names ---------------------------------------------------------------


def eval_in_a_closure(world: World) -> Case:
    _helpers.reset()
    return _helpers.evaluating(eval), put(_helpers, "SCALE", 3.0)


def eval_as_a_default(world: World) -> Case:
    _helpers.reset()
    return _helpers.evaluated, put(_helpers, "SCALE", 3.0)


def eval_imported(world: World) -> Case:
    _helpers.reset()
    return _helpers.evaluated_by_import, put(_helpers, "SCALE", 3.0)


def globals_by_another_name(world: World) -> Case:
    _helpers.reset()
    return _helpers.looking(globals), put(_helpers, "SCALE", 3.0)


def vars_by_another_name(world: World) -> Case:
    look, held, name = vars, Space(scale=2.0), scale()
    return (lambda x: x * look(held)["".join(name)]), put(held, "scale", 3.0)


def getattr_by_another_name(world: World) -> Case:
    look, held, name = getattr, Space(scale=2.0), scale()
    return (lambda x: x * look(held, "".join(name))), put(held, "scale", 3.0)


def getattr_imported(world: World) -> Case:
    held, name = Space(scale=2.0), scale()
    return (lambda x: x * looked_up(held, "".join(name))), put(held, "scale", 3.0)


def getattr_in_a_partial(world: World) -> Case:
    held, name = Space(scale=2.0), scale()
    look = functools.partial(getattr, held)
    return (lambda x: x * look("".join(name))), put(held, "scale", 3.0)


def getattribute(world: World) -> Case:
    held, name = Space(scale=2.0), scale()
    return (lambda x: x * held.__getattribute__("".join(name))), put(held, "scale", 3.0)


def attrgetter_by_another_name(world: World) -> Case:
    get, held, name = operator.attrgetter, Space(scale=2.0), scale()
    return (lambda x: x * get("".join(name))(held)), put(held, "scale", 3.0)


def getenv_by_another_name(world: World) -> Case:
    _helpers.reset()
    get = os.getenv
    return (lambda x: x * float(get("XLA_DTENSOR_TEST_SCALE"))), lambda: os.environ.update(
        XLA_DTENSOR_TEST_SCALE="3"
    )


def initial_seed_by_another_name(world: World) -> Case:
    torch.manual_seed(4)
    seed = torch.initial_seed
    return (lambda x: x * (seed() % 10)), lambda: torch.manual_seed(5)


class Shown:
    def __init__(self) -> None:
        self.v = 2.0

    def __str__(self) -> str:
        return str(self.v)

    def __copy__(self) -> Any:
        return Space(copied=self.v)


def str_by_another_name(world: World) -> Case:
    shown, text = Shown(), str
    return (lambda x: x * float(text(shown))), put(shown, "v", 3.0)


def copy_by_another_name(world: World) -> Case:
    shown, again = Shown(), copy.copy
    return (lambda x: x * again(shown).copied), put(shown, "v", 3.0)


def _multiplies() -> type:
    class Own:
        def times(self, x, by):
            return x * by

        twice = functools.partialmethod(times, by=2.0)

    return Own


def partialmethod_replaced(world: World) -> Case:
    cls = _multiplies()
    own = cls()
    return (lambda x: own.twice(x)), put(cls, "twice", functools.partialmethod(cls.times, by=3.0))


def keywords_of_a_partialmethod(world: World) -> Case:
    cls = _multiplies()
    own = cls()
    return (lambda x: own.twice(x)), lambda: vars(cls)["twice"].keywords.update(by=3.0)


def attribute_in_a_format(world: World) -> Case:
    held = Space(text="{0.scale}", scale=2.0)
    return (lambda x: x * float(held.text.format(held))), put(held, "scale", 3.0)


# --- protocols -----------------------------------------------------------------------------------


@typing.runtime_checkable
class HasScale(typing.Protocol):
    looked_for: float


@typing.runtime_checkable
class HasMethod(HasScale, typing.Protocol):
    def also(self) -> float: ...


class Plain:
    pass


def protocol_of_an_attribute(world: World) -> Case:
    held = Plain()
    return (lambda x: x * (2 if isinstance(held, HasScale) else 3)), put(held, "looked_for", 1.0)


def protocol_no_longer(world: World) -> Case:
    held = Plain()
    held.looked_for = 1.0
    return (lambda x: x * (2 if isinstance(held, HasScale) else 3)), lambda: delattr(
        held, "looked_for"
    )


def protocol_of_a_method(world: World) -> Case:
    class Own:
        looked_for = 1.0

    held = Own()
    return (lambda x: x * (2 if isinstance(held, HasMethod) else 3)), put(Own, "also", lambda s: 1)


def protocol_inherited(world: World) -> Case:
    held = Plain()
    held.also = lambda: 1.0
    return (lambda x: x * (2 if isinstance(held, HasMethod) else 3)), put(held, "looked_for", 1.0)


def protocol_in_a_match(world: World) -> Case:
    held = Plain()

    def f(x):
        match held:
            case HasScale():
                return x * 2
        return x * 3

    return f, put(held, "looked_for", 1.0)


# --- files in memory -----------------------------------------------------------------------------


def rewrite(file: Any, text: Any) -> Callable[[], None]:
    def change() -> None:
        file.seek(0)
        file.write(text)

    return change


def text_in_memory(world: World) -> Case:
    file = io.StringIO("2")
    return (lambda x: x * float(file.getvalue())), rewrite(file, "3")


def text_in_memory_read(world: World) -> Case:
    file = io.StringIO("2")

    def f(x):
        file.seek(0)
        return x * float(file.read())

    return f, rewrite(file, "3")


def lines_in_memory(world: World) -> Case:
    file = io.StringIO("1\n2\n")

    def f(x):
        file.seek(0)
        return x * sum(map(float, file))

    return f, rewrite(file, "4\n5\n")


def bytes_in_memory(world: World) -> Case:
    file = io.BytesIO(b"2")
    return (lambda x: x * float(bytes(file.getbuffer()))), rewrite(file, b"3")


def position_in_memory(world: World) -> Case:
    file = io.StringIO("2222")
    return (lambda x: x * file.tell()), lambda: file.seek(3)


def text_in_memory_written(world: World) -> Case:
    file = io.StringIO("22")
    file.seek(2)

    def f(x):
        file.write("a")
        return x * len(file.getvalue())

    return f, lambda: file.write("bbb")


# --- logging -------------------------------------------------------------------------------------


class Keeping(logging.Handler):
    by = 2.0

    def emit(self, record: Any) -> None:
        self.last = self.by


def state_of_a_handler(world: World) -> Case:
    handler, log = Keeping(), logging.Logger("own", logging.INFO)
    log.addHandler(handler)

    def f(x):
        log.info("once")
        return x * handler.last

    return f, put(handler, "by", 3.0)


def level_of_a_handler(world: World) -> Case:
    handler = logging.StreamHandler()
    handler.setLevel(10)
    return (lambda x: x * handler.level), lambda: handler.setLevel(20)


def records_of_a_handler(world: World) -> Case:
    handler = logging.handlers.MemoryHandler(100)
    record = logging.LogRecord("own", 10, "path", 1, "text", (), None)
    return (lambda x: x * (1 + len(handler.buffer))), lambda: handler.emit(record)


# --- objects -------------------------------------------------------------------------------------


def dict_of_an_object_replaced(world: World) -> Case:
    held = Plain()
    held.k = 2.0
    return (lambda x: x * held.k), put(held, "__dict__", {"k": 3.0})


def dict_of_a_module_replaced(world: World) -> Case:
    class Own(torch.nn.Module):
        k = 1.0

        def forward(self, x):
            return x * self.k

    own = Own()
    own.k = 2.0
    return (lambda x: own(x)), lambda: setattr(own, "__dict__", {**vars(own), "k": 3.0})


def context(world: World) -> Case:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable")
    held = contextvars.copy_context()
    held.run(variable.set, 2.0)
    return (lambda x: x * held.run(lambda: variable.get())), lambda: held.run(variable.set, 3.0)


def copied_by_copyreg(world: World) -> Case:
    class Own:
        k = 2.0

    held = Own()
    copyreg.pickle(Own, lambda own: (Space, (), {"k": own.k}))
    return (lambda x: x * copy.copy(held).k), lambda: copyreg.pickle(
        Own, lambda own: (Space, (), {"k": 7.0})
    )


def weak_values(world: World) -> Case:
    objects = [Shown(), Shown()]
    objects[1].v = 3.0
    table = weakref.WeakValueDictionary(a=objects[0])
    return (lambda x: x * table["a"].v), lambda: table.update(a=objects[1])


def order_of_a_dict(world: World) -> Case:
    table = OrderedDict(a=2.0, b=3.0)
    return (lambda x: x * next(iter(table.values()))), lambda: table.move_to_end("a")


# --- what NumPy and Python keep ------------------------------------------------------------------


def writeable_array(world: World) -> Case:
    array = np.ones(2)
    return (lambda x: x * (2 if array.flags.writeable else 3)), lambda: array.setflags(write=False)


def strides_of_an_array(world: World) -> Case:
    held = Space(array=np.arange(4.0).reshape(2, 2))
    return (lambda x: x * held.array.strides[0]), put(held, "array", np.asfortranarray(held.array))


def numpys_errors(world: World) -> Case:
    np.seterr(divide="ignore")
    return (lambda x: x * (2 if np.geterr()["divide"] == "ignore" else 3)), lambda: np.seterr(
        divide="warn"
    )


def numpys_printing(world: World) -> Case:
    np.set_printoptions(precision=3)
    return (lambda x: x * np.get_printoptions()["precision"]), lambda: np.set_printoptions(
        precision=8
    )


def state_of_random(world: World) -> Case:
    random.seed(1)
    return (lambda x: x * (sum(random.getstate()[1][:9]) % 97)), lambda: random.seed(2)


def state_of_numpys_random(world: World) -> Case:
    np.random.seed(1)
    return (lambda x: x * float(np.random.get_state()[1][1] % 10)), lambda: np.random.seed(2)


def state_of_an_own_random(world: World) -> Case:
    source = random.Random(1)
    return (lambda x: x * (sum(source.getstate()[1][:9]) % 97)), lambda: source.seed(2)


def state_of_an_own_generator(world: World) -> Case:
    source = np.random.default_rng(1)
    return (lambda x: x * (source.bit_generator.state["state"]["state"] % 97)), source.random


# --- classes of the user's of what is watched in a way of its own ---------------------------------


class OwnRandom(random.Random):
    scale: float


class OwnQueue(queue.Queue):
    scale: float


class OwnSemaphore(threading.Semaphore):
    scale: float


class OwnThread(threading.Thread):
    scale: float


class OwnCondition(threading.Condition):
    scale: float


class ModuleAndDict(dict, torch.nn.Module):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self["scale"] = 2.0

    __hash__ = torch.nn.Module.__hash__


def _attribute_of(held: Any) -> Case:
    held.scale = 2.0
    return (lambda x: x * held.scale), put(held, "scale", 3.0)


def attribute_of_an_own_random(world: World) -> Case:
    return _attribute_of(OwnRandom(0))


def attribute_of_an_own_queue(world: World) -> Case:
    return _attribute_of(OwnQueue())


def attribute_of_an_own_semaphore(world: World) -> Case:
    return _attribute_of(OwnSemaphore())


def attribute_of_an_own_thread(world: World) -> Case:
    return _attribute_of(OwnThread())


def attribute_of_an_own_condition(world: World) -> Case:
    return _attribute_of(OwnCondition())


def eval_beside_an_own_thread(world: World) -> Case:
    # Any attribute may be read, and what a trace replaces in the thread's class mustn't count.
    held, evaluate = OwnThread(), eval
    held.scale = 2.0
    return (lambda x: x * evaluate("held.scale", {"held": held})), put(held, "scale", 3.0)


def item_of_a_module_that_is_a_dict(world: World) -> Case:
    held = ModuleAndDict()
    return (lambda x: x * held["scale"]), lambda: held.update(scale=3.0)


MAKERS: tuple[Callable[[World], Case], ...] = (
    attribute_of_an_own_random,
    attribute_of_an_own_queue,
    attribute_of_an_own_semaphore,
    attribute_of_an_own_thread,
    attribute_of_an_own_condition,
    eval_beside_an_own_thread,
    item_of_a_module_that_is_a_dict,
    eval_in_a_closure,
    eval_as_a_default,
    eval_imported,
    globals_by_another_name,
    vars_by_another_name,
    getattr_by_another_name,
    getattr_imported,
    getattr_in_a_partial,
    getattribute,
    attrgetter_by_another_name,
    getenv_by_another_name,
    initial_seed_by_another_name,
    str_by_another_name,
    copy_by_another_name,
    partialmethod_replaced,
    keywords_of_a_partialmethod,
    attribute_in_a_format,
    protocol_of_an_attribute,
    protocol_no_longer,
    protocol_of_a_method,
    protocol_inherited,
    protocol_in_a_match,
    text_in_memory,
    text_in_memory_read,
    lines_in_memory,
    bytes_in_memory,
    position_in_memory,
    text_in_memory_written,
    state_of_a_handler,
    level_of_a_handler,
    records_of_a_handler,
    dict_of_an_object_replaced,
    dict_of_a_module_replaced,
    context,
    copied_by_copyreg,
    weak_values,
    order_of_a_dict,
    writeable_array,
    strides_of_an_array,
    numpys_errors,
    numpys_printing,
    state_of_random,
    state_of_numpys_random,
    state_of_an_own_random,
    state_of_an_own_generator,
)


@rows({maker.__name__: maker for maker in MAKERS})
def read(world: World, make: Callable[[World], Case]) -> Program:
    function, change = make(world)
    step = world.compile(function)
    try:
        yield step(world.batch(0, (4,)))
        yield step(world.batch(0, (4,)))
        world.change(change)
        yield step(world.batch(0, (4,)))
        yield step(world.batch(1, (4,)))
    finally:
        _helpers.reset()
        np.seterr(divide="warn")
        np.set_printoptions(precision=8)
