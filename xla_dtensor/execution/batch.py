"""`Batch`: an executor that records operations, and launches them as one XLA program.

On one device and outside of a block it launches several programs: `pieces.py`.

Inside `batched()` an operation isn't executed: its plan is written down, and its results are
`Pending` values in their storages. When the block ends, or somebody looks at one of the values, all
that was written down runs as one executable. The next batch of the same plans, wired in the same
way, finds that executable again; numbers are its inputs.

An optimizer's step is such a block (`integration/optimizers/optimizer_steps.py`): its Python runs
as ever, and costs one launch.

A launch that fails leaves every tensor as it was before what was to be launched: the batch keeps
what its writes replace until the new values are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from xla_dtensor import rules
from xla_dtensor.base import interrupts
from xla_dtensor.base.random import rng
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.execution.batch_program import (
    ARRAY,
    KINDS,
    NUMBERS,
    VALUE,
    Entry,
    Numbers,
    fused,
    look_at,
    view_read,
)
from xla_dtensor.execution.interfaces import Call, Plan
from xla_dtensor.execution.running import Running, launched
from xla_dtensor.forms.form import Form, device_form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.sharing import lock
from xla_dtensor.forms.storage import Pending, Storage
from xla_dtensor.forms.views import leave_open
from xla_dtensor.lowering import changes as lowering_changes
from xla_dtensor.lowering.bounds import Condition
from xla_dtensor.mesh import Frame
from xla_dtensor.tensors.of_form import new_tensor

executables: Cache[Any, Any] = Cache("batches", 256)
"""By the operations and their operands, and the values wanted."""
lowering_changes.listen(executables.clear)
rules.changes.listen(executables.clear)


_new: Any = tuple.__new__
Codes = tuple[int, ...]
Bases = tuple[tuple[int, Codes] | None, ...]


class WaitingStorage(NamedTuple):
    """A storage whose array a batch will compute, the value that it waits for, and its form."""

    storage: Storage
    pending: Pending
    form: Form

    def give(self, array: Any, form: Form) -> None:
        """Put the array into the storage, unless another thread has written to it since."""
        if self.storage.value is self.pending:
            self.storage.array = array
            self.storage.reform(form)


class Batch(Running):
    """The executor of a block of code: its operations wait, and are launched as one program.

    Other threads may read a value that is written down here, which runs the batch; `lock` is held
    while it changes.

    Args:
        all_or_nothing: ``undo()`` takes everything back, also what has been launched, until
            ``finish()``; and so does a launch that fails, after which the batch is of no use.
    """

    _takes_known = True  # whether a storage whose array is known is passed as that array

    def __init__(self, all_or_nothing: bool = False) -> None:
        self._all_or_nothing = all_or_nothing
        self._error: BaseException | None = None
        # Storages written, by id, to put back if the batch fails: (weak reference, value and form
        # before, the first of this batch's values that may be the storage's).
        self._replaced: dict[int, tuple[weakref.ref[Storage], Any, Form, int]] = {}
        self._start()

    def _start(self) -> None:
        self._entries: list[Entry] = []
        self._arrays: list[Any] = []
        self._array_indices: dict[int, int] = {}
        self._numbers = Numbers()
        self._values = 0  # computed by the entries
        self._latest = 0  # the first that the last entry computes
        self._pending: list[Pending] = []
        self._views: dict[Any, int] = {}  # operands of views, by the storage's version and steps
        # Of the random operations the generators' states; the one that the last is counted from.
        self._states: list[Any] = []
        self._stream: tuple[Any, int] | None = None
        self._frame: Frame | None = None

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def batch(self) -> Batch:
        return self

    def perform(self, plan: Plan, call: Call) -> Any:
        with lock:
            # Nothing to ask and nothing to write: what is done for most operations.
            if plan.only_form is not None:
                result = new_tensor(self.add(plan, call)[0], plan.only_form)
            elif plan.only_write is not None:
                written = call.leaves[plan.mutated[0]]
                written._storage_.write(self.add(plan, call)[0], plan.only_write)
                result = plan.structure([], [written])
            elif plan.only_computes:
                forms: Any = plan.result_forms
                result = plan.structure(list(map(new_tensor, self.add(plan, call), forms)), [])
            else:
                result = super().perform(plan, call)
            self.cut()
        return result

    def compute(self, plan: Plan, call: Call) -> Iterable[Any]:
        # Launch at once if a tensor gets other memory: that can't be put back if the batch fails.
        arrays: Iterable[Any] = launched(plan, call) if plan.grows else self.add(plan, call)
        return arrays

    def add(self, plan: Plan, call: Call) -> list[Pending]:
        """Write a call down: what its results and its writes will be. The caller holds `lock` until
        they are in their storages; a batch that ran before would not know who waits for them."""
        if self._error is not None:
            self._refuse()
        frame = plan.frame
        if frame is None or frame is not self._frame:
            self._make_room(frame, plan.result_forms)
            self._frame = frame or self._frame
        # From here on nothing runs the batch, so that the operands stay what they are.
        leaves = self._codes(call.leaves, plan.number_lists)
        bases: Bases = ()
        if plan.mutated:
            written = [call.leaves[i] for i in plan.mutated]
            bases = tuple([self._base(t) if t._steps else None for t in written])
        same = plan.same
        if not same.proven:
            self._prove(same, call, leaves, bases)
        state = self._state(call.stream) if plan.random else None
        # As `Entry(...)`, without the cost of a further call in Python.
        return self._write_down(_new(Entry, (same, leaves, bases, state)))

    def summary(self, tensor: Any, form: Form, condition: Condition) -> _Later:
        """Write down what tells whether ``condition`` holds of a tensor."""
        if self._error is not None:
            self._refuse()
        operation = look_at(form, condition)
        (pending,) = self._write_down(Entry(operation, (self._operand(tensor),)))
        return _Later(Storage(pending, _TWO))

    def cut(self) -> None:
        """Launch what is written down if it is time; all results are in their storages."""

    def _write_down(self, entry: Entry) -> list[Pending]:
        self._entries.append(entry)
        first = self._latest = self._values
        count = entry.operation.results
        if count == 1:
            results = [Pending(self, first, first * KINDS + VALUE)]
        else:
            results = [Pending(self, i, i * KINDS + VALUE) for i in range(first, first + count)]
        self._values = first + count
        self._pending += results
        return results

    def _codes(self, sources: list[Any], number_lists: dict[int, int]) -> tuple[int, ...]:
        """The operands for these leaves, as `_operand` gives them, which isn't called for tensors
        that are known already: nearly all. Equal numbers of one list are one input: 200
        parameters that have taken the same number of steps have one step size."""
        known = self._array_indices
        codes: list[int] = []
        numbers: dict[Any, int] = {}
        for source in sources:
            storage = getattr(source, "_storage_", None)
            if storage is None:
                number_list = number_lists.get(len(codes))
                if number_list is not None:
                    which = (number_list, repr(source))  # 0.0 and -0.0 are equal, but not the same
                    if which not in numbers:
                        numbers[which] = self._operand(source)
                    codes.append(numbers[which])
                    continue
            elif not source._steps and self._takes_known:
                value = storage.value
                if value.__class__ is Pending:
                    if value.batch is self:
                        codes.append(value.code)
                        continue
                else:
                    index = known.get(id(value))
                    codes.append(self._array(value) if index is None else index * KINDS + ARRAY)
                    continue
            codes.append(self._operand(source))
        return tuple(codes)

    def _operand(self, source: Any) -> int:
        """The operand that a tensor, a number or an array is."""
        storage = getattr(source, "_storage_", None)
        if storage is not None:
            if source._steps:
                return self._view(source)
            value = storage.value
            if value.__class__ is Pending:
                return value.code if value.batch is self else self._array(storage.array)
            index = self._array_indices.get(id(value))
            return self._array(value) if index is None else index * KINDS + ARRAY
        if type(source) in NUMBERS:
            return self._numbers.add(source)
        return self._array(to_numpy(source) if isinstance(source, torch.Tensor) else source)

    def _stored(self, storage: Storage) -> int:
        value = storage.value
        if value.__class__ is Pending:
            if value.batch is self:
                return value.code
            value = storage.array
        return self._array(value)

    def _array(self, array: Any) -> int:
        # `_arrays` keeps each array alive, so no other one gets its id.
        index = self._array_indices.get(id(array))
        if index is None:
            index = self._array_indices[id(array)] = len(self._arrays)
            self._arrays.append(array)
        return index * KINDS + ARRAY

    def _view(self, view: Any) -> int:
        """The value of a view, of an array or of what is written down."""
        storage, steps = view._storage_, view._steps
        # Versions are unique over all storages, so the version also identifies the storage.
        key = storage.version, steps
        known = self._views.get(key)
        if known is None:
            steps, positions = leave_open(steps)
            operation = view_read(storage.form, steps, view._form.at_start())
            operands: Codes = (self._stored(storage),)
            if positions:
                operands += tuple(map(self._operand, positions))
            known = self._views[key] = self._values * KINDS + VALUE
            self._write_down(Entry(operation, operands))
        return known

    def _base(self, view: Any) -> tuple[int, tuple[int, ...]]:
        positions = leave_open(view._steps)[1]
        return self._stored(view._storage_), tuple(map(self._operand, positions))

    def _state(self, stream: rng.RandomStream) -> tuple[int, int]:
        """The state of a random operation, as one before it and the operations since."""
        state = stream.take()
        self._states.append(state)
        if self._stream is not None:
            since = rng.operations_between(self._stream[0], state)
            if since is not None:
                return self._stream[1], since
        self._stream = state, self._array(state)
        return self._stream[1], 0

    def _make_room(self, frame: Frame | None, results: Sequence[Form | None]) -> None:
        """Launch what is written down if an operation can't join it in one program."""
        own = self._frame
        if frame is not None and own is not None and own.device_ids != frame.device_ids:
            self.run()  # one program runs on one set of devices

    def _prove(self, plan: Plan, call: Call, leaves: Codes, bases: Bases) -> None:
        """Raise what the operation's lowering would raise when it is traced."""

    def replaces(self, storage: Storage) -> None:
        """A storage is about to get a value that this batch computes."""
        value = storage.value
        if value.__class__ is Pending:
            if value.batch is self:
                return  # made by this batch, or known already
            value = storage.array  # another batch's: launch that, which won't see the storage later
        known = self._replaced.get(id(storage))
        # Unless the batch fails as a whole, the value before its latest write counts: others may
        # have written in between. An id may have been reused, so the reference is compared.
        if not self._all_or_nothing or known is None or known[0]() is not storage:
            self._replaced[id(storage)] = weakref.ref(storage), value, storage.form, self._latest

    @interrupts.atomic
    def run(self) -> None:
        """Execute what is written down, and give the storages that still wait their values.

        If that fails, every storage that was written has its earlier value again.
        """
        with lock:
            if self._error is not None:
                self._refuse()
            try:
                done = self._launch()
            except BaseException as error:
                self._put_back(error)
                raise
            for waiting, form, array in done:
                waiting.give(array, form)
            self._start()
            if not self._all_or_nothing:
                self._replaced.clear()

    def _waiting(self) -> list[WaitingStorage]:
        waiting = []
        for value in self._pending:
            storage = value.storage()
            if storage is not None and storage.value is value:
                # Per-device results live on all devices of the program.
                waiting.append(WaitingStorage(storage, value, storage.form.placed(self._frame)))
        return waiting

    def _launch(self) -> list[tuple[WaitingStorage, Form, Any]]:
        """Compute the values that storages wait for: with their forms and arrays."""
        waiting = self._waiting()
        if not waiting:
            return []
        key, outputs = self._key(waiting)
        executable = executables.get(key)
        if executable is None:
            executable = executables.put(key, fused(self._entries, outputs))
        return self._run(executable, waiting)

    def _run(
        self, executable: Any, waiting: list[WaitingStorage]
    ) -> list[tuple[WaitingStorage, Form, Any]]:
        with jax.enable_x64(True):
            # enable_x64 is thread-local, and without it JAX silently makes int64 inputs int32.
            arrays = executable(self._arrays, self._numbers.packed())
        return [(one, one.form, array) for one, array in zip(waiting, arrays, strict=True)]

    def _key(self, waiting: list[WaitingStorage]) -> Any:
        outputs = tuple((one.pending.index, one.form) for one in waiting)
        return (tuple(self._entries), outputs), outputs

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
        for reference, value, form, _ in self._replaced.values():
            storage = reference()
            if storage is None:
                continue
            # Don't put back what something else has overwritten since.
            present = storage.value
            if self._all_or_nothing or (present.__class__ is Pending and present.batch is self):
                storage.put_back(value, form)
        for pending in self._pending:  # the batch's own results have no earlier value
            pending.fail(error)
        self._replaced.clear()
        self._start()
        if self._all_or_nothing:
            self._error = error

    def _refuse(self) -> None:
        raise RuntimeError(
            "these operations belong to an optimizer's step that has failed, and all of it was "
            f"taken back ({type(self._error).__name__}: {self._error})"
        ) from self._error


_TWO = device_form(None, (2,), dtype=torch.int64)


class _Later:
    """Two integers, an array once somebody wants them."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.asarray(self._storage.array, *args, **kwargs)
