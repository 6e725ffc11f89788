"""Followers of Python's own objects: containers, wrappers, and objects read by calling them."""

from __future__ import annotations

import array
import contextvars
import ctypes
import datetime
import decimal
import functools
import hashlib
import io
import itertools
import operator
import queue
import random
import re
import sys
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from xla_dtensor.base.torch_private import ScriptDict, ScriptList
from xla_dtensor.compilation.code.reflection import referents
from xla_dtensor.compilation.objects.called_places import Flag, OfThread, Text, Variable
from xla_dtensor.compilation.objects.found import content_of, is_atom
from xla_dtensor.compilation.objects.kinds_of_code import ITERATORS, VIEWS, state_of_iterator
from xla_dtensor.compilation.objects.places import Elements, Items, Slots, class_of_content
from xla_dtensor.compilation.objects.settings import of_decimal
from xla_dtensor.compilation.watch.attributes import methods, of_object, own_parts
from xla_dtensor.compilation.watch.walk import Followed, Follower, Walk

# Of larger containers (vocabularies, data sets) the length and SAMPLES elements are compared.
MANY, SAMPLES = 10_000, 256
MANY_BY_CHANCE = 1_000


def of_dict(walk: Walk, value: Any, path: str) -> None:
    """Keys and values."""
    if value is sys.modules:
        walk.import_any()
        return
    content = class_of_content(value).items(value)
    if len(content) > _many(walk):
        every = -(-len(content) // SAMPLES)
        _sampled(walk, value, [key for key, _ in itertools.islice(content, 0, None, every)], path)
        return
    keys = tuple(key if is_atom(key) else id(key) for key, _ in content)
    walk.reached.note(path, type(value), keys)
    place = Items(value, path)
    walk.place(place)
    if isinstance(value, defaultdict):
        walk.read(Slots(value, ("default_factory",), path))
    place.carried = walk.taken(place, (key for key, _ in content))
    for key, item in content:
        if key in place.carried:
            continue
        if not is_atom(key):
            walk.follow(key, f"{path}'s key")
        walk.follow(item, f"{path}[{key!r}]" if is_atom(key) else f"{path}[...]")
    users_own(walk, value, path)


def of_sequence(walk: Walk, value: Any, path: str) -> None:
    """Elements, of sets too."""
    cls = class_of_content(value)
    length = cls.__len__(value)
    if length > _many(walk):
        some = range(0, length, -(-length // SAMPLES))
        _sampled(walk, value, some if isinstance(value, list | tuple) else (), path)
        return
    walk.reached.note(path, type(value), (length, getattr(value, "maxlen", None)))
    place = Elements(value, path)
    walk.place(place)
    if isinstance(value, list | deque):
        place.carried = walk.taken(place, range(length))
    for i, item in enumerate(cls.__iter__(value)):
        if i not in place.carried:
            walk.follow(item, f"{path}[{i}]")
    users_own(walk, value, path)


def _many(walk: Walk) -> int:
    return MANY_BY_CHANCE if walk.by_chance else MANY


def _sampled(walk: Walk, value: Any, keys: Sequence[Any], path: str) -> None:
    """A container of which all would be too much: its length, and some of what it holds."""
    walk.reached.large.append(value)
    some: tuple[Any, ...] = ()
    if keys and type(value) in (list, tuple, dict):
        read = operator.itemgetter(*keys)
        walk.reached.live.append((read, value))
        some = tuple(each if is_atom(each) else id(each) for each in read(value))
    walk.reached.note(path, type(value), (id(value), len(value)))
    walk.reached.note(f"some of {path}", "value", some)


def of_view(walk: Walk, value: Any, path: str) -> None:
    """A view of a dict."""
    for table in referents(value):
        walk.follow(table, path)


def of_buffer(walk: Walk, value: Any, path: str) -> None:
    """An array of numbers, or another buffer: its content; of an array of objects those, too."""
    content = content_of(value)
    walk.reached.arrays.append((value, content))
    walk.reached.note(path, "array", content)
    if type(value) is not np.ndarray:
        own_parts(walk, value, path)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        for number, item in enumerate(value.ravel().tolist()):
            walk.follow(item, f"{path}[{number}]")


def through(*names: str) -> Follower:
    """Of what is only around others: those."""

    def follow(walk: Walk, value: Any, path: str) -> None:
        for name in names:
            walk.follow(getattr(value, name), path)
        users_own(walk, value, path)

    return follow


def of_cell(walk: Walk, cell: types.CellType, path: str) -> None:
    """A closure's variable."""
    walk.read(Slots(cell, ("cell_contents",), path, shown=path), name=path)


def of_method(walk: Walk, method: types.MethodType, path: str) -> None:
    """A function, and the object that it is bound to."""
    walk.follow(method.__func__, path)
    walk.follow(method.__self__, f"{path}.__self__")


def of_method_in_c(walk: Walk, method: Any, path: str) -> None:
    """``table.get``: the object that it is bound to."""
    walk.reached.note(path, "method of C", method.__name__)  # by value: each read makes a string
    if not isinstance(method.__self__, types.ModuleType | type):
        walk.follow(method.__self__, f"{path}.__self__")


def of_partial(walk: Walk, partial: Any, path: str) -> None:
    """A function, and what it is given."""
    walk.read(Slots(partial, ("func", "args", "keywords"), path))
    own_parts(walk, partial, path)


def of_cached_property(walk: Walk, value: functools.cached_property[Any], path: str) -> None:
    """A function, whose result is assigned."""
    walk.names.assigned.update(filter(None, (value.attrname,)))
    walk.follow(value.func, path)
    users_own(walk, value, path)


def of_getter(walk: Walk, getter: Any, path: str) -> None:
    """``operator.attrgetter("a.b")``: the names in it; what a method is called with."""
    how, given = getter.__reduce__()  # with keyword arguments `how` is a `partial`
    names = [one for one in (*getattr(how, "args", ()), *given) if type(one) is str]
    walk.names.attributes.update(*(re.findall(r"\w+", name) for name in names))
    walk.follow(how, path)
    walk.follow(given, path)


def of_py_object(walk: Walk, value: ctypes.py_object[Any], path: str) -> None:
    """What a program in C has been given, or will be."""
    walk.read(Slots(value, ("value",), path))


def of_reference(walk: Walk, reference: weakref.ref[Any], path: str) -> None:
    """A weak reference: what it is to."""
    walk.follow(reference(), f"{path}()")
    users_own(walk, reference, path)


# Their amount tells whether a step has put, taken, acquired or released something.
_SHARED = (threading.Semaphore, queue.Queue, queue.SimpleQueue)
_OF_THREADS = (threading.Thread, threading.Condition, threading.Barrier)
_RANDOM_SOURCES = (random.Random, np.random.Generator, np.random.RandomState)
_READS_TEXT = frozenset(
    {
        *("getvalue", "getbuffer", "read", "read1", "readinto", "readinto1", "readline"),
        *("readlines", "tell"),
    }
)


def of_text(walk: Walk, text: io.StringIO | io.BytesIO, path: str) -> None:
    """What the step reads from memory as from a file. Where it only writes to it that happens once,
    as with any file."""
    names = walk.names.attributes
    writes = walk.names.calls("print") or not names.isdisjoint({"write", "writelines"})
    if not writes or not _READS_TEXT.isdisjoint(names):
        place = Text(text, path)
        walk.place(place)
        for key in place.content():
            walk.reached.probe(place.label(key), functools.partial(place.at, key))
    own_parts(walk, text, path)


def of_file(walk: Walk, file: io.IOBase, path: str) -> None:
    """The step mustn't read from a file that is open outside of it."""
    walk.reached.consumed.append((file, path))
    own_parts(walk, file, path)


def of_event(walk: Walk, event: threading.Event, path: str) -> None:
    """Whether it is set."""
    names = walk.names.attributes
    flag = Flag(event, path, guarded=not names.isdisjoint({"is_set", "isSet", "wait"}))
    if flag.guarded:
        walk.reached.note(f"{path}.is_set()", "value", event.is_set())
    if not names.isdisjoint({"set", "clear"}):
        walk.place(flag)
    elif flag.guarded:  # the step reads it, and other threads may set it
        walk.reached.live += flag.live()[1]
    users_own(walk, event, path)


def of_random_source(walk: Walk, source: Any, path: str) -> None:
    """A generator of random numbers. The step mustn't draw from it; but it may look at it."""
    walk.reached.random_sources.append(source)
    names = walk.names.attributes
    if isinstance(source, random.Random):
        if "getstate" in names:
            walk.reached.probe(f"{path}.getstate()", source.getstate)
    elif not names.isdisjoint({"get_state", "bit_generator"}):
        generator = source.bit_generator if hasattr(source, "bit_generator") else source
        read = lambda: repr(getattr(generator, "state", None) or source.get_state())
        walk.reached.probe(f"{path}'s state", read)
    users_own(walk, source, path)


def users_own(walk: Walk, value: Any, path: str) -> None:
    """What the user's own class has added to one of a library's."""
    if not walk.of_library(type(value)):
        own_parts(walk, value, path)


def of_thread_local(walk: Walk, local: threading.local, path: str) -> None:
    """What it holds in this thread; each has a dict of its own."""
    own = vars(local)
    walk.reached.probes.append((functools.partial(vars, local), own))
    place = OfThread(local, filter(walk.names.is_read, own), path)
    walk.read(place)
    walk.assigned(place)
    methods(walk, type(local))


def of_variable(walk: Walk, variable: contextvars.ContextVar[Any], path: str) -> None:
    """What it holds in the context of the call: what was set there, or its own default."""
    walk.read(Variable(variable, path))


def of_context(walk: Walk, context: contextvars.Context, path: str) -> None:
    """What variables hold in a context that the step's code enters."""
    walk.reached.live += [(type(context).keys, context), (type(context).values, context)]
    for variable, held in context.items():
        walk.follow(held, f"{path}[{variable.name}]")


_SHOWS_HOW_FAR = ("length_hint", "__length_hint__", "repr", "str", "format")


def of_iterator(walk: Walk, iterator: Any, path: str) -> None:
    """The step mustn't take from it; but it may look how far it has come."""
    walk.reached.consumed.append((iterator, path))
    if walk.names.calls(*_SHOWS_HOW_FAR) or not walk.names.attributes.isdisjoint(_SHOWS_HOW_FAR):
        walk.reached.probe(f"how far {path} is", functools.partial(state_of_iterator, iterator))
    users_own(walk, iterator, path)


def _digest(made: Any) -> bytes:
    return bytes(made.digest(32) if made.name.startswith("shake") else made.digest())


# Objects of C with state that is in no attribute, and the function that reads it.
_TOLD: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (decimal.Context, of_decimal),
    (tuple({type(hashlib.new(name)) for name in hashlib.algorithms_guaranteed}), _digest),
    (torch.Generator, torch.Generator.initial_seed),
    ((ScriptDict, ScriptList), str),
)


def told(tell: Callable[[Any], Any]) -> Follower:
    """Of what only a call tells: that."""

    def follow(walk: Walk, value: Any, path: str) -> None:
        walk.reached.probe(f"what {path} holds", functools.partial(tell, value))
        users_own(walk, value, path)

    return follow


def of_time(walk: Walk, value: datetime.datetime | datetime.time, path: str) -> None:
    """A time zone may be the user's code."""
    of_object(walk, value, path)
    if value.tzinfo is not None:
        walk.follow(value.tzinfo, f"{path}.tzinfo")


def of_shared(walk: Walk, value: Any, path: str) -> None:
    """The step mustn't put, take, acquire or release."""
    walk.reached.shared.append((value, path))
    users_own(walk, value, path)


# The base of ctypes' numbers; a ``multiprocessing.Value`` wraps one.
_OF_CTYPES = ctypes.c_int.__mro__[-2]

KINDS = (
    Followed(ctypes.py_object, "opaque", of_py_object),
    Followed(
        (np.ndarray, np.void, bytearray, memoryview, array.array, _OF_CTYPES), None, of_buffer
    ),
    Followed(types.MethodType, type, of_method),
    Followed((functools.partial, functools.partialmethod), type, of_partial),
    Followed((staticmethod, classmethod), None, through("__func__")),
    Followed(slice, slice, through("start", "stop", "step")),
    Followed(property, None, through("fget", "fset", "fdel")),
    Followed(functools.cached_property, None, of_cached_property),
    Followed(functools.singledispatchmethod, None, through("func", "dispatcher")),
    Followed(contextvars.ContextVar, "opaque", of_variable),
    Followed((operator.attrgetter, operator.methodcaller), None, of_getter),
    Followed(types.CellType, None, of_cell),
    Followed((dict, types.MappingProxyType), None, of_dict),
    Followed(tuple(VIEWS), type, of_view),
    Followed(threading.local, "object", of_thread_local),
    Followed((types.BuiltinMethodType, types.MethodWrapperType), None, of_method_in_c),
    Followed(weakref.ref, "opaque", of_reference),
    Followed((list, tuple, set, frozenset, deque), None, of_sequence),
    Followed((types.GeneratorType, *ITERATORS), "opaque", of_iterator),
    Followed(_SHARED, "opaque", of_shared),
    # Only the user's attributes: threads share the objects' own state and change it any time.
    Followed(_OF_THREADS, "opaque", users_own),
    Followed(threading.Event, "object", of_event),
    Followed((io.StringIO, io.BytesIO), "object", of_text),
    Followed(io.IOBase, "object", of_file),
    Followed(_RANDOM_SOURCES, "random generator", of_random_source),
    Followed(contextvars.Context, "opaque", of_context),
    Followed((datetime.datetime, datetime.time), None, of_time),
    Followed(np.flatiter, "opaque", through("base")),
    *(Followed(classes, "opaque", told(tell)) for classes, tell in _TOLD),
)
