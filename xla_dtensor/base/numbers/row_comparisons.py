"""Comparisons of numbers of rows that are values on the devices, and what such numbers refuse."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from xla_dtensor.base.numbers.symbolic_node import SymbolicNode
from xla_dtensor.base.source_line import user_line
from xla_dtensor.errors import DataDependentError


class CountExecutor(Protocol):
    """Who computes with such numbers (`xla_dtensor.ragged.operations`)."""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], /) -> Any:
        """Execute an overload that is given some."""

    def stays(self, tensor: Any, /) -> bool:
        """Whether a copy of a tensor to the host gives numbers like these."""

    def on_host(self, tensor: Any, /) -> Any:
        """That copy."""

    def shown(self, number: Any, /) -> str:
        """What each device has, as a text."""

    def check_most(self, number: Any, most: int, /) -> None:
        """Assert on the devices that a number is at most so much."""


_executor: list[Any] = []


def let(executor: Any) -> None:
    """``executor``, a module, computes with such numbers."""
    _executor[:] = [executor]


def executor() -> CountExecutor:
    """It."""
    return _executor[0]


def refuse(node: Any, what: str) -> NoReturn:
    """Raise: ``what`` of a number isn't known to Python."""
    raise DataDependentError(
        f"{what} of {node.str()}, a number of rows that is a value on the devices (of "
        f"tolist()), and may be another one on each{user_line()}\nSuch numbers can be added up, "
        "and be sizes: of all_to_all_single, split, narrow, repeat_interleave(output_size=), "
        "new_empty, view. Compute with a tensor instead (counts, torch.where), or in buffers of "
        "one size (xd.row_exchange)"
    )


class Comparison(SymbolicNode):
    """The node of a ``torch.SymBool``: a comparison of such numbers.

    torch's C++, which only chooses between ways to compute the same, is told what holds of the
    hints; Python, whatever it would do by it, nothing that isn't known.
    """

    def __init__(
        self,
        of: Any,
        text: builtins.str,
        known: bool | None,
        by_hint: bool,
        what: tuple[builtins.str, Any] | None = None,
    ) -> None:
        self.of, self.text, self.known, self.by_hint, self.what = of, text, known, by_hint, what

    def is_bool(self) -> bool:
        return True

    def maybe_as_bool(self) -> bool | None:
        return self.known

    def clone(self) -> Comparison:
        return self

    def wrap_bool(self, value: bool) -> Comparison:
        return Comparison(self.of, "", value, value)

    def str(self) -> builtins.str:
        return f"{self.of.str()} {self.text}"

    _graph_repr = str

    def bool_(self) -> bool:
        if self.known is None:
            refuse(self.of, f"Whether it is {self.text}, is asked")
        return self.known

    def guard_bool(self, file: builtins.str, line: int) -> bool:
        return self.by_hint if self.known is None else self.known

    guard_size_oblivious = guard_or_false = guard_or_true = guard_bool

    def statically_known_true(self, file: builtins.str, line: int) -> bool:
        return bool(self.known)

    def expect_true(self, file: builtins.str, line: int) -> bool:
        """``torch._check(n <= 64)`` says what a number is at most."""
        if self.known is None and self.what is not None:
            symbol, other = self.what
            bound = other.exact()
            if bound is not None and symbol in ("<=", "<"):
                self.of.learn(bound - (symbol == "<"), exactly=False)
                executor().check_most(self.of, bound - (symbol == "<"))
        return self.known is not False

    def sym_not(self) -> Comparison:
        known = None if self.known is None else not self.known
        return Comparison(self.of, f"not {self.text}", known, not self.by_hint)

    def _with(self, other: Any, combine: Callable[[bool, bool], bool]) -> Comparison:
        known = None
        for value in (True, False):  # known where one side alone decides
            if self.known is not None and combine(self.known, value) == combine(
                self.known, not value
            ):
                known = combine(self.known, value)
        if self.known is not None and other.known is not None:
            known = combine(self.known, other.known)
        by_hint = combine(self.by_hint, other.by_hint)
        return Comparison(self.of, f"{self.text}, {other.text}", known, by_hint)

    def sym_and(self, other: Any) -> Comparison:
        return self._with(other, operator.and_)

    def sym_or(self, other: Any) -> Comparison:
        return self._with(other, operator.or_)

    and_, or_ = sym_and, sym_or
