"""Several operations as one launch.

Inside `batched()` an operation isn't executed: its plan is written down, and its results are
`Pending` values in their storages. When the block ends, or somebody looks at one of the values, all
that was written down runs as one executable. The next batch of the same plans, wired in the same
way, finds that executable again; numbers are its inputs.

An optimizer's step is such a block (`integration/optimizers.py`): its Python runs as ever, and
costs one launch.

A launch that fails leaves every tensor as it was before what was to be launched: the batch keeps
what its writes replace until the new values are there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xla_dtensor import rules
from xla_dtensor.base import interrupts, thread_state
from xla_dtensor.base.cache import Cache
from xla_dtensor.dispatch.call import Call, Slot
from xla_dtensor.dispatch.plan import Plan
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.read import read
from xla_dtensor.forms.storage import Pending, Storage
from xla_dtensor.lowering import changes as lowering_changes
from xla_dtensor.mesh import Frame
from xla_dtensor.tensors.base import TensorMethods

# An operand is one integer, index * _KINDS + kind.
_ARRAY = 0  # from outside
_VALUE = 1  # computed by the batch
_NUMBER = 2  # a Python number: an input of the program, like the arrays
_KINDS = 3

# A plan, its operands, and the operands that are bases of views it writes to (None: no view).
_Entry = tuple[Plan, tuple[int, ...], tuple[int | None, ...]]

_executables: Cache[Any, Any] = Cache("batches", 256)
lowering_changes.listen(_executables.clear)
rules.changes.listen(_executables.clear)


# One for all batches, not one for each: of two threads, each in a batch and reading what the other
# has written down, neither would ever go on.
lock = threading.RLock()


class writing_down:
    """Write this thread's operations on xla tensors down in ``batch``, for a block. Inside another
    batch, or in a trace, the block is part of that."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._joined = False

    @interrupts.atomic
    def __enter__(self) -> None:
        self._joined = thread_state.batch() is not None or thread_state.current() is not None
        if not self._joined:
            thread_state.set_batch(self._batch)

    @interrupts.atomic
    def __exit__(self, *exc_info: object) -> None:
        if not self._joined:
            thread_state.set_batch(None)


class batched(writing_down):
    """Run this thread's operations on xla tensors, for a block, in as few launches as their values
    allow. If the block raises, what it has done until then is done."""

    def __init__(self) -> None:
        super().__init__(Batch())

    @interrupts.atomic
    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        if not self._joined:
            self._batch.run()


class Batch:
    """Operations that are written down; `thread_state.batch()` is the one of this thread.

    Other threads may read a value that is written down here, which runs the batch; `lock` is held
    while it changes.

    Args:
        all_or_nothing: ``undo()`` takes everything back, also what has been launched, until
            ``finish()``; and so does a launch that fails, after which the batch is of no use.
    """

    def __init__(self, all_or_nothing: bool = False) -> None:
        self._all_or_nothing = all_or_nothing
        self._error: BaseException | None = None
        # Per storage written (by id) what it was: a weak reference to it, its value, its form.
        self._replaced: dict[int, tuple[weakref.ref[Storage], Any, Form]] = {}
        self._start()

    def _start(self) -> None:
        self._entries: list[_Entry] = []
        self._arrays: list[Any] = []
        self._array_indices: dict[int, int] = {}
        self._numbers: list[Any] = []
        self._pending: list[Pending] = []
        self._frame: Frame | None = None

    def add(self, plan: Plan, call: Call) -> list[Pending]:
        """Write a call down: what its results and its writes will be. The caller holds `lock` until
        they are in their storages; a batch that ran before would not know who waits for them."""
        self._check()
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

    def replaces(self, storage: Storage) -> None:
        """A storage is about to get a value that this batch computes."""
        value = storage.value
        if value.__class__ is Pending:
            if value.batch is self:
                return  # made by this batch, or known already
            value = storage.array  # another batch's: it would not know the storage any more
        known = self._replaced.get(id(storage))
        if known is None or known[0]() is not storage:  # another one had the same address
            self._replaced[id(storage)] = weakref.ref(storage), value, storage.form

    @interrupts.atomic
    def run(self) -> None:
        """Execute what is written down, and give the storages that still wait their values.

        If that fails, every storage that was written has its earlier value again.
        """
        with lock:
            self._check()
            try:
                waiting, results = self._launch()
            except BaseException as error:
                self._put_back(error)
                raise
            for (storage, _, form), array in zip(waiting, results, strict=True):
                storage.array = array
                storage.reform(form)
            self._start()
            if not self._all_or_nothing:
                self._replaced.clear()

    def _launch(self) -> tuple[list[tuple[Storage, int, Form]], list[Any]]:
        entries = self._entries
        waiting = []
        for value in self._pending:
            storage = value.storage()
            if storage is not None and storage.value is value:
                # Per-device results live on all devices of the program.
                waiting.append((storage, value.index, storage.form.placed(self._frame)))
        if not waiting:
            return [], []
        outputs = tuple((index, form) for _, index, form in waiting)
        key = (tuple(entries), outputs)
        executable = _executables.get(key)
        if executable is None:
            executable = _executables.put(key, _executable(entries, outputs))
        with jax.enable_x64(True):
            return waiting, executable(self._arrays, self._numbers)

    @interrupts.atomic
    def finish(self) -> None:
        """Run what is left, and keep what was done."""
        self.run()
        self._replaced.clear()

    @interrupts.atomic
    def undo(self, error: BaseException) -> None:
        """Take back what was written down, and launched; ``error`` is why."""
        with lock:
            self._put_back(error)

    def _put_back(self, error: BaseException) -> None:
        for reference, value, form in self._replaced.values():
            storage = reference()
            if storage is None:
                continue
            # What was overwritten since by something else is not ours to take back.
            present = storage.value
            if self._all_or_nothing or (present.__class__ is Pending and present.batch is self):
                storage.put_back(value, form)
        for pending in self._pending:  # what the batch has made has no earlier value
            pending.error = error
        self._replaced.clear()
        self._start()
        if self._all_or_nothing:
            self._error = error

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(
                "these operations belong to an optimizer's step that has failed, and all of it was "
                f"taken back ({type(self._error).__name__}: {self._error})"
            ) from self._error


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
