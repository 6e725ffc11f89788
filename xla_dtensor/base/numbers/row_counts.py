"""Numbers of rows that are values on the devices, which Python only adds up and passes on.

``counts.tolist()`` of counts that each device has its own of, or that a compiled step computes,
are such numbers: ``torch.SymInt``s over the node below. torch's own code takes them for sizes. What
Python would have to know (``if n == 0``, ``range(n)``) raises.
"""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import torch

from xla_dtensor.base.executor import trace
from xla_dtensor.base.numbers.counts import Counts, Terms
from xla_dtensor.base.numbers.printed import only_shown
from xla_dtensor.base.numbers.row_comparisons import Comparison, executor, refuse
from xla_dtensor.base.numbers.symbolic_node import SymbolicNode

# What stands for a number that nothing is known of, where torch's C++ chooses between ways to
# compute the same (is it 0, is it 1, are these equal).
_SOME = 1009


class Met(Exception):
    """An operation on tensors of static shapes was given such a number."""


def numbers_of(counts: Counts) -> list[Any]:
    """A number for each entry."""
    return [torch.SymInt(CountNode({(counts, i): 1}, 0)) for i in range(len(counts.tensor))]


def is_count(value: Any) -> bool:
    """Whether it is such a number."""
    return isinstance(value, torch.SymInt) and isinstance(value.node, CountNode)


def has_counts(values: Any) -> bool:
    """Whether one of a list is."""
    return values is not None and any(map(is_count, values))


class CountNode(SymbolicNode):
    """The node of a ``torch.SymInt``: a sum of entries of `Counts`, and a constant.

    Attributes:
        terms_of: how often each entry.
        constant: what is added.
    """

    def __init__(self, terms_of: dict[tuple[Counts, int], int], constant: int) -> None:
        self.terms_of = {entry: n for entry, n in terms_of.items() if n}
        self.constant = constant

    @property
    def terms(self) -> Terms:
        """The sum without the constant, as a key."""
        return frozenset(self.terms_of.items())

    @property
    def key(self) -> tuple[Terms, int]:
        """What it is the sum of."""
        return self.terms, self.constant

    def resolved(self) -> CountNode:
        """The same number as a sum of the entries by which it was known first."""
        for counts, _ in self.terms_of:
            if self.terms in counts.equal:
                found = counts.equal[self.terms]
                return found.add(found.wrap_int(self.constant)).resolved()
        return self

    def is_the_same_as(self, other: CountNode) -> None:
        """It is ``other``, another sum, as has been asserted."""
        exact = other.exact()
        if exact is not None:
            self.learn(exact, exactly=True)
            return
        own, other = self.resolved(), other.resolved()
        if own.same(other) is None:
            rest = other.sub(own.wrap_int(own.constant))
            for counts in {counts for counts, _ in own.terms_of}:
                counts.equal[own.terms] = rest

    def _known(self, of: Callable[[Counts], dict[Terms, int]]) -> int | None:
        """The sum, by what is known of it, of a part of it, or of its entries."""
        if not self.terms_of:
            return self.constant
        common = math.gcd(*self.terms_of.values())
        one = frozenset((entry, n // common) for entry, n in self.terms_of.items())
        for counts, _ in self.terms_of:
            if one in of(counts):
                return of(counts)[one] * common + self.constant
        return None

    def exact(self) -> int | None:
        """The number, if it is known."""
        return self.resolved()._known(lambda counts: counts.exact)

    def most(self) -> int | None:
        """What it is at most, if that is known."""
        found = self.exact()
        if found is not None:
            return found
        resolved = self.resolved()
        known = [n._known(lambda counts: counts.most) for n in (self, resolved)]
        if any(n is not None for n in known):
            return min(n for n in known if n is not None)
        total = self.constant
        for (counts, i), n in self.terms_of.items():
            one: Terms = frozenset({((counts, i), 1)})
            own = counts.exact.get(one, counts.most.get(one))
            if n < 0:
                continue  # at most what it would be without
            if own is None:
                return None
            total += own * n
        return total

    def learn(self, value: int, exactly: bool) -> None:
        """It is ``value``, or at most so much."""
        if not self.terms_of:
            return
        common = math.gcd(*self.terms_of.values())
        one = frozenset((entry, n // common) for entry, n in self.terms_of.items())
        value = (value - self.constant) // common
        for counts in {counts for counts, _ in self.terms_of}:
            known = counts.exact if exactly else counts.most
            known[one] = value if exactly else min(value, known.get(one, value))

    @property
    def guess(self) -> int:
        """Some number that it might be."""
        found = self.most()
        if found is not None:
            return found
        return self.constant + _SOME * sum(self.terms_of.values())

    def same(self, other: Any) -> bool | None:
        """Whether it is the same number; None where that depends on values."""
        known = self.resolved().sub(other.resolved()).exact()
        return None if known is None else known == 0

    # --- what torch asks of a node --------------------------------------------------------------

    def is_int(self) -> bool:
        return True

    def maybe_as_int(self) -> int | None:
        return self.exact()

    def str(self) -> builtins.str:
        """For messages."""
        texts = ["n" if n == 1 else f"{n} * n" for n in self.terms_of.values()]
        constant = [repr(self.constant)] if self.constant or not texts else []
        return f"<{' + '.join([*texts, *constant])}>"

    def _graph_repr(self) -> builtins.str:
        """How Python shows it: as what each device has; in a step, where it has no digits, only
        where nobody but people read it."""
        if trace() is None:
            return executor().shown(self)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == "torch":
            frame = frame.f_back
        if not only_shown(frame):
            refuse(self, "The text")
        return self.str()

    def wrap_int(self, number: int) -> CountNode:
        return CountNode({}, int(number))

    def wrap_bool(self, value: bool) -> Comparison:
        return Comparison(self, "", value, value)

    def clone(self) -> CountNode:
        return self

    def guard_int(self, file: builtins.str, line: int) -> int:
        found = self.exact()
        return refuse(self, "The value") if found is None else found

    def int_(self) -> int:
        return self.guard_int("", 0)

    def bool_(self) -> bool:
        return bool(self.ne(self.wrap_int(0)).bool_())

    def guard_bool(self, file: builtins.str, line: int) -> bool:
        return self.bool_()

    def expect_size(self, file: builtins.str, line: int) -> bool:
        return True

    def add(self, other: Any) -> CountNode:
        return self._combined(other, 1)

    def sub(self, other: Any) -> CountNode:
        return self._combined(other, -1)

    def neg(self) -> CountNode:
        return self.mul(self.wrap_int(-1))

    def pos(self) -> CountNode:
        return self

    def _combined(self, other: Any, sign: int) -> CountNode:
        if not isinstance(other, CountNode):
            refuse(self, f"A sum with {other!r}")
        terms = dict(self.terms_of)
        for entry, n in other.terms_of.items():
            terms[entry] = terms.get(entry, 0) + sign * n
        return CountNode(terms, self.constant + sign * other.constant)

    def mul(self, other: Any) -> CountNode:
        for one, by in ((self, other), (other, self)):
            known = by.exact()
            if known is not None:
                terms = {entry: n * known for entry, n in one.terms_of.items()}
                return CountNode(terms, one.constant * known)
        return refuse(self, "A product")

    def floordiv(self, other: Any) -> CountNode:
        by = other.exact()
        parts = (*self.terms_of.values(), self.constant)
        if by and all(n % by == 0 for n in parts):
            terms = {entry: n // by for entry, n in self.terms_of.items()}
            return CountNode(terms, self.constant // by)
        if self.terms_of == other.terms_of and not self.constant and not other.constant:
            return self.wrap_int(1)
        return refuse(self, "A quotient")

    int_floordiv = floordiv

    def mod(self, other: Any) -> CountNode:
        by = other.exact()
        parts = (*self.terms_of.values(), self.constant)
        if by and all(n % by == 0 for n in parts):
            return self.wrap_int(0)
        return refuse(self, "A remainder")

    def sym_max(self, other: Any) -> CountNode:
        for one, by in ((self, other), (other, self)):
            known = by.exact()
            if known is not None and known <= 1:
                return one  # torch's strides of what may be empty
        return self if self.same(other) else refuse(self, "The larger")

    def sym_min(self, other: Any) -> CountNode:
        return self if self.same(other) else refuse(self, "The smaller")

    def _compare(
        self, other: Any, symbol: builtins.str, holds: Callable[[Any, Any], bool]
    ) -> Comparison:
        difference = self.resolved().sub(other.resolved()).exact()
        known = None if difference is None else holds(difference, 0)
        return Comparison(
            self, f"{symbol} {other.str()}", known, holds(self.guess, other.guess), (symbol, other)
        )

    def eq(self, other: Any) -> Comparison:
        return self._compare(other, "==", operator.eq)

    def ne(self, other: Any) -> Comparison:
        return self._compare(other, "!=", operator.ne)

    def lt(self, other: Any) -> Comparison:
        return self._compare(other, "<", operator.lt)

    def le(self, other: Any) -> Comparison:
        return self._compare(other, "<=", operator.le)

    def gt(self, other: Any) -> Comparison:
        return self._compare(other, ">", operator.gt)

    def ge(self, other: Any) -> Comparison:
        return self._compare(other, ">=", operator.ge)


def _refused(name: str) -> Any:
    def method(self: CountNode, *args: Any) -> NoReturn:
        refuse(self, f"{name}()")

    return method


# What Python may compute of an int else.
for _name in (
    *("truediv", "int_truediv", "float_truediv", "pow", "float_pow", "pow_by_natural", "sym_float"),
    *("lshift", "rshift", "bitwise_and", "bitwise_or", "bitwise_xor", "is_integer", "abs", "round"),
    *("ceil", "floor", "trunc", "sym_sum", "guard_float"),
):
    setattr(CountNode, _name, _refused(_name))
