"""Several operations as one launch.

Inside `batched()` an operation isn't executed: its plan is written down, and its results are
`Pending` values in their storages. When the block ends, or somebody looks at one of the values, all
that was written down runs as one executable. The next batch of the same plans, wired in the same
way, finds that executable again; numbers are its inputs.

An optimizer's step is such a block (`integration/optimizers.py`): its Python runs as ever, and
costs one launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from xla_dtensor import _context, rules
from xla_dtensor._common import TensorMethods
from xla_dtensor.base.cache import Cache
from xla_dtensor.dispatch._call import Call, Slot
from xla_dtensor.dispatch._plan import Plan
from xla_dtensor.dispatch._read import read
from xla_dtensor.form import Form
from xla_dtensor.lowering import on_change
from xla_dtensor.mesh import Frame
from xla_dtensor.storage import Pending, Storage
from xla_dtensor.transfer import to_numpy

# An operand is one integer, index * _KINDS + kind.
_ARRAY = 0  # from outside
_VALUE = 1  # computed by the batch
_NUMBER = 2  # a Python number: an input of the program, like the arrays
_KINDS = 3

# A plan, its operands, and the operands that are bases of views it writes to (None: no view).
_Entry = tuple[Plan, tuple[int, ...], tuple[int | None, ...]]

_executables: Cache[Any, Any] = Cache("batches", 256)
on_change(_executables.clear)
rules.on_change(_executables.clear)


@contextlib.contextmanager
def batched() -> Iterator[None]:
    """Run this thread's operations on xla tensors in as few launches as their values allow."""
    if _context.batch() is not None or _context.current() is not None:
        yield
        return
    batch = Batch()
    _context.set_batch(batch)
    try:
        yield
    finally:
        _context.set_batch(None)
        batch.run()


class Batch:
    """Operations that are written down; `_context.batch()` is the one of this thread."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._entries: list[_Entry] = []
        self._arrays: list[Any] = []
        self._array_indices: dict[int, int] = {}
        self._numbers: list[Any] = []
        self._pending: list[Pending] = []
        self._frame: Frame | None = None

    def add(self, plan: Plan, call: Call) -> list[Pending]:
        """Write a call down: what its results and its writes will be."""
        operands = [
            leaf if form.__class__ is not Form else _source(leaf)
            for leaf, form in zip(call.leaves, call.forms, strict=True)
        ]
        written = [call.leaves[i] for i in plan.mutated]
        frame = _frame_of(plan)
        if frame is not None:
            if self._frame is not None and self._frame.device_ids != frame.device_ids:
                self.run()  # one program runs on one set of devices
            self._frame = frame
        # From here on nothing runs the batch, so that the operands stay what they are.
        leaves = self._operands(operands, _number_lists(call))
        bases = tuple(self._operand(t._storage_) if t._steps else None for t in written)
        self._entries.append((plan, leaves, bases))
        first = len(self._pending)
        count = sum(form is not None for form in plan.result_forms) + len(plan.base_forms)
        results = [Pending(self, first + i) for i in range(count)]
        self._pending += results
        return results

    def _operands(self, sources: list[Any], number_lists: dict[int, int]) -> tuple[int, ...]:
        """Equal numbers of one list are one input: 200 parameters that have taken the same number
        of steps have one step size."""
        codes = []
        known: dict[Any, int] = {}
        for position, source in enumerate(sources):
            number_list = number_lists.get(position)
            if number_list is None:
                codes.append(self._operand(source))
                continue
            which = (number_list, repr(source))  # 0.0 and -0.0 are equal, but not the same
            if which not in known:
                known[which] = self._operand(source)
            codes.append(known[which])
        return tuple(codes)

    def _operand(self, source: Any) -> int:
        if source.__class__ is Storage:
            value = source.value
            if value.__class__ is Pending and value.batch is self:
                return value.index * _KINDS + _VALUE
            source = source.array
        elif isinstance(source, int | float | complex):
            self._numbers.append(source)
            return (len(self._numbers) - 1) * _KINDS + _NUMBER
        index = self._array_indices.setdefault(id(source), len(self._arrays))
        if index == len(self._arrays):
            self._arrays.append(source)
        return index * _KINDS + _ARRAY

    def run(self) -> None:
        """Execute what is written down, and give the storages that still wait their values."""
        entries, arrays, numbers = self._entries, self._arrays, self._numbers
        pending, frame = self._pending, self._frame
        self._start()
        waiting = []
        for value in pending:
            storage = value.storage()
            if storage is not None and storage.value is value:
                # Per-device results live on all devices of the program.
                waiting.append((storage, value.index, storage.form.placed(frame)))
        if not waiting:
            return
        outputs = tuple((index, form) for _, index, form in waiting)
        key = (tuple(entries), outputs)
        executable = _executables.get(key)
        if executable is None:
            executable = _executables.put(key, _executable(entries, outputs))
        with jax.enable_x64(True):
            results = executable(arrays, numbers)
        for (storage, _, form), array in zip(waiting, results, strict=True):
            storage.array, storage.form = array, form


def _source(leaf: Any) -> Any:
    """Where a tensor's value comes from: its storage, or for a view and a CPU tensor an array."""
    if not isinstance(leaf, TensorMethods):
        return to_numpy(leaf)
    return read(leaf) if leaf._steps else leaf._storage_


def _number_lists(call: Call) -> dict[int, int]:
    """Per leaf that is a number of a list, which list."""
    result: dict[int, int] = {}
    for which, argument in enumerate((*call.args, *call.kwargs.values())):
        if (
            argument.__class__ is list
            and argument
            and argument[0].__class__ is Slot
            and call.forms[argument[0].index].__class__ is not Form
        ):
            result.update((slot.index, which) for slot in argument)
    return result


def _frame_of(plan: Plan) -> Frame | None:
    for form in (*plan.result_forms, *plan.base_forms):
        if form is not None and form.frame is not None:
            return form.frame
    return None


def _executable(
    entries: list[_Entry], outputs: tuple[tuple[int, Form], ...]
) -> Callable[[list[Any], list[Any]], list[Any]]:
    def batch(arrays: list[Any], numbers: list[Any]) -> list[Any]:
        values: list[Any] = []
        sources = {_ARRAY: arrays, _VALUE: values, _NUMBER: numbers}

        def operand(code: int | None) -> Any:
            if code is None:
                return None
            index, kind = divmod(code, _KINDS)
            return sources[kind][index]

        for plan, leaves, bases in entries:
            # Within the program values are logical; padding comes with the outputs.
            values += plan.run(None, list(map(operand, leaves)), list(map(operand, bases)), False)
        results = []
        known = {id(array) for array in arrays}
        for index, form in outputs:
            value = form.physical(values[index])
            # Two storages never share a buffer: writes to one donate it in compiled steps.
            results.append(jnp.copy(value) if id(value) in known else value)
            known.add(id(value))
        return results

    shardings = [form.sharding for _, form in outputs]
    if any(sharding is not None for sharding in shardings):
        return jax.jit(batch, out_shardings=shardings)
    return jax.jit(batch)
