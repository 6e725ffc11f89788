"""Symbolic numbers: ``torch.SymFloat``s and ``SymInt``s whose value is an input of the program.

An optimizer's learning rate, or an argument that is another number in every call, is a Python
number in torch's code, but must not become a constant of the compiled step. While a step is traced
it is a ``torch.SymFloat`` or ``torch.SymInt`` over the node below: arithmetic
with other numbers gives another such number, an operation with a tensor carries it into dispatch
(as torch's own dynamic shapes do), and a comparison is decided by its present value, which is
remembered as a guard.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from xla_dtensor.base import interrupts
from xla_dtensor.base.numbers.symbolic_node import SymbolicNode

# What guards are told to: (compute the number from the inputs' values, predicate text, outcome).
GuardSink = Callable[["NumberNode", str, Any], None]

# What makes a number that was computed from inputs an input of the program itself.
Feed = Callable[["NumberNode"], Any]


def is_integer(value: Any) -> bool:
    """Whether a number is an int, or one of NumPy's."""
    return isinstance(value, int | np.integer)


def fits(value: float) -> bool:
    """Whether an int can be an input: one of 64 bits."""
    return -(2**63) <= value < 2**63


class NumberNode(SymbolicNode):
    """The node of a ``torch.SymFloat`` or ``torch.SymInt``: a traced number with its present value.

    Attributes:
        value: its value in this trace; an int is an integer; NumPy's scalars stay what they are.
        traced: the weakly typed JAX scalar.
        compute: the value from the values of the trace's number inputs, for guards.
        text: how it is written, for messages.
        known: whether it has a present value; otherwise ``value`` is NaN (0 of an integer), and
            ``guard`` raises.
        feed: makes a number that Python has computed from inputs an input, too: its JAX scalar.
            ``traced`` is None of such a number until it is asked for.
        over: whether the trace has failed: what it has left somewhere (in a cache) is a constant.
    """

    over = False

    def __init__(
        self,
        value: float,
        traced: Any,
        compute: Callable[[list[float]], float],
        text: str,
        guard: GuardSink,
        known: bool = True,
        feed: Feed | None = None,
    ) -> None:
        self.known = known
        self.value = value
        self._traced = traced
        self.feed = feed
        self.compute = compute
        self.text = text
        self.guard = guard

    @property
    def traced(self) -> Any:
        if self._traced is None:
            assert self.feed is not None
            self._traced = self.feed(self)
        return self._traced

    def end(self) -> None:
        """The trace has failed; a number that is left of it is its value of then."""
        value = self.value
        self.over, self._traced, self.feed = True, value, None
        self.compute, self.guard = lambda inputs: value, lambda *what: None

    def is_int(self) -> bool:
        return is_integer(self.value)

    def is_float(self) -> bool:
        return not is_integer(self.value)

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def maybe_as_bool(self) -> None:
        return None

    def _graph_repr(self) -> str:
        """How torch prints the number: as Python would, so that the text depends on the value."""
        return repr(self.guard_int("", 0) if self.is_int() else self.guard_float("", 0))

    def wrap_float(self, number: float) -> NumberNode:
        return NumberNode(number, number, lambda inputs: number, repr(number), self.guard)

    wrap_int = wrap_float

    def guard_float(self, file: str, line: int) -> float:
        self.guard(self, "==", self.value)
        return float(self.value)

    def guard_int(self, file: str, line: int) -> int:
        self.guard(self, "==", self.value)
        return int(self.value)

    def int_(self) -> int:
        return self.guard_int("", 0)

    def bool_(self) -> bool:
        zero = NumberNode(0, 0, lambda inputs: 0, "0", self.guard)
        return self._compare(zero, "!=", operator.ne).bool_()

    def guard_bool(self, file: str, line: int) -> bool:
        return self.bool_()

    def _binary(
        self,
        other: NumberNode,
        symbol: str,
        function: Callable[..., Any],
        traced: Callable[..., Any] | None = None,
    ) -> NumberNode:
        """``function`` of two numbers, where ``traced`` is the same on tracers."""
        mine, theirs = self.compute, other.compute
        known = self.known and other.known
        integers = symbol != "/" and self.is_int() and other.is_int()
        return NumberNode(
            function(self.value, other.value) if known else 0 if integers else math.nan,
            (traced or function)(self.traced, other.traced),
            lambda inputs: function(mine(inputs), theirs(inputs)),
            f"({self.text} {symbol} {other.text})",
            self._guard_with(other),
            known,
        )

    def _divided(self, other: NumberNode, symbol: str, function: Callable[..., Any]) -> NumberNode:
        """A quotient or a remainder. Python raises where the divisor is 0, and devices don't."""
        if other.known and other.traced is not other.value:
            other._compare(other.wrap_int(0), "!=", operator.ne)
        return self._binary(other, symbol, function)

    def _guard_with(self, other: NumberNode) -> GuardSink:
        """Who decides about what is computed from both: it has a value only if both have."""
        return other.guard if self.known and not other.known else self.guard

    def _compare(self, other: NumberNode, symbol: str, function: Callable[..., bool]) -> Any:
        if not (self.known and other.known):
            text = f"({self.text} {symbol} {other.text})"
            refuse = self._guard_with(other)
            return UndecidedNode(lambda: refuse(self, text, None))
        outcome = function(self.value, other.value)
        mine, theirs = self.compute, other.compute
        self.guard(
            NumberNode(
                outcome,
                None,
                lambda inputs: function(mine(inputs), theirs(inputs)),
                f"({self.text} {symbol} {other.text})",
                self.guard,
            ),
            "is",
            outcome,
        )
        return ComparisonNode(outcome)

    def _of_one(self, function: Callable[[Any], Any], traced: Any, text: str) -> NumberNode:
        """``function`` of the number, where ``traced`` is the same of its tracer."""
        compute = self.compute
        value, again = function(self.value), lambda inputs: function(compute(inputs))
        return NumberNode(value, traced, again, text, self.guard, self.known)

    def neg(self) -> NumberNode:
        return self._of_one(operator.neg, -self.traced, f"-{self.text}")

    def pos(self) -> NumberNode:
        return self

    def clone(self) -> NumberNode:
        return self

    def sym_float(self) -> NumberNode:
        if self.is_float():
            return self
        return self._of_one(float, self.traced * 1.0, self.text)

    def sqrt(self) -> NumberNode:
        return self._of_one(math.sqrt, self.traced**0.5, f"sqrt({self.text})")

    sym_sqrt = sqrt

    def __getattr__(self, name: str) -> Any:
        """Any other arithmetic of torch's symbolic numbers: it is done with the present values,
        which become part of the program."""
        from torch.fx.experimental.sym_node import METHOD_TO_OPERATOR

        function = METHOD_TO_OPERATOR.get(name.removeprefix("sym_"))
        if function is None or name.startswith("__"):
            raise AttributeError(name)

        def fixed(*others: NumberNode) -> NumberNode:
            values = []
            for node in (self, *others):
                if node._traced is None or node._traced is not node.value:  # not a constant
                    node.guard(node, "==", node.value)
                values.append(node.value)
            return self.wrap_float(function(*values))

        return fixed


# torch asks a node for its text by this name.
NumberNode.str = NumberNode._graph_repr  # type: ignore[attr-defined]


class ComparisonNode(SymbolicNode):
    """The node of a ``torch.SymBool`` whose outcome is decided (and guarded) already."""

    def __init__(self, outcome: bool) -> None:
        self.outcome = outcome

    def is_bool(self) -> bool:
        return True

    def bool_(self) -> bool:
        return self.outcome

    def int_(self) -> int:
        return int(self.bool_())

    def guard_bool(self, file: str, line: int) -> bool:
        return self.bool_()

    def expect_true(self, file: str, line: int) -> bool:
        """What ``torch._check`` asks; torch has one in ``x**y``."""
        return self.bool_()

    # What torch asks of a comparison of sizes: this one has an answer.
    def statically_known_true(self, file: str, line: int) -> bool:
        return self.bool_()

    guard_or_false = guard_or_true = guard_size_oblivious = statically_known_true

    def sym_and(self, other: ComparisonNode) -> ComparisonNode:
        return ComparisonNode(self.bool_() and other.bool_())

    def sym_or(self, other: ComparisonNode) -> ComparisonNode:
        return ComparisonNode(self.bool_() or other.bool_())

    def sym_not(self) -> ComparisonNode:
        return ComparisonNode(not self.bool_())

    def _graph_repr(self) -> str:
        return repr(self.bool_())


class UndecidedNode(ComparisonNode):
    """A comparison of numbers of which one has no present value."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        super().__init__(False)
        self._refuse = refuse

    def bool_(self) -> bool:
        self._refuse()
        raise AssertionError("an undecided comparison")

    def expect_true(self, file: str, line: int) -> bool:
        return True  # where it isn't, the result is NaN


def _install_operators() -> None:
    for name, symbol, function in (
        ("add", "+", operator.add),
        ("sub", "-", operator.sub),
        ("mul", "*", operator.mul),
        ("truediv", "/", operator.truediv),
        ("float_truediv", "/", operator.truediv),
        ("pow", "**", operator.pow),
        ("float_pow", "**", operator.pow),
    ):
        setattr(NumberNode, name, lambda a, b, s=symbol, f=function: a._binary(b, s, f))
    for name, symbol, function in (
        ("int_truediv", "/", operator.truediv),
        ("mod", "%", operator.mod),
        ("floordiv", "//", operator.floordiv),
        ("int_floordiv", "//", operator.floordiv),
    ):
        setattr(NumberNode, name, lambda a, b, s=symbol, f=function: a._divided(b, s, f))
    for name, symbol, function in (
        ("eq", "==", operator.eq),
        ("ne", "!=", operator.ne),
        ("lt", "<", operator.lt),
        ("le", "<=", operator.le),
        ("gt", ">", operator.gt),
        ("ge", ">=", operator.ge),
    ):
        setattr(NumberNode, name, lambda a, b, s=symbol, f=function: a._compare(b, s, f))


_install_operators()


for _node in (NumberNode, ComparisonNode, UndecidedNode):
    interrupts.atomic_methods(_node)


def input_number(
    value: float, traced: Any, index: int, name: str, guard: GuardSink, feed: Feed
) -> Any:
    """The number that is input ``index`` of the trace, as a ``torch.SymFloat`` (``torch.SymInt`` of
    an int)."""
    node = NumberNode(value, traced, operator.itemgetter(index), name, guard, feed=feed)
    return torch.SymInt(node) if is_integer(value) else torch.SymFloat(node)
