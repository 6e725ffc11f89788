"""How functions, objects made of functions, and iterators are taken apart."""

from __future__ import annotations

import dis
import functools
import inspect
import io
import itertools
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from xla_dtensor.base.torch_private.attributes import batches_yielded
from xla_dtensor.compilation.code.identities import SameIdentity
from xla_dtensor.compilation.code.reflection import own_of, referents
from xla_dtensor.compilation.objects.kind import ObjectKind, Spot, give, unplaced
from xla_dtensor.compilation.objects.places import MISSING, Slots
from xla_dtensor.errors import DataDependentError


class _Cell(ObjectKind):
    """A closure's variable."""

    needs = 0

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        try:
            return types.CellType, [value.cell_contents]
        except ValueError:  # the variable isn't assigned yet
            return types.CellType, []

    def spots(self, value: Any, path: str) -> list[Spot]:
        return [(Slots(value, ("cell_contents",), path, shown=path), "cell_contents")]

    def make(self, data: Any, parts: list[Any]) -> Any:
        return types.CellType()

    def fill(self, made: Any, data: Any, parts: list[Any]) -> None:
        if parts:
            made.cell_contents = parts[0]


class _Function(ObjectKind):
    """A function made inside of another one, by its code and what it keeps.

    Such functions are made anew for each batch (the mask modifiers of flex_attention, which keep
    its positions): of the same code and around tensors of the same form they have one program.
    """

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        defaults, keywords = value.__defaults__ or (), value.__kwdefaults__ or {}
        data = value.__code__, value.__globals__, len(defaults), tuple(keywords)
        return data, [*(value.__closure__ or ()), *defaults, *keywords.values()]

    def key(self, data: Any) -> Any:
        return data[0], SameIdentity(data[1]), *data[2:]

    def spots(self, value: Any, path: str) -> list[Spot]:
        code, _, count, keywords = self.split(value)[0]
        names = [*code.co_freevars, *(f"default {i}" for i in range(count)), *keywords]
        return [unplaced(f"{name} of {path}") for name in names]

    def make(self, data: Any, parts: list[Any]) -> Any:
        code, namespace, count, keywords = data
        free = len(code.co_freevars)
        made = types.FunctionType(
            code,
            namespace,
            code.co_name,
            tuple(parts[free : free + count]) or None,
            tuple(parts[:free]),
        )
        if keywords:
            made.__kwdefaults__ = dict(zip(keywords, parts[free + count :], strict=True))
        made.__qualname__ = code.co_qualname
        return made


class _Call(ObjectKind):
    """What is made by calling something with its parts: bound methods, slices."""

    def __init__(self, make: Callable[..., Any], *names: str) -> None:
        super().__init__()
        self._make, self._names = make, names

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        return type(value), [getattr(value, name) for name in self._names]

    def spots(self, value: Any, path: str) -> list[Spot]:
        return [unplaced(f"{path}.{name}") for name in self._names]

    def make(self, data: Any, parts: list[Any]) -> Any:
        return self._make(*parts)


class _Partial(ObjectKind):
    """A ``partial``, with the attributes that it has been given."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        own = own_of(value)
        parts = [value.func, value.args, value.keywords, *own.values()]
        return (type(value), tuple(own)), parts

    def make(self, data: Any, parts: list[Any]) -> Any:
        cls, names = data
        function, args, keywords, *own = parts
        made: Any = functools.partial.__new__(cls, function, *args, **keywords)
        give(made, names, own)
        return made


class _Builtin(ObjectKind):
    """A bound method in C: ``x.mul``, ``table.get``."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        return (type(value), value.__name__), [value.__self__]

    def make(self, data: Any, parts: list[Any]) -> Any:
        return getattr(parts[0], data[1])


class _View(ObjectKind):
    """A view of a dict: ``keys()``, ``values()``, ``items()``, a proxy."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        return type(value), referents(value)[:1]

    def make(self, data: Any, parts: list[Any]) -> Any:
        return VIEWS[data](parts[0])


_TABLES: tuple[Any, ...] = ({}, OrderedDict())
VIEWS: dict[type, Callable[[Any], Any]] = {
    types.MappingProxyType: types.MappingProxyType,
    **{
        type(make(table)): make
        for table in _TABLES
        for make in (
            *(lambda d: type(d).keys(d), lambda d: type(d).values(d), lambda d: type(d).items(d)),
        )
    },
}


class _Iterator(ObjectKind):
    """Python's own iterators, by what they are made of (``__reduce__``)."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pickling itertools' is deprecated
            try:
                make, given, *state = value.__reduce__()
            except TypeError as error:
                raise _not_repeated(value, str(error)) from error
        return (make, len(given), bool(state)), [*given, *state[:1]]

    def make(self, data: Any, parts: list[Any]) -> Any:
        make, count, has_state = data
        made = make(*parts[:count])
        if has_state and parts[-1] is not None:
            made.__setstate__(parts[-1])
        return made


class IteratorArgument:
    """An iterator among the arguments, and what has been taken from it for the step.

    Attributes:
        ended: whether that is all.
        used, used_end: how much of it the trace has taken, and whether it has come to the end.
    """

    __slots__ = ("elements", "ended", "iterator", "used", "used_end")

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.elements: list[Any] = []
        self.ended = self.used_end = False
        self.used = 0

    def pull(self) -> None:
        """Take one more."""
        try:
            self.elements.append(next(self.iterator))
        except StopIteration:
            self.ended = True

    def stand_in(self, elements: list[Any]) -> Iterator[Any]:
        """The iterator that a trace is given."""
        self.used, self.used_end = 0, False
        for element in elements:
            self.used += 1
            yield element
        if not self.ended:
            raise NeedsMore(self)
        self.used_end = True

    def check(self) -> None:
        """Raise if the trace hasn't taken all that was taken for it."""
        if self.used < len(self.elements) or self.used_end is not self.ended:
            raise DataDependentError(
                f"the step takes {self.used} elements from an iterator among its arguments, and "
                f"an earlier call with such arguments has taken {len(self.elements)} (or asked for "
                "one more), which are taken for this one, too: give it a list of what it needs"
            )


class NeedsMore(BaseException):
    """A trace has come to the end of what has been taken from an iterator. No error of the
    step's."""

    def __init__(self, stream: IteratorArgument) -> None:
        self.stream = stream


class _Stream(ObjectKind):
    def split(self, value: Any) -> tuple[Any, list[Any]]:
        return value, value.elements

    def key(self, data: Any) -> Any:
        return type(data.iterator), data.ended

    def make(self, data: Any, parts: list[Any]) -> Any:
        return data.stand_in(parts)


class _Generator(ObjectKind):
    """A generator that hasn't begun: its function's code, with what that was given."""

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        frame, code = value.gi_frame, value.gi_code
        if frame is None or inspect.getgeneratorstate(value) != inspect.GEN_CREATED:
            raise _not_repeated(value, "the step has begun to take from it")
        if writes_cells(code):
            raise _not_repeated(value, "it assigns to the step's variables")
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS)
        count += bool(code.co_flags & inspect.CO_VARKEYWORDS)
        names = (*code.co_varnames[:count], *code.co_freevars)
        given = dict(frame.f_locals)
        return (code, frame.f_globals), [given.get(name, MISSING) for name in names]

    def make(self, data: Any, parts: list[Any]) -> Any:
        code, namespace = data
        free = len(parts) - len(code.co_freevars)
        given, kept = parts[:free], parts[free:]
        cells = tuple(types.CellType(*(() if v is MISSING else (v,))) for v in kept)
        function = types.FunctionType(code, namespace, code.co_name, None, cells)
        count, only = code.co_argcount, code.co_kwonlyargcount
        names = code.co_varnames
        rest = given[count + only :]
        more = rest.pop(0) if code.co_flags & inspect.CO_VARARGS else ()
        keywords = dict(zip(names[count : count + only], given[count : count + only], strict=True))
        keywords |= rest.pop(0) if rest else {}
        return function(*given[:count], *more, **keywords)


def _not_repeated(value: Any, why: str) -> DataDependentError:
    return DataDependentError(
        f"the step returns (or leaves somewhere) a {type(value).__name__}, which later calls can't "
        f"make anew: {why}; return a list"
    )


def is_its_code(value: types.FunctionType) -> bool:
    """Whether a function is its code and what it keeps, and no more."""
    code = value.__code__
    nested = code.co_flags & inspect.CO_NESTED
    return bool(nested) and not value.__dict__ and not writes_cells(code)


def without_cells(function: types.FunctionType) -> types.FunctionType:
    """The same code with nothing in its variables: they are the next call's others."""
    empty = tuple(types.CellType() for _ in function.__code__.co_freevars)
    name = function.__name__
    return types.FunctionType(function.__code__, function.__globals__, name, None, empty)


@functools.lru_cache(1024)
def writes_cells(code: types.CodeType) -> bool:
    """Whether a function, or one inside of it, assigns to variables of the one around it."""
    free = set(code.co_freevars)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in free:
            return True
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return any(map(writes_cells, inner))


CELL, FUNCTION, ITERATOR, GENERATOR, VIEW = (
    *(_Cell(), _Function(), _Iterator(), _Generator()),
    _View(),
)
BUILTIN, STREAM = _Builtin(), _Stream(inputs=True)
METHOD = _Call(types.MethodType, "__func__", "__self__")
SLICE = _Call(slice, "start", "stop", "step")
PARTIAL = _Partial()
_REVERSIBLES: tuple[Any, ...] = ([], {}, {}.values(), {}.items())
_ITERABLES: tuple[Any, ...] = (*_REVERSIBLES, (), range(0), set(), "", b"")
ITERATORS: tuple[type, ...] = (
    *(map, zip, filter, enumerate, reversed),
    *(t for t in vars(itertools).values() if isinstance(t, type) and hasattr(t, "__next__")),
    *(type(iter(x)) for x in _ITERABLES),
    *(type(reversed(x)) for x in _REVERSIBLES),
)


def _position(file: io.IOBase) -> Any:
    """How far a file has been read; what is only written to isn't looked at."""
    try:
        return file.tell() if file.readable() and not file.writable() else None
    except (OSError, ValueError):  # a pipe; ``next(file)`` is under way; it is closed
        return UNKNOWN


UNKNOWN = object()
"""How far an iterator has come that can't be asked."""


def state_of_iterator(iterator: Any) -> Any:
    """How far an iterator has come, without moving it."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return None
        # It may stop at the same place each time: in a loop, whose variables are others then.
        inner = iterator.gi_yieldfrom
        further = state_of_iterator(inner) if hasattr(inner, "__next__") else None
        known = [v if v is None else SameIdentity(v) for v in frame.f_locals.values()]
        return frame.f_lasti, known, further
    if isinstance(iterator, io.IOBase):
        return _position(iterator)
    hint = getattr(iterator, "__length_hint__", None)
    if hint is not None:
        return hint()
    yielded = batches_yielded(iterator)
    if yielded is not None:
        return yielded
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and a TypeError from Python 3.14 on
        try:
            parts = iterator.__reduce__()
        except TypeError:
            return UNKNOWN
    if isinstance(parts, str):
        return UNKNOWN
    states = [
        state_of_iterator(x) if hasattr(x, "__next__") else repr(x)
        for part in parts[1:]
        if isinstance(part, tuple)
        for x in part
    ]
    return UNKNOWN if UNKNOWN in states else states
