"""Checks of argument values that torch makes and XLA doesn't: indices in range, divisors not zero.

Which values an operation takes is said beside its lowering (`lowering/bounds.py`).

Eagerly on the host, before anything is computed: up to `AWAITED` elements in any case, up to
`ON_HOST` where they have been computed already (they mostly came from the host). Of others a device
computes the least and the greatest, and what is wrong is raised when a value is read next: an
operation doesn't wait for large ones. In a compiled step they are two numbers among its outputs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.base import assertions, executor
from xla_dtensor.base.numbers.python_numbers import is_number
from xla_dtensor.base.source_line import here, user_line
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.read import logical_value, read
from xla_dtensor.forms.storage import Pending
from xla_dtensor.lowering.bounds import Condition
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.of_form import is_ours

# What looking costs is in docs/design.md, "What must hold of values".
AWAITED, ON_HOST = 2**10, 2**16

_summaries: Cache[tuple[Form, Condition], Any] = Cache("summaries of indices", 512)


Look = Callable[[Any, Form, Condition], Any]


class Checked:
    """An argument whose values a plan's calls check, and the array that last passed.

    Attributes:
        leaf: its number among the call's leaves.
        form: its form; of a number its type.
        condition: what must hold.
        text: the operation and the shapes, for the end of a message.
        size: how many elements it has.
        cut: of an array of it the tensor's own elements; None for all of them.
        last: the storage's array of which it was last seen to hold, by a weak reference: positions
            and targets are often the same ones again.
        view: that array's form, and the steps of the view of it that was looked at.
    """

    __slots__ = ("condition", "cut", "form", "last", "leaf", "size", "text", "view")

    def __init__(self, leaf: int, form: Any, condition: Condition, text: str) -> None:
        self.leaf, self.form, self.condition, self.text = leaf, form, condition, text
        self.size = math.prod(form.shape) if isinstance(form, Form) else 1
        padded = isinstance(form, Form) and form.padded_shape != form.shape
        self.cut: Any = (..., *(slice(0, n) for n in form.shape)) if padded else None
        self.last: Callable[[], Any] = _nothing
        self.view: Any = None


def _nothing() -> None:
    return None


def check(checked: tuple[Checked, ...], call: Any, look: Look | None = None) -> None:
    """Check the argument values of an eager call, now or when a value is read next.

    Args:
        look: has the summary of a tensor computed that is still to be computed itself.

    Raises:
        Exception: torch's, if something of few enough elements doesn't hold.
    """
    for one in checked:
        leaf = call.leaves[one.leaf]
        base: Any = None
        if not is_ours(leaf):
            values: Any = to_numpy(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
        elif look is not None and one.size > AWAITED and _waits(leaf):
            assertions.later(look(leaf, one.form, one.condition), (_Judge(one, here()),))
            continue
        else:
            base, view = leaf._storage_.array, (leaf._storage_.form, leaf._steps)
            if base is one.last() and view == one.view:
                continue
            array = read(leaf)
            if not arrays.is_here(array):
                # Not `is_ready`, which differs between processes: all have to do the same.
                _look_later(one, leaf)
                continue
            if one.size > AWAITED and (one.size > ON_HOST or not array.is_ready()):
                _look_later(one, leaf)
                continue
            values = arrays.get(logical_value(leaf) if one.form.unreduced else array)
            if one.cut is not None and not one.form.unreduced:
                values = values[one.cut]
        raise_if_wrong(one.condition, values, one.text)
        if base is not None:
            one.last, one.view = weakref.ref(base), view


def raise_if_wrong(condition: Condition, values: np.ndarray, text: str) -> None:
    error = _judged(condition, condition.summary(np, values), text)
    if error is not None:
        raise error


def _judged(condition: Condition, summary: tuple[Any, ...], text: str) -> Exception | None:
    """What to raise for this summary, with the operation in its message."""
    error = condition.judge(*summary)
    return None if error is None else type(error)(f"{error}{text}")


def _waits(tensor: Any) -> bool:
    return tensor._storage_.value.__class__ is Pending


def _look_later(one: Checked, leaf: Any) -> None:
    form, condition = one.form, one.condition

    def of_array(array: Any) -> Any:
        return summary(condition, logical(array, form))

    def make() -> Any:
        return jax.jit(
            of_array, out_shardings=None if form.frame is None else form.frame.replicated
        )

    with jax.enable_x64(True):
        numbers = _summaries.get_or_make((form, condition), make)(read(leaf))
    assertions.later(numbers, (_Judge(one, here()),))


def summary(condition: Condition, values: Any) -> Any:
    """The two integers by which ``condition`` judges ``values``, as an array."""
    return jnp.stack([jnp.asarray(n, np.int64) for n in condition.summary(jnp, values)])


class _Judge:
    """Turns a summary into an exception that names the line of the call: it is raised later, where
    a value is read."""

    def __init__(self, one: Checked, line: Callable[[], str]) -> None:
        self._condition, self._text, self._line = one.condition, one.text, line

    def __call__(self, *summary: int) -> Exception | None:
        error = _judged(self._condition, summary, self._text)
        return None if error is None else type(error)(f"{error}{self._line()}")


def trace(checked: tuple[Checked, ...], call: Any, trace: Any) -> None:
    """Make the checks of a call outputs of the compiled step that is being traced."""
    for one in checked:
        leaf, form = call.leaves[one.leaf], one.form
        if isinstance(leaf, int) and not is_number(leaf):  # a symbolic one would become a constant
            check((one,), call)
        if trace.assertions is None or not isinstance(leaf, torch.Tensor):
            continue
        ours = is_ours(leaf)
        with jax.enable_x64(True):
            values = logical(read(leaf), form) if ours else trace.host_tensor(leaf)
            numbers = summary(one.condition, values)
        trace.assertions.append((numbers, _Judge(one, here())))


def assert_true(tensor: Any, message: str, kind: Callable[[str], Exception] = RuntimeError) -> None:
    """``torch._assert_async``: at once, or as an output of the step that is traced.

    Args:
        kind: makes the error of what doesn't hold.

    Raises:
        Exception: it doesn't hold.
        RuntimeError: it isn't of one element.
    """
    form: Form = tensor._form
    if math.prod(form.shape) != 1:
        what = "more than one value" if math.prod(form.shape) else "no values"
        raise RuntimeError(f"Boolean value of Tensor with {what} is ambiguous")
    current = executor.trace()

    def judge(holds: int, _: int) -> Exception | None:
        return None if holds else kind(f"{message}{line}")

    line = ""
    if current is None:
        assertions.judge(np.repeat((arrays.get(logical_value(tensor)) != 0).all(), 2), (judge,))
        return
    if current.asserted is None:
        current.refuse("torch._assert_async")
        return
    line = user_line()
    with jax.enable_x64(True):
        holds = (logical(read(tensor), form) != 0).all().astype(np.int64)
        current.asserted.append((jnp.stack([holds, holds]), judge))
