"""Splits a batch on one device into several programs that other batches can reuse.

One program of a whole forward and backward pass is found again only where all of it comes again:
the second step of a training, which has momentum, compiled as long as the first, and each token of
a generation, whose cache is one longer, all layers of the model. So a batch is cut, and each piece
is a program that is known by its operations alone, wherever they stand: equal layers have one, and
what is new is compiled, and nothing else.

Where it is cut depends on the operations, and not on what has come before, so that a step that is
repeated has the same bits. A piece begins

- at a product, a convolution, an attention, a `cat`: XLA makes kernels of their own of them, which
  what comes after joins and what comes before mostly doesn't;
- where operations on integers and bools follow others, and the other way round: positions, masks
  and counts change their shapes where layers don't. They are exact, so a few of them run one by one
  (`lazy.py`) until they have come often, which no bit shows.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np

from xla_dtensor import rules
from xla_dtensor.base.random import rng
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.execution.batch_program import (
    ARRAY,
    KINDS,
    NUMBERS,
    VALUE,
    BatchOperation,
    Entry,
    Failure,
    Numbers,
    Outputs,
    ViewRead,
    begin_one_by_one,
    computation,
    forms_of,
    one_by_one,
    shape_of,
)
from xla_dtensor.forms import words
from xla_dtensor.lowering import changes as lowering_changes
from xla_dtensor.lowering.kinds import Kind, is_
from xla_dtensor.runtime.kept.program import KeptProgram

OFTEN = 32  # times that a piece of exact operations runs one by one
SOME = 64  # operations in such a piece

_CAT = "aten::cat.default"  # alone, as what grows in each round has a new shape each time
_BEGINNING = (Kind.PRODUCT, Kind.CONVOLUTION)


COMPILES = "xla_dtensor compiles"
"""What the names of threads that compile begin with; the user's Python doesn't run in them."""
# XLA compiles a program for the most part in one thread.
_compilers = ThreadPoolExecutor(os.cpu_count(), COMPILES)


def refuse_to_wait() -> None:
    """Raise in a thread that compiles, which would wait for the lock that the thread has which
    waits for it. What was to be compiled is then run operation by operation."""
    if threading.current_thread().name.startswith(COMPILES):
        raise RuntimeError(
            "something that JAX calls while it compiles (a listener of jax.monitoring) uses an xla "
            "tensor, in a thread of the compiler: keep a number for it instead (x.item())"
        )


class _AsItIs:
    """The form of what one device computes: an array as it is."""

    sharding = None

    def physical(self, value: Any) -> Any:
        return value


_AS_IT_IS: Any = _AsItIs()


class _Program:
    """The operations of a piece, of all batches that have it.

    Args:
        entries: whose operands are the piece's own arrays, numbers and values.
        wanted: which of its values others need.
        is_exact: whether they compute the same bits one by one.
    """

    def __init__(self, entries: tuple[Entry, ...], wanted: tuple[int, ...], is_exact: bool) -> None:
        self._entries, self._wanted = entries, wanted
        in_one = computation(entries, [(index, _AS_IT_IS) for index in wanted])
        self._fused = KeptProgram(in_one, self._words)
        # A single operation has a program already: its plan's.
        self._is_single = len(entries) == 1
        self._times_alone = OFTEN if is_exact and len(entries) <= SOME else 0
        self._is_begun = False

    @property
    def _is_fused(self) -> bool:
        """Whether its next call is one program of all operations."""
        return not (self._is_single or self._times_alone)

    def begin(self, arrays: list[Any], numbers: list[np.ndarray], states: list[Any]) -> None:
        """Begin to load or compile what its first call needs, in other threads.

        Args:
            arrays: those, or their shapes.
        """
        if self._is_begun:
            return
        self._is_begun = True
        if self._is_fused:
            self._fused.begin(_compilers.submit, arrays, numbers)
        else:
            own = _by_kind(numbers)
            begin_one_by_one(self._entries, _compilers.submit, arrays, own, states)

    def __call__(
        self, arrays: list[Any], numbers: list[np.ndarray], states: list[Any]
    ) -> list[Any]:
        if self._is_fused:
            results: list[Any] = self._fused(arrays, numbers)
            return results
        self._times_alone = max(0, self._times_alone - 1)
        own = Numbers()
        own.by_kind = _by_kind(numbers)
        values = one_by_one(self._entries, arrays, own, states)
        results = [values[index] for index in self._wanted]
        for result in results:
            if isinstance(result, Failure):
                raise result.error
        return results

    def _words(self) -> str | None:
        operations = [(entry.operation.words(), *entry[1:]) for entry in self._entries]
        if None in [said for said, *_ in operations]:
            return None
        return words.joined([operations, self._wanted])


def _by_kind(numbers: list[np.ndarray]) -> dict[int, list[Any]]:
    """Packed numbers as Python's."""
    return {k: n.tolist() for k, n in zip(NUMBERS.values(), numbers, strict=True)}


programs: Cache[Any, _Program] = Cache("pieces of batches", 2048)
lowering_changes.listen(programs.clear)
rules.changes.listen(programs.clear)


class _Piece:
    """Some entries of a batch, as one of the batch's programs.

    Args:
        entries: the batch's.
        values: the numbers of the values that they compute.
        wanted: those of them that others need.
        is_exact: as in `_Program`.

    Attributes:
        wanted: as above.
        program: what computes it.
    """

    def __init__(
        self, entries: Sequence[Entry], values: list[int], wanted: list[int], is_exact: bool
    ) -> None:
        self.wanted = wanted
        # Operands of the batch that are the program's arrays; by kind those that are its numbers;
        # the generators' states of its random operations, each with the operations in between; and
        # the program's operand for each of the batch's.
        self._sources: list[int] = []
        self._numbers: dict[int, list[int]] = {kind: [] for kind in NUMBERS.values()}
        states = [entry.state for entry in entries if entry.state is not None]
        self._states = [(code, since or 0) for code, since in states]
        places = {index: place for place, index in enumerate(values)}
        self._own = {i * KINDS + VALUE: place * KINDS + VALUE for i, place in places.items()}
        renumbered = list(map(self._renumbered, entries))
        # The states are the last of its arrays.
        free = iter(range(len(self._sources), len(self._sources) + len(self._states)))
        own = tuple(
            e if e.state is None else e._replace(state=(next(free) * KINDS + ARRAY, None))
            for e in renumbered
        )
        key = own, tuple(places[index] for index in wanted), is_exact
        self.program = programs.get(key) or programs.put(key, _Program(*key))

    def operands(
        self, arrays: Sequence[Any], values: Any, numbers: list[np.ndarray]
    ) -> tuple[list[Any], list[np.ndarray], list[Any]]:
        """The program's arrays (the states are the last), numbers and states.

        Args:
            arrays, numbers: the batch's.
            values: by number those that it has computed, or (to compile) their shapes.
        """
        sources = {ARRAY: arrays, VALUE: values}
        given = [sources[code % KINDS][code // KINDS] for code in self._sources]
        states = [rng.keyed(arrays[code // KINDS], n) for code, n in self._states]
        own = [n[which] for n, which in zip(numbers, self._numbers.values(), strict=True)]
        return [*given, *states], own, states

    def _renumbered(self, entry: Entry) -> Entry:
        """The entry with operands of the program: what stands in its own lists, not in those of the
        batch. An operand that the program doesn't compute becomes an array or a number of it."""
        bases = [b and (self._operand(b[0]), self._operands(b[1])) for b in entry.bases]
        return entry._replace(leaves=self._operands(entry.leaves), bases=tuple(bases))

    def _operands(self, codes: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(self._operand, codes))

    def _operand(self, code: int) -> int:
        own = self._own.get(code)
        if own is None:
            index, kind = divmod(code, KINDS)
            if kind in (ARRAY, VALUE):
                own = len(self._sources) * KINDS + ARRAY
                self._sources.append(code)
            else:
                own = len(self._numbers[kind]) * KINDS + kind
                self._numbers[kind].append(index)
            self._own[code] = own
        return own

    @property
    def needed(self) -> set[int]:
        """The numbers of the values of the batch that it takes."""
        return set(_values_in(self._sources))


class Pieces:
    """All entries as one function of their arrays and numbers, like `batch_program.fused`, of
    several programs. A value is let go after the last that needs it.

    Args:
        arrays: those from outside, of which the dtypes are looked at.
    """

    def __init__(self, entries: Sequence[Entry], arrays: Sequence[Any], outputs: Outputs) -> None:
        self._outputs = [index for index, _ in outputs]
        firsts = [0, *accumulate(entry.operation.results for entry in entries)]
        self._shapes = [shape_of(form) for e in entries for form in forms_of(e.operation)]
        self._is_new = True
        # (piece, values that no later piece needs). Made from the last to the first, so that what
        # later ones need is known.
        self._pieces: list[tuple[_Piece, list[int]]] = []
        needed = set(self._outputs)
        for members, is_exact in reversed(_cut(entries, firsts, arrays, needed)):
            values = [index for i in members for index in range(firsts[i], firsts[i + 1])]
            wanted = [index for index in values if index in needed]
            piece = _Piece([entries[i] for i in members], values, wanted, is_exact)
            self._pieces.append((piece, sorted(piece.needed - needed)))
            needed |= piece.needed
        self._pieces.reverse()

    def __call__(self, arrays: Sequence[Any], numbers: list[np.ndarray]) -> list[Any]:
        if not self._is_new:
            return self._run(arrays, numbers)
        self._is_new = False
        with _without_finalizers():
            for piece, _ in self._pieces:
                piece.program.begin(*piece.operands(arrays, self._shapes, numbers))
            return self._run(arrays, numbers)

    def _run(self, arrays: Sequence[Any], numbers: list[np.ndarray]) -> list[Any]:
        values: dict[int, Any] = {}
        for piece, last_used in self._pieces:
            results = piece.program(*piece.operands(arrays, values, numbers))
            values.update(zip(piece.wanted, results, strict=True))
            for index in last_used:
                del values[index]
        return [values[index] for index in self._outputs]


@contextlib.contextmanager
def _without_finalizers() -> Iterator[None]:
    """Nothing is collected in this block. The finalizer of something that reads a tensor, in a
    thread that compiles, would wait for the lock that the thread has which waits for it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


cut_batches: Cache[Any, Pieces] = Cache("batches in pieces", 1024)
"""By the operations and their operands, and the values wanted, as `batch.executables`."""
lowering_changes.listen(cut_batches.clear)
rules.changes.listen(cut_batches.clear)


def _cut(
    entries: Sequence[Entry], firsts: list[int], arrays: Sequence[Any], outputs: set[int]
) -> list[tuple[list[int], bool]]:
    """Of each piece the indices of its entries, and whether all have to do with integers and bools.

    What nobody needs is in no piece. A view is in each piece that reads it, and computed there: XLA
    multiplies by a transposed tensor as it lies. Not in that of a `cat`, which copies it anyway:
    what is joined to a layer's keys is another part of a tensor than what is joined to its values,
    and each length would compile both.

    Args:
        firsts: of each entry the number of its first value.
        outputs: the numbers of the values wanted.
    """
    makers = {n: i for i in range(len(entries)) for n in range(firsts[i], firsts[i + 1])}
    needed = set(outputs)
    live: list[int] = []
    for i in reversed(range(len(entries))):
        given = range(firsts[i], firsts[i + 1])
        if not needed.isdisjoint(given) or _may_have_effects(entries[i].operation):
            live.append(i)
            needed.update(_values_in(_operands(entries[i])))
    live.reverse()
    exact = list(_are_exact(entries, arrays))
    views = {i for i in live if isinstance(entries[i].operation, ViewRead)}
    views -= {makers[index] for index in outputs}
    for i in live:
        if entries[i].operation.name == _CAT:
            views -= {makers[index] for index in _values_in(_operands(entries[i]))}

    def with_views(i: int) -> Iterator[int]:
        """Entry ``i`` after the views that it reads, and those that these read."""
        for index in _values_in(_operands(entries[i])):
            if makers[index] in views:
                yield from with_views(makers[index])
        yield i

    pieces: list[tuple[list[int], bool]] = []
    before = None
    for i in live:
        if i in views:
            continue
        if before is None or exact[i] != exact[before] or _are_apart(entries[before], entries[i]):
            pieces.append(([], exact[i]))
        members = pieces[-1][0]
        members += [member for member in dict.fromkeys(with_views(i)) if member not in members]
        before = i
    return pieces


def _may_have_effects(operation: BatchOperation) -> bool:
    """Whether it may be something besides its values: code of the user's."""
    run = getattr(operation, "run", None)
    return run is not None and not run.is_lowering


def _are_apart(before: Entry, entry: Entry) -> bool:
    """Whether two floating-point operations in a row aren't in one piece."""
    name = entry.operation.name
    if _CAT in (before.operation.name, name):
        return True
    return any(is_(kind, name) for kind in _BEGINNING)


def _operands(entry: Entry) -> Iterator[int]:
    yield from entry.leaves
    for base in filter(None, entry.bases):
        yield base[0]
        yield from base[1]


def _values_in(codes: Iterable[int]) -> Iterator[int]:
    """The numbers of the values among operands."""
    return (code // KINDS for code in codes if code % KINDS == VALUE)


def _are_exact(entries: Sequence[Entry], arrays: Sequence[Any]) -> Iterator[bool]:
    """Of each entry whether it has to do with integers and bools alone."""
    values: list[bool] = []

    def operand_is(code: int) -> bool:
        index, kind = divmod(code, KINDS)
        return values[index] if kind == VALUE else kind != ARRAY or _is_exact(arrays[index].dtype)

    for entry in entries:
        own = [_is_exact(form.jax_dtype) for form in forms_of(entry.operation)]
        values += own
        yield all(own) and entry.state is None and all(map(operand_is, _operands(entry)))


def _is_exact(dtype: np.dtype) -> bool:
    return dtype.kind in "biu"
