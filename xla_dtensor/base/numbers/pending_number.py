"""Numbers that Python has of a compiled step before they are known: ``loss.item()``.

The value is one of the program's outputs. While the step is traced Python may compute with such a
number, return it, and keep it (``self.total += loss.item()``): when the program has run, each call
repeats what Python computed, with Python's own operators. A tensor that it meets gets the value on
the devices. A decision by it, its text, or a position need the value at once: they are refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from xla_dtensor.base import interrupts
from xla_dtensor.base.numbers.traced_number import NumberNode, fits
from xla_dtensor.errors import DataDependentError

# What the devices compute as Python does, but for rounding; of `math` by JAX's functions of that
# name.
_EXACT = (operator.add, operator.sub, operator.mul, operator.neg, operator.pos, abs)
_OF_MATH = ("exp", "log", "log2", "log10", "log1p", "expm1", "sqrt", "sin", "cos", "tanh")
_FUNCTIONS = {getattr(math, name): name for name in _OF_MATH}

# What Python's arithmetic may raise for the numbers by which the type of a result is found.
ARITHMETIC_ERRORS = (ArithmeticError, ValueError)


class Waiting(Protocol):
    """Who has the items of a trace."""

    def refuse(self, what: str) -> NoReturn:
        """Something needs a value before it is known."""

    def show(self, show: Callable[..., Any], values: list[Any]) -> None:
        """Call ``show`` with the values when the program has run: texts and numbers in parts
        (`text_of_numbers.Parts`), and others as they are."""

    def may_raise(self, node: PendingNode) -> None:
        """The devices compute a number that Python may raise for."""


class PendingNode(NumberNode):
    """The node of a number that is known when the program has run.

    Args:
        kind: its type.
        compute: its value, from those of the trace's numbers, behind which the items come,
            the last one first: item ``k`` is at ``-1 - k``.
        text: how it is written, for messages.
        trace: whose items it is computed from.
        on_devices: gives its JAX scalar.

    Attributes:
        items: which items of tensors it is computed from.
    """

    def __init__(
        self,
        kind: type,
        compute: Callable[[list[Any]], Any],
        text: str,
        trace: Waiting,
        items: frozenset[int],
        on_devices: Callable[[NumberNode], Any],
    ) -> None:
        absent: Any = 0 if issubclass(kind, int | np.integer) else math.nan
        absent = absent if kind in (int, float) else kind(absent)
        super().__init__(absent, None, compute, text, self._guarded, known=False, feed=on_devices)
        self.items, self.trace = items, trace

    def _guarded(self, *what: Any) -> NoReturn:
        self.needed("what Python does with")

    def shown(self) -> _Left:
        """What its text is of, or the number itself where Python asks for it: a debugger may show
        one that is left of a trace that has failed."""
        if not self.over:
            self.needed("what Python does with")
        return _LEFT

    def needed(self, what: str) -> NoReturn:
        """Refuse that something needs the value at once."""
        if self.over:
            _refuse_left()
        self.trace.refuse(f"{what} {self.text}")

    @property
    def like(self) -> Any:
        """A number of its type."""
        return type(self.value)(1.5)

    def end(self) -> None:
        """The trace is over, and it was left somewhere."""
        self.over, self._traced, self.feed = True, None, _refuse_left
        self.compute = _refuse_left


class _Left:
    """Stands for a number that is left of a trace that has failed: it has nothing but text."""

    def __repr__(self) -> str:
        return "<.item() of a compiled step that failed>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __float__(self) -> float:
        _refuse_left()

    __int__ = __hash__ = __float__  # type: ignore[assignment]


_LEFT = _Left()


def _refuse_left(*what: Any) -> NoReturn:
    raise DataDependentError(
        "a number that a compiled step has computed on the devices (.item()) was left where the "
        "step isn't watched, in a cache, say: it has no value there"
    )


def pending(
    function: Callable[..., Any],
    text: str,
    values: Sequence[Any],
    nodes: Sequence[NumberNode | None],
    compute: Callable[[list[Any]], Any],
) -> PendingNode:
    """``function`` of numbers of which one isn't known yet.

    Args:
        values: the operands, where ``nodes`` has None.
        nodes: those of symbolic operands.
        compute: the same from the values of the trace's numbers and items.

    Raises:
        DataDependentError: it is a decision.
        TypeError: the result is no number that a program can have.
    """
    waiting = [node for node in nodes if isinstance(node, PendingNode)]
    if any(node.over for node in waiting):
        _refuse_left()
    trace = waiting[0].trace
    pairs = list(zip(values, nodes, strict=True))
    likes = [n.like if isinstance(n, PendingNode) else v for v, n in pairs]
    try:
        like = function(*likes)
    except ARITHMETIC_ERRORS:
        like = 1.5
    if isinstance(like, bool | np.bool_):
        trace.refuse(f"the decision {text}")
    if not isinstance(like, int | float | np.integer | np.floating):
        raise TypeError(f"{text} is a {type(like).__name__}, which can't be left to the program")

    def on_devices(node: NumberNode) -> Any:
        assert isinstance(node, PendingNode)
        if any(n is None and isinstance(v, int) and not fits(v) for v, n in pairs):
            trace.refuse(f"an operation with {text}, an int of more than 64 bits,")
        operands = [v if n is None else n.traced for v, n in pairs]
        if function not in _EXACT or node.is_int():  # ints wrap where Python's have more digits
            trace.may_raise(node)
        if function in _EXACT or (function in (operator.truediv, operator.pow) and node.is_float()):
            return function(*operands)
        name = _FUNCTIONS.get(function)
        if name is None or len(operands) > 1:
            trace.refuse(f"an operation with {text}")
        import jax.numpy as jnp  # not with the package, which starts without JAX

        return getattr(jnp, name)(*operands)

    items = frozenset[int]().union(*(node.items for node in waiting))
    return PendingNode(type(like), compute, text, trace, items, on_devices)


interrupts.atomic_methods(PendingNode)
