"""Symbolic numbers that Python code takes for ``float`` and ``int``, while a step is traced.

They are `torch.SymFloat` and `torch.SymInt` that say to be a float and an int. What Python computes
with them it computes again in each call, on the host, with the operators and functions of Python
itself: a result that meets a tensor is one more input of the program. A comparison is decided by
the present values, and its outcome is what the program depends on: ``n % 4 == 0`` makes two
programs. Where Python needs the number itself (``float(n)``, ``x[:n]``, ``f"{n}"``), it depends on
the value.

Some aren't known before the program has run (`pending_number.py`): with these Python can compute,
and what would depend on the value is refused.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from xla_dtensor.base import executor, interrupts
from xla_dtensor.base.numbers.function_of_inputs import FunctionOfInputs
from xla_dtensor.base.numbers.pending_number import ARITHMETIC_ERRORS, PendingNode, pending
from xla_dtensor.base.numbers.printed import marked, only_printed
from xla_dtensor.base.numbers.traced_number import NumberNode

# Scalars of NumPy's that are numbers like Python's.
NUMPY_NUMBERS: frozenset[type] = frozenset(
    {
        *(np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64),
        *(np.uint8, np.uint16, np.uint32, np.uint64),
    }
)


class _Kind(type):
    """The type of numbers that stand for those of another: code that asks ``type(n) == float``,
    ``type(n) in KINDS``, ``TABLE[type(n)]`` or ``type(n)(2)`` finds that one.

    Attributes:
        stands_for: the other.
    """

    stands_for: Any = None

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.stands_for

    def __hash__(cls) -> int:
        return hash(cls.stands_for)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], NumberNode):
            return super().__call__(*args)
        return cls.stands_for(*args, **kwargs)


class _PythonNumber:
    """What Python's code and C's ask of a symbolic number."""

    node: Any

    # What isinstance asks.
    __class__ = property(lambda self: type(self.node.value))

    def __hash__(self) -> int:
        return hash(_shown(self, sys._getframe()))

    def __format__(self, spec: str) -> str:
        return _text(self, sys._getframe(1), lambda value: format(value, spec))

    def __repr__(self) -> str:
        return _text(self, sys._getframe(1), repr)

    def __int__(self) -> int:
        return int(_shown(self, sys._getframe(1)))

    def __float__(self) -> float:
        return float(_shown(self, sys._getframe(1)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _value, (_shown(self, sys._getframe(1)),)

    __str__ = __repr__


class Float(_PythonNumber, torch.SymFloat, metaclass=_Kind):
    """A symbolic number that Python code takes for a float."""


class Int(_PythonNumber, torch.SymInt, metaclass=_Kind):
    """The same of an int."""


_KINDS: dict[Any, Any] = {}
for _type in (float, int, *sorted(NUMPY_NUMBERS, key=lambda cls: cls.__name__)):
    _base = Int if issubclass(_type, int | np.integer) else Float
    _base = _KINDS[float] if _type is np.float64 else _base  # as it is with Python's own
    _own = {"stands_for": _type, "__module__": _type.__module__}
    _KINDS[_type] = _Kind(_type.__name__, (_base,), _own)


def _value(number: Any) -> Any:
    """What a pickle of a symbolic number has of it."""
    return number


def _text(number: Any, frame: types.FrameType, text: Callable[[Any], str]) -> str:
    """The text of a number; what is only printed may have it later."""
    mark = None if number.node.over else marked(frame, number.node, text)
    return text(_shown(number, frame)) if mark is None else mark


def _shown(number: Any, frame: types.FrameType) -> Any:
    """The number itself, for the code in ``frame``: the program depends on it, unless it is only
    printed (``"%d" % n`` asks for an int)."""
    node = number.node
    if is_pending(number):
        return node.shown()
    if not only_printed(frame):
        node.guard(node, "==", node.value)
    return node.value


def like_a_number(number: Any) -> Any:
    """A symbolic number for Python code, which may ask ``isinstance(x, float)``."""
    return _of(number.node)


def _of(node: NumberNode) -> Any:
    number = _KINDS.get(type(node.value), _KINDS[int if node.is_int() else float])(node)
    executor.current().gave_number(number)
    return number


def is_number(value: Any) -> bool:
    """Whether it is a symbolic number of a trace, with a present value."""
    return (
        isinstance(value, torch.SymFloat | torch.SymInt)
        and isinstance(value.node, NumberNode)
        and value.node.known
    )


def is_pending(value: Any) -> bool:
    """Whether it is a number that is known when the program has run."""
    return isinstance(value, torch.SymFloat | torch.SymInt) and isinstance(value.node, PendingNode)


def is_symbolic(value: Any) -> bool:
    """Whether it is one or the other: Python can compute with it."""
    return is_number(value) or is_pending(value)


def is_pythons(value: Any) -> bool:
    """Whether it is a number that the user's Python has been given. (Optimizers' formulas have
    plain symbolic numbers, with which torch computes on the devices.)"""
    return isinstance(value, Float | Int)


def computed(function: Callable[..., Any], text: str, *operands: Any) -> Any:
    """``function`` of numbers, symbolic ones among them.

    Args:
        function: of Python's numbers; pure.
        text: how it is written, with a ``{}`` for each operand.

    Returns:
        a symbolic number, or what ``function`` decides (a bool), which the program then depends on.

    Raises:
        TypeError: the result is neither (Python's ``(-2.0) ** 0.5`` is complex).
        DataDependentError: it decides by a number that isn't known yet.
    """
    waiting = list(map(is_pending, operands))
    values = [x.node.value if is_symbolic(x) else x for x in operands]
    nodes = [
        x.node if waits or (is_number(x) and not x.node.over) else None
        for x, waits in zip(operands, waiting, strict=True)
    ]
    first = next((node for node in nodes if node is not None), None)
    if first is None:
        return function(*values)
    texts = (repr(v) if n is None else n.text for n, v in zip(nodes, values, strict=True))
    text = _short(text.format(*texts))
    reads = [n and n.compute for n in nodes]
    compute = FunctionOfInputs(function, reads, values)
    if any(waiting):
        return _of(pending(function, text, values, nodes, compute))
    error = _error_of(function, *values)
    can_raise = function not in _NEVER_RAISE and (function not in _DIVIDE or nodes[1] is not None)
    if can_raise or error != _NO_ERROR:  # code may catch it, and go on otherwise
        found = FunctionOfInputs(functools.partial(_error_of, function), reads, values)
        first.guard(NumberNode(math.nan, None, found, text, first.guard), "raises", error)
    value = function(*values)
    if isinstance(value, bool | np.bool_):
        outcome = bool(value)
        first.guard(NumberNode(outcome, None, compute, text, first.guard), "is", outcome)
        return value
    if type(value) not in (int, float, *NUMPY_NUMBERS):
        raise TypeError(f"{text} is a {type(value).__name__}, which can't be an input of a program")
    node = NumberNode(value, None, compute, text, first.guard, feed=first.feed)
    return _of(node)


def _short(text: str) -> str:
    """A text that a loop (``t = t + dt``) doesn't make longer and longer: for one computation the
    same in each trace, and for others another one."""
    if len(text) <= _LONGEST:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"({text[:_SHOWN]}..., {digest})"


_LONGEST, _SHOWN = 1000, 100


def _error_of(function: Callable[..., Any], *operands: Any) -> str:
    """The name of the error that Python's arithmetic raises, which code may catch."""
    try:
        function(*operands)
    except ARITHMETIC_ERRORS as error:
        return type(error).__name__
    return _NO_ERROR


_NO_ERROR = "no error"
_COMPARE = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_NEVER_RAISE = {operator.add, operator.sub, operator.mul, operator.neg, operator.pos, abs, bool}
_NEVER_RAISE |= {operator.and_, operator.or_, operator.xor, *_COMPARE}
_DIVIDE = (operator.truediv, operator.floordiv, operator.mod)  # by 0


def _operand(value: Any) -> Any:
    """A number that can be computed with; NotImplemented for anything else."""
    cls = type(value)
    if cls is int or cls is float or cls is bool or is_symbolic(value):
        return value
    if cls in NUMPY_NUMBERS:
        return value
    return float(value) if isinstance(value, float) else NotImplemented


def _binary(
    function: Callable[..., Any], symbol: str, reflected: bool = False
) -> Callable[[Any, Any], Any]:
    text = f"({{}} {symbol} {{}})"

    def operate(self: Any, other: Any) -> Any:
        other = _operand(other)
        if other is NotImplemented:
            return other
        return computed(function, text, *((other, self) if reflected else (self, other)))

    return operate


def _function(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def operate(self: Any, *others: Any) -> Any:
        text = f"{name}({', '.join(['{}'] * (1 + len(others)))})"
        return computed(function, text, self, *others)

    return operate


def _divmod(self: Any, other: Any) -> Any:
    return self // other, self % other


def _rdivmod(self: Any, other: Any) -> Any:
    return other // self, other % self


_BOTH: dict[str, tuple[Callable[..., Any], str]] = {
    "add": (operator.add, "+"),
    "sub": (operator.sub, "-"),
    "mul": (operator.mul, "*"),
    "truediv": (operator.truediv, "/"),
    "floordiv": (operator.floordiv, "//"),
    "mod": (operator.mod, "%"),
    "pow": (operator.pow, "**"),
}
_INTEGERS: dict[str, tuple[Callable[..., Any], str]] = {
    "and": (operator.and_, "&"),
    "or": (operator.or_, "|"),
    "xor": (operator.xor, "^"),
    "lshift": (operator.lshift, "<<"),
    "rshift": (operator.rshift, ">>"),
}
_COMPARISONS: dict[str, tuple[Callable[..., Any], str]] = {
    "eq": (operator.eq, "=="),
    "ne": (operator.ne, "!="),
    "lt": (operator.lt, "<"),
    "le": (operator.le, "<="),
    "gt": (operator.gt, ">"),
    "ge": (operator.ge, ">="),
}
_UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "round": round,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "bool": bool,
}


# Functions of NumPy's that ask an object for a method of their name.
_UFUNCS = (
    *("arccos", "arcsin", "arctan", "cbrt", "cos", "cosh", "exp", "exp2", "expm1", "log", "log10"),
    *("log1p", "log2", "rint", "sin", "sinh", "sqrt", "square", "tan", "tanh"),
)


def _of_numpy(function: Any) -> Callable[[Any], float]:
    return lambda number: float(function(number))


def _array_ufunc(self: Any, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    """NumPy, which takes it for a float, is given an object that it computes with by operators.
    Together with an array that would be an array of objects, so there it is the number itself."""
    for number in filter(is_pending, inputs):
        number.node.needed(f"numpy.{ufunc.__name__} of")
    has_array = any(isinstance(x, np.ndarray) and x.dtype != object for x in inputs)
    return getattr(ufunc, method)(*map(_itself if has_array else _boxed, inputs), **kwargs)


def _itself(value: Any) -> Any:
    """The present value of a symbolic number, on which the program depends then."""
    if not is_symbolic(value):
        return value
    value.node.guard(value.node, "==", value.node.value)
    return value.node.value


def _boxed(value: Any) -> Any:
    if not is_symbolic(value):
        return value
    box = np.empty((), object)
    box[()] = value
    return box


def _install() -> None:
    for cls, names in ((Float, _BOTH), (Int, _BOTH | _INTEGERS)):
        for name, (function, symbol) in names.items():
            setattr(cls, f"__{name}__", _binary(function, symbol))
            setattr(cls, f"__r{name}__", _binary(function, symbol, reflected=True))
        for name, (function, symbol) in _COMPARISONS.items():
            setattr(cls, f"__{name}__", _binary(function, symbol))
        for name, function in _UNARY.items():
            setattr(cls, f"__{name}__", _function(function, name))
        cls.__divmod__, cls.__rdivmod__ = _divmod, _rdivmod
        cls.__array_ufunc__ = _array_ufunc
        cls.conjugate = cls.__pos__
        cls.real = property(cls.__pos__)
        for name in _UFUNCS:
            setattr(cls, name, _function(_of_numpy(getattr(np, name)), f"numpy.{name}"))
    Int.__invert__ = _function(operator.invert, "invert")
    Int.bit_length = _function(int.bit_length, "bit_length")
    Float.is_integer = _function(float.is_integer, "is_integer")


_install()


def present_value(value: Any) -> Any:
    """What a symbolic number is now, without the program's depending on it; other values as they
    are."""
    return value.node.value if is_number(value) else value


def as_float(value: Any = 0.0) -> Any:
    """Python's ``float``, which of a symbolic number is one."""
    if not is_symbolic(value):
        return float(value)
    number = like_a_number(value)
    return number if number.node.is_float() else computed(float, "float({})", number)


for _cls in (_PythonNumber, Float, Int):
    interrupts.atomic_methods(_cls)
