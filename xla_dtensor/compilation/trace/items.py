"""Items of what a step computes (``loss.item()``): numbers that are known when it has run."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.base.jax_private import convert_element_type
from xla_dtensor.base.numbers.pending_number import PendingNode
from xla_dtensor.base.numbers.python_numbers import is_pending
from xla_dtensor.base.numbers.traced_number import NumberNode
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.read import logical_value


class PutOff:
    """What a trace has printed, which waits until it is known that it isn't made again."""

    _of_failed: PutOff | None = None

    def __init__(self) -> None:
        self._shows: list[Callable[[], None]] = []
        self.append = self._shows.append

    def show(self) -> None:
        """Print it, once."""
        shows = self._shows[:]
        self._shows.clear()
        for show in shows:
            show()

    def fail(self) -> None:
        """The trace has failed."""
        PutOff._of_failed = self

    @staticmethod
    def begin() -> None:
        """Traces are going to be made, and none has failed."""
        PutOff._of_failed = None

    @staticmethod
    def show_failed() -> None:
        """Print what the trace has printed that has failed last: its error is going to be raised,
        which wants to be understood."""
        if PutOff._of_failed is not None:
            PutOff._of_failed.show()

    @staticmethod
    @contextlib.contextmanager
    def shown_if_failed() -> Iterator[None]:
        """A block whose errors come with what the trace that has failed in it has printed."""
        PutOff.begin()
        try:
            yield
        except Exception:
            PutOff.show_failed()
            raise


class TracedItems:
    """The items of one trace.

    Args:
        refuse: raises: something can't be done, and the way out.

    Attributes:
        given: how many items traces have given, in all.
        types_matter: whether the step's code may find that such a number is no ``float``.
        arrays: by number the value of the tensor when its item was asked for, and its form.
        to_check: numbers that a tensor has met, and that Python may raise for (``1 / loss.item()``)
            where the devices don't: each call computes them on the host as well.
        printed: what is printed and logged of them: by what, with which values.
        prints: what else the user's code has printed and logged.
    """

    given = 0

    def __init__(self, refuse: Callable[[str, str], NoReturn]) -> None:
        self._refuse = refuse
        self.types_matter = False
        self.arrays: list[tuple[Any, Form]] = []
        self.to_check: list[PendingNode] = []
        self.printed: list[tuple[Callable[..., Any], list[Any]]] = []
        self.prints = PutOff()

    def refuse(self, what: str) -> NoReturn:
        self._refuse(what, _WAY)

    def show(self, show: Callable[..., Any], values: list[Any]) -> None:
        self.printed.append((show, values))

    def refuse_left(self, numbers: list[weakref.ref[Any]]) -> None:
        """Refuse that one is still there when the trace is over, somewhere unknown."""
        left: Iterator[Any] = (number() for number in numbers)
        node = next((number.node for number in left if is_pending(number)), None)
        if node is not None:
            raise DataDependentError(
                f"the step leaves {node.text}, a number that is known when it has run, where "
                "compiled steps don't look (a queue, a logger's memory, another library's object): "
                "return it from the step and put it there outside"
            )

    def may_raise(self, node: PendingNode) -> None:
        self.to_check.append(node)

    def forget(self) -> None:
        """Keep alive nothing of the trace."""
        self.arrays, self.to_check, self.printed = [], [], []

    @staticmethod
    def is_number(tensor: Any) -> bool:
        """Whether the item of a tensor is a float or an int, one for all devices. (A bool decides
        something.)"""
        dtype = tensor.dtype
        return not (dtype is torch.bool or dtype.is_complex or tensor._form.varying)

    def of(self, tensor: Any) -> Any:
        """The item of a tensor of one element, as a symbolic number."""
        array, form = logical_value(tensor), tensor._form.reduced()
        index = len(self.arrays)
        TracedItems.given += 1
        self.arrays.append((array, form))
        floating = tensor.dtype.is_floating_point

        def on_devices(node: NumberNode) -> Any:
            wide = array.reshape(()).astype(jnp.float64 if floating else jnp.int64)
            with jax.enable_x64(True):
                return convert_element_type(wide, weak_type=True)

        node = PendingNode(
            float if floating else int,
            operator.itemgetter(-1 - index),
            f".item() ({index + 1})" if index else ".item()",
            self,
            frozenset({index}),
            on_devices,
        )
        return torch.SymFloat(node) if floating else torch.SymInt(node)


_WAY = (
    "What .item() gives of a value that the step computes is known when the step has run: until "
    "then it may be computed with, returned and kept (self.total += loss.item(), "
    "losses.append(loss.item())), printed and logged (in an f-string). Where Python needs it at "
    "once (if, float(), int(), its text, NumPy), keep the value on the devices (torch.where, a "
    "tensor in place of a number), return it from the step and look at it there, or move this line "
    "out of the compiled function"
)
