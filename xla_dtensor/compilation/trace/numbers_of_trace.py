"""All symbolic numbers of one trace: inputs, comparisons made with them, and step counts."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xla_dtensor.base import executor
from xla_dtensor.base.jax_private import convert_element_type
from xla_dtensor.base.numbers.traced_number import NumberNode, input_number, is_integer
from xla_dtensor.base.source_line import expression_here
from xla_dtensor.base.tables.keys import exact
from xla_dtensor.compilation.code.reflection import drop_from_cache, is_users_cache
from xla_dtensor.compilation.trace.numbers import Decision, Number
from xla_dtensor.forms.form import Form
from xla_dtensor.runtime import arrays


class NumberLeft(Exception):
    """A symbolic number is still there after the step: in an object that it returns, in a cache."""


class TraceNumbers:
    """The numbers of one trace.

    Attributes:
        inputs: those that are inputs of the program, in order.
        decisions: what the step's Python has decided by them.
    """

    def __init__(self) -> None:
        self.inputs: list[Number] = []
        self.decisions: list[Decision] = []
        # The scalars of numbers that Python has computed from the inputs, by their text.
        self._computed: dict[str, Any] = {}
        self._counters: dict[Any, Any] = {}
        self._counter_ids: set[int] = set()

    def as_input(
        self,
        read: Callable[[Any], float] | None,
        value: float,
        name: str,
        item: tuple[int, int] | None = None,
    ) -> Any:
        """The number that ``read`` gives of later calls, as an input of the program (a
        ``torch.SymFloat``, or ``SymInt`` of an int).

        Args:
            value: what it is in this call.
            item: in place of ``read`` (`Number.item`).
        """
        # Names are made unique, as the text of a decision is its identity.
        same = sum(number.name == name for number in self.inputs)
        text = name if not same else f"{name} ({same + 1})"
        index = len(self.inputs)
        weak = self._new_input(read, name, value, item=item)
        return input_number(value, weak, index, text, self._decided, self._fed)

    def _new_input(
        self,
        read: Any,
        name: str,
        value: float,
        compute: Callable[..., Any] | None = None,
        item: tuple[int, int] | None = None,
    ) -> Any:
        """A new number among the inputs: the weakly typed JAX scalar."""
        integer = is_integer(value)
        dtype = np.int64 if integer else np.float64
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            array = jax.device_put(dtype(value))
        self.inputs.append(Number(read, name, integer, array, compute, type(value), item))
        with jax.enable_x64(True):
            return convert_element_type(array, weak_type=True)

    def _fed(self, node: NumberNode) -> Any:
        """A number that Python has computed from others, as an input."""
        known = self._computed.get(node.text)
        if known is None:
            known = self._new_input(None, node.text, node.value, node.compute)
            self._computed[node.text] = known
        return known

    def _decided(self, node: NumberNode, what: str, outcome: Any) -> None:
        text, where = f"{node.text} {what} {outcome}", expression_here()
        if what == "is":
            self.decisions.append(Decision(node.compute, outcome, text, where))
            return
        compute = node.compute
        self.decisions.append(
            Decision(lambda numbers: exact(compute(numbers)), exact(outcome), text, where)
        )

    def counter(self, form: Form, value: Any, entry: Any = None) -> Any:
        """One array for all scalars that hold ``value``: step counts, of which each parameter has
        its own. They go into the program, and come out of it, as one.

        Args:
            form: of the scalars.
            value: what they hold.
            entry: the name in the optimizer's state, where it is known. ASGD's ``mu`` stays 1, and
                isn't one with the step count that happens to be 1.
        """
        key = form, repr(value), entry
        array = self._counters.get(key)
        if array is None:
            with executor.running_at_once(), jax.ensure_compile_time_eval(), jax.enable_x64(True):
                array = arrays.full((), value, form.jax_dtype, form.sharding)
            self._counters[key] = array
            self._counter_ids.add(id(array))
        return array

    def is_counter(self, array: Any) -> bool:
        """Whether several storages may hold ``array``."""
        return id(array) in self._counter_ids

    def forget(self) -> None:
        """Keep the arrays of counters alive no longer."""
        self._counters.clear()
        self._counter_ids.clear()


def end_numbers(numbers: list[weakref.ref[Any]]) -> None:
    """What is left of the numbers of a failed trace: their values, and nothing in caches, from
    which code outside of a step might get one."""
    left = [alive for alive in map(operator.call, numbers) if alive is not None]
    for number in left:
        number.node.end()
    if left:
        ids = set(map(id, left))
        for cache in filter(is_users_cache, gc.get_objects()):
            drop_from_cache(cache, ids)
