"""`Lazy`, the default executor: eager operations are recorded, and launched together.

They are launched when a value is read, at the end of a backward pass, or when there are enough of
them, or of the bytes they hold.

Each thread has a batch of its own. What a program does again and again should be one executable
that is found again, and a deep model's layers one that all of them share. So a batch ends where a
sequence of operations has come round: the rounds of a loop, the layers of a model, and of its
backward pass, each become a launch of the same program. Where that is depends on the operations
alone, not on time or memory, so that the next step cuts in the same places.

On a mesh a batch is one program, on one device several that other batches have, too (`pieces.py`).

A few operations run one by one until they have come in this order many times: their programs serve
wherever the same operations stand, and much eager code is written to be run once.

A launch that fails is done again one by one, so that the error names the operation and its line,
and what doesn't depend on it has its value.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xla_dtensor import rules
from xla_dtensor.base import assertions, events, executor, interrupts
from xla_dtensor.base.config import config
from xla_dtensor.base.random import rng
from xla_dtensor.base.source_line import here
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.execution import value_checks
from xla_dtensor.execution.batch import Bases, Batch, Codes, WaitingStorage, executables
from xla_dtensor.execution.batch_program import (
    ARRAY,
    KINDS,
    VALUE,
    BatchOperation,
    Conversion,
    Entry,
    Failure,
    fused,
    one_by_one,
)
from xla_dtensor.execution.interfaces import Call, Plan
from xla_dtensor.execution.pieces import Pieces, cut_batches, refuse_to_wait
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.sharing import lock, looked_at
from xla_dtensor.forms.storage import Pending
from xla_dtensor.lowering import changes as lowering_changes
from xla_dtensor.mesh import Frame
from xla_dtensor.runtime.kept import proofs
from xla_dtensor.tensors.of_form import new_tensor

# Where batches end decides how much is compiled and how often: what was measured is in
# docs/design.md, "Eager operations wait, and are launched together".
FEW = 12  # operations that aren't worth a program of their own until they come
OFTEN = 32  # times in the same order
ENOUGH = 64  # operations after which a batch ends where something has come round
MANY = 512  # likewise, if it leaves more than a few values behind, each of which costs
MOST = 2048  # operations in a batch
ALIKE = 16  # operations in a row that must have come before for it to be a round
LARGE = 2**14  # elements
HELD = 2**31  # bytes of inputs, which live until the batch is launched


_seen: Cache[Any, int] = Cache("batches run one by one", 1024)
lowering_changes.listen(_seen.clear)
rules.changes.listen(_seen.clear)


class Lazy(Batch):
    """The operations of a thread that have not been launched yet."""

    def __init__(self) -> None:
        super().__init__()
        with lock:
            _batches.add(self)

    def _start(self) -> None:
        super()._start()
        self._lines: list[Callable[[], str]] = []
        self._rounds = Rounds()
        self._alone: list[Any] = []  # all values, if the entries were run one by one
        self._is_large = False  # whether it has a large result on the default device
        self._held = 0  # bytes of the inputs

    def _write_down(self, entry: Entry) -> list[Pending]:
        self._rounds.add(entry.operation)
        self._lines.append(here())
        return super()._write_down(entry)

    @property
    def lines(self) -> list[Callable[[], str]]:
        """Of each operation what gives the line of the user's code that it is in."""
        return self._lines

    def _array(self, array: Any) -> int:
        before = len(self._arrays)
        code = super()._array(array)
        if len(self._arrays) > before:
            self._held += array.nbytes
        return code

    def convert(
        self, tensor: Any, form: Form, conversion: Callable[[], Conversion], traced: Any
    ) -> Any:
        computes = conversion()
        with lock:
            self._make_room(form.frame, [form])
            self._frame = form.frame or self._frame
            (pending,) = self._write_down(Entry(computes, (self._operand(tensor),)))
            result = new_tensor(pending, form)
            self.cut()
        return result

    def look(self, checked: tuple[Any, ...], call: Call) -> None:
        if config.checks in assertions.EAGER:
            value_checks.check(checked, call, self.summary)

    def reads(self, array: Any) -> bool:
        """Whether ``array`` is an operand of what is written down."""
        return id(array) in self._array_indices

    def cut(self) -> None:
        """Launch what is written down if it is time; all results are in their storages."""
        if self._held > HELD:
            self.run()
        elif len(self._entries) >= ENOUGH and self._rounds.complete(self._leaves_little):
            # `run` begins a new batch; expect the same operations in it again.
            following = self._rounds.following
            self.run()
            self._rounds.following = following

    def _leaves_little(self) -> bool:
        return len(self._waiting()) <= FEW

    @interrupts.atomic
    def run(self) -> None:
        """Execute what is written down, and give the storages that still wait their values.

        Raises:
            Exception: of an operation that failed. What it would have written has its earlier
                value; what it would have made has none.
        """
        with lock:
            failure = None
            try:
                for waiting, form, result in self._launch():
                    if not isinstance(result, Failure):
                        waiting.give(result, form)
                        continue
                    failure = failure or result
                    self._put_back_one(waiting, result)
            except BaseException as error:
                self._put_back(error)
                raise
            lines, entries = self.lines, self._entries
            self._start()
            self._replaced.clear()
        if failure is not None:
            line = next(line for e, line in zip(entries, lines, strict=True) if e is failure.entry)
            failure.error.add_note(f"in {failure.entry.operation.name}{line()}")
            raise failure.error

    def _put_back_one(self, waiting: WaitingStorage, failure: Failure) -> None:
        """Give a storage whose last write has failed the value of the write before it."""
        storage = waiting.storage
        if storage.value is not waiting.pending:
            return
        known = self._replaced.get(id(storage))
        if known is not None and known[0]() is not storage:
            known = None
        first = 0 if known is None else known[3]
        for pending in reversed(self._pending):
            if pending.storage() is storage and pending.index >= first:
                value = self._alone[pending.index]
                if not isinstance(value, Failure):
                    storage.put_back(value, storage.form)
                    return
        if known is not None:
            storage.put_back(*known[1:3])
        else:
            waiting.pending.fail(failure.error)

    def _launch(self) -> list[tuple[WaitingStorage, Form, Any]]:
        waiting = self._waiting()
        if not waiting:
            return []
        key, outputs = self._key(waiting)
        # Not the cache of blocks, each of which is one program: else a step's rounding would depend
        # on which of the two was compiled first.
        known: Cache[Any, Any] = cut_batches if self._frame is None else executables
        executable = known.get(key)
        if executable is None:
            if len(self._entries) <= FEW:
                times = _seen.get(key) or 0
                # A single operation has a program already: its plan's.
                if times < OFTEN or len(self._entries) == 1:
                    _seen.put(key, times + 1)
                    return self._one_by_one(waiting)
            if self._frame is None:
                executable = known.put(key, Pieces(self._entries, self._arrays, outputs))
            else:
                executable = known.put(key, fused(self._entries, outputs))
        try:
            with self._outside_of_traces():
                return self._run(executable, waiting)
        except Exception:
            # One by one it shows which operation fails; what doesn't need its results has a value.
            return self._one_by_one(waiting)

    def _one_by_one(self, waiting: list[WaitingStorage]) -> list[tuple[WaitingStorage, Form, Any]]:
        states = list(map(rng.keyed, self._states))
        with self._outside_of_traces(), jax.enable_x64(True):
            values = one_by_one(self._entries, self._arrays, self._numbers, states)
        self._alone = values
        # Run one by one, results of the default device stay on it.
        return [(one, one.storage.form, values[one.pending.index]) for one in waiting]

    @contextlib.contextmanager
    def _outside_of_traces(self) -> Iterator[None]:
        """Another thread's values may be wanted while this one traces a step."""
        if executor.trace() is None:
            yield
        else:
            with executor.running_at_once(), jax.ensure_compile_time_eval():
                yield

    def _make_room(self, frame: Frame | None, results: Sequence[Form | None]) -> None:
        super()._make_room(frame, results)
        # On the devices of a mesh a large tensor of the default device would be there many times.
        if frame is not None:
            if self._is_large:
                self.run()
        elif any(form is not None and math.prod(form.shape) > LARGE for form in results):
            if self._frame is not None:
                self.run()
            self._is_large = True

    def _prove(self, plan: Plan, call: Call, leaves: Codes, bases: Bases) -> None:
        """Trace the plan now, so that its lowering raises at the user's line and not at the launch.

        All batches use this one trace (design.md, "Eager operations wait").
        """
        digest = proofs.digest_of(plan.words)
        if proofs.has(digest):
            plan.proven = True
            return
        values = [self._abstract(c, f) for c, f in zip(leaves, call.forms, strict=True)]
        written = [call.leaves[i]._storage_.form for i in plan.mutated]
        into = [
            None if base is None else (self._abstract(base[0], form), (0,) * len(base[1]))
            for base, form in zip(bases, written, strict=True)
        ]
        state = (rng.words_at(0, 0), 0) if plan.random else None
        with jax.enable_x64(True):
            plan.part.eval_shape(state, values, into)
        plan.proven = True
        proofs.add(digest)

    def _abstract(self, code: int, form: Any) -> Any:
        index, kind = divmod(code, KINDS)
        if kind == ARRAY:
            return self._arrays[index]
        if kind != VALUE:
            return self._numbers.by_kind[kind][index]
        lead = form.array_shape[: len(form.array_shape) - len(form.shape)]
        return jax.ShapeDtypeStruct((*lead, *form.shape), form.jax_dtype)


class Rounds:
    """Finds where a sequence of operations repeats itself: rounds of a loop, layers of a model.

    Attributes:
        following: the operations after which the next batch ends, if they come as expected.
    """

    def __init__(self) -> None:
        self._operations: list[BatchOperation] = []
        self._where: dict[BatchOperation, list[int]] = {}
        self.following: list[BatchOperation] | None = None

    def add(self, operation: BatchOperation) -> None:
        """The next operation."""
        self._where.setdefault(operation, []).append(len(self._operations))
        self._operations.append(operation)

    def complete(self, leaves_little: Callable[[], bool]) -> bool:
        """Whether the batch ends with the last operation.

        Args:
            leaves_little: whether few values would be left behind.
        """
        operations, count = self._operations, len(self._operations)
        if self.following is not None:
            if count < len(self.following):
                return False
            if operations == self.following:
                return True
            self.following = None
        if count < ENOUGH:
            return False
        for start in self._where[operations[-1]][-2:-4:-1]:
            period = count - 1 - start
            same = max(period, ALIKE)
            if (count - ENOUGH) % period or count < same + period:
                continue
            if operations[-same:] == operations[-same - period : -period]:
                least = ENOUGH if leaves_little() else MANY
                if count >= least:
                    self.following = operations[-period:] * -(-least // period)
                    return True
        return count >= MOST


class _Threads(threading.local):
    def __init__(self) -> None:
        refuse_to_wait()
        self.batch = Lazy()


# Weak: a batch lives as long as its thread, or as a storage waits for one of its values.
_batches: weakref.WeakSet[Lazy] = weakref.WeakSet()
_threads = _Threads()


def of_this_thread() -> Lazy:
    """The batch in which this thread's operations wait."""
    return _threads.batch


def flush() -> None:
    """Launch what this thread has written down."""
    batch = _threads.batch
    if batch._entries:
        batch.run()


def flush_all() -> None:
    """Launch what all threads have written down: a compiled step takes over the memory of what it
    overwrites, which may be wanted by what waits."""
    flush()
    if len(_batches) > 1:
        with lock:
            for other in list(_batches):
                if other._entries:
                    other.run()


def to_take_over(arrays: list[Any], by: Lazy | None = None) -> list[Any]:
    """What a step may take over in place of ``arrays``: copies of those that something reads that
    waits, in this or another thread, or that a thread looks at. The caller holds `lock`."""
    waiting = [other for other in list(_batches) if other is not by and other._entries]
    seen = looked_at()
    if not waiting and not seen:  # as in most calls, of hundreds of arrays
        return arrays
    return [jnp.copy(a) if id(a) in seen or any(b.reads(a) for b in waiting) else a for a in arrays]


events.before_waiting.append(flush_all)
