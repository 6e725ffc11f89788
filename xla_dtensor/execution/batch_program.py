"""Makes a batch's list of operations one jitted program, or launches each by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.base.jax_private import convert_element_type
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.execution.value_checks import summary
from xla_dtensor.forms import words
from xla_dtensor.forms.form import Form, device_form
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.read import read_view, view_reader
from xla_dtensor.forms.views import Step, leave_open, read_through, with_positions
from xla_dtensor.lowering.bounds import Condition
from xla_dtensor.runtime.kept.program import KeptProgram, Submit

# An operand is one integer, index * KINDS + kind.
ARRAY = 0  # an array from outside of the batch
VALUE = 1  # computed by the batch
NUMBERS: dict[type, int] = {int: 2, float: 3, complex: 4}  # Python numbers: inputs, too
KINDS = 5


class BatchOperation(Protocol):
    """What a batch writes down: a `Plan`, or one of the classes below.

    Attributes:
        name: for people.
        results: how many values it gives.
        result_forms, base_forms: together the forms of these; None is nobody's.
    """

    results: int

    @property
    def name(self) -> str: ...

    @property
    def result_forms(self) -> Sequence[Form | None]: ...

    @property
    def base_forms(self) -> Sequence[Form]: ...

    def part(self, state: Any, leaves: list[Any], bases: list[Any]) -> list[Any]:
        """Its values as a part of a larger program: without padding."""

    def eager(self, state: Any, leaves: list[Any], bases: list[Any]) -> list[Any]:
        """The same as a program of its own: arrays in their physical forms."""

    def begin(self, submit: Submit, state: Any, leaves: list[Any], bases: list[Any]) -> None:
        """Begin to load or compile that, in another thread, for such operands."""

    def words(self) -> str | None:
        """What it computes, in words that are the same in every process (`forms/words.py`)."""


class Entry(NamedTuple):
    """One operation and its operands.

    Attributes:
        state: of a random one the operand that is the generator's state, and how many random
            operations come after that state before this one; None where that is known to be none.
        leaves: the operands.
        bases: of each write through a view the storage's array, and the positions of the view.
    """

    operation: BatchOperation
    leaves: tuple[int, ...]
    bases: tuple[tuple[int, tuple[int, ...]] | None, ...] = ()
    state: tuple[int, int | None] | None = None


class ViewRead:
    """An operation of a batch: the value of a view. Its operands are the storage's array, in
    ``form``, and the numbers in the view's steps that are inputs (slice starts, indices)."""

    results, name, base_forms = 1, "a view", ()

    def __init__(self, form: Form, steps: tuple[Step, ...], own: Form) -> None:
        self._form, self._steps, self._own = form, steps, own
        self.result_forms = (own,)
        self.part: Any = jax.jit(self._part)

    def _part(self, state: None, leaves: Sequence[Any], bases: Any) -> list[Any]:
        array, *positions = leaves
        value = read_through(array, self._form, with_positions(self._steps, positions))
        return [value.astype(self._own.jax_dtype)]

    def eager(self, state: None, leaves: Sequence[Any], bases: Any) -> list[Any]:
        array, *positions = leaves
        return [read_view(self._form, with_positions(self._steps, positions), self._own, array)]

    def begin(self, submit: Submit, state: None, leaves: Sequence[Any], bases: Any) -> None:
        array, *positions = leaves
        reader = view_reader(self._form, leave_open(self._steps)[0], self._own.at_start())
        reader.begin(submit, array, tuple(positions))

    def words(self) -> str | None:
        return words.joined(["view", self._form, self._steps, self._own])


class Look:
    """An operation of a batch: the two integers by which a condition on values is judged (the least
    and the greatest index)."""

    results, name = 1, "a check of indices"
    result_forms, base_forms = (device_form(None, (2,), dtype=torch.int64),), ()

    def __init__(self, form: Form, condition: Condition) -> None:
        self._form, self._condition = form, condition
        self.part: Any = jax.jit(self._part)
        self.eager = KeptProgram(self._part, self.words)
        self.begin = self.eager.begin

    def _part(self, state: None, leaves: Sequence[Any], bases: Any) -> list[Any]:
        return [summary(self._condition, logical(leaves[0], self._form))]

    def words(self) -> str | None:
        return words.joined(["look", self._form, self._condition])


class _Barrier:
    """An operation of a batch: its first operand behind an optimization barrier with the others, so
    that XLA neither looks through it nor computes it before them."""

    results, name = 1, "a barrier"
    result_forms, base_forms = (None,), ()  # nothing is known of its operand

    def part(self, state: None, leaves: Sequence[Any], bases: Any) -> list[Any]:
        return [jax.lax.optimization_barrier(tuple(leaves))[0]]

    def eager(self, state: None, leaves: Sequence[Any], bases: Any) -> list[Any]:
        return [leaves[0]]

    def begin(self, submit: Submit, state: None, leaves: Sequence[Any], bases: Any) -> None:
        pass  # there is no program

    def words(self) -> str | None:
        return "barrier"


BARRIER = _Barrier()


class Conversion:
    """An operation of a batch: a tensor in another layout, by ``convert(array, source, target)``.

    Args:
        convert: takes an array in ``source`` form, gives one in ``target`` form.
        sharding: of the result where it isn't that of ``target`` yet.
    """

    results, name, base_forms = 1, "another layout", ()

    def __init__(
        self,
        convert: Callable[[Any, Form, Form], Any],
        source: Form,
        target: Form,
        sharding: Any = None,
    ) -> None:
        self._convert, self._source, self._target = convert, source, target
        self._sharding = sharding or target.sharding
        self.result_forms = (target,)
        self.part: Any = jax.jit(self._part)
        self.eager: Any = jax.jit(self._alone, out_shardings=self._sharding)

    def begin(self, submit: Submit, state: None, leaves: Sequence[Any], bases: Any) -> None:
        pass  # it is on a mesh, where batches are whole

    def words(self) -> str | None:
        return None

    def _alone(self, state: None, leaves: Sequence[Any], bases: Any) -> list[Any]:
        return [self._convert(leaves[0], self._source, self._target)]

    def _part(self, state: None, leaves: Sequence[Any], bases: Any) -> list[Any]:
        (value,) = self._alone(state, leaves, bases)
        shape = self._target.shape
        if value.shape[value.ndim - len(shape) :] != shape:  # padded
            value = value[(..., *(slice(0, n) for n in shape))]
        elif self._sharding is not None:
            given = self._sharding is not self._target.sharding
            sharding = self._sharding if given else self._target.computed_sharding
            value = jax.lax.with_sharding_constraint(value, sharding)
        return [value]


_view_reads: Cache[Any, ViewRead] = Cache("views in batches", 1024)
_looks: Cache[Any, Look] = Cache("checks in batches", 512)


def view_read(form: Form, steps: tuple[Step, ...], own: Form) -> ViewRead:
    """The `ViewRead` of these, one for all batches: batches are compared by their operations."""
    key = form, steps, own
    return _view_reads.get(key) or _view_reads.put(key, ViewRead(*key))


def look_at(form: Form, condition: Condition) -> Look:
    """The `Look` of these."""
    return _looks.get_or_make((form, condition), lambda: Look(form, condition))


class Numbers:
    """The Python numbers of a batch, by kind. A program gets those of a kind as one array: each as
    an input of its own would cost more than most operations."""

    def __init__(self) -> None:
        self.by_kind: dict[int, list[Any]] = {kind: [] for kind in NUMBERS.values()}

    def add(self, number: Any) -> int:
        """The operand that ``number`` is.

        Raises:
            OverflowError: an integer of more than 64 bits.
        """
        kind = NUMBERS[type(number)]
        if kind == NUMBERS[int] and not -(2**63) <= number < 2**63:
            raise OverflowError(f"the integer {number} has more than 64 bits")
        numbers = self.by_kind[kind]
        numbers.append(number)
        return (len(numbers) - 1) * KINDS + kind

    def packed(self) -> list[np.ndarray]:
        """One array for each kind."""
        return [np.asarray(self.by_kind[kind], t) for t, kind in NUMBERS.items()]


class _Unpacked:
    """The elements of a packed array, each as JAX treats a Python number: weakly typed."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._known: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        known = self._known.get(index)
        if known is None:
            number = jax.lax.index_in_dim(self._array, index, keepdims=False)
            # Packed numbers are 64 bits wide; without a weak type they would make a float32 array
            # that is multiplied by one float64. JAX has no public function for it.
            known = convert_element_type(number, weak_type=True)
            self._known[index] = known
        return known


class BatchInputs:
    """Looks up the arrays and numbers that operands (integer codes) refer to.

    Args:
        numbers: by kind.
    """

    def __init__(self, arrays: Any, values: Any, numbers: Mapping[int, Any]) -> None:
        self._sources = {ARRAY: arrays, VALUE: values, **numbers}

    def of(self, code: int) -> Any:
        """The operand's array or number."""
        index, kind = divmod(code, KINDS)
        return self._sources[kind][index]

    def all(self, entry: Entry) -> tuple[list[Any], list[Any]]:
        """The leaves and bases of an entry."""
        leaves = list(map(self.of, entry.leaves))
        bases = [
            None if base is None else (self.of(base[0]), tuple(map(self.of, base[1])))
            for base in entry.bases
        ]
        return leaves, bases


Outputs = Sequence[tuple[int, Form]]
"""The values wanted of a batch, by number, and the forms to give them in."""


def computation(
    entries: Sequence[Entry], outputs: Outputs
) -> Callable[[Sequence[Any], list[Any]], list[Any]]:
    """All entries as one function of their arrays and numbers (`Numbers.packed`)."""

    def batch(arrays: Sequence[Any], numbers: list[Any]) -> list[Any]:
        values: list[Any] = []
        unpacked = dict(zip(NUMBERS.values(), map(_Unpacked, numbers), strict=True))
        inputs = BatchInputs(arrays, values, unpacked)
        for entry in entries:
            state = None if entry.state is None else (inputs.of(entry.state[0]), entry.state[1])
            # Within the program values are logical; padding comes with the outputs.
            values += entry.operation.part(state, *inputs.all(entry))
        results = []
        known = {id(array) for array in arrays}
        for index, form in outputs:
            value = form.physical(values[index])
            # Two storages never share a buffer: writes to one donate it in compiled steps.
            results.append(jnp.copy(value) if id(value) in known else value)
            known.add(id(value))
        return results

    return batch


def out_shardings(outputs: Outputs) -> dict[str, Any]:
    """What ``jax.jit`` is told of a batch's outputs."""
    shardings = [form.sharding for _, form in outputs]
    known = any(sharding is not None for sharding in shardings)
    return {"out_shardings": shardings} if known else {}


def fused(
    entries: Sequence[Entry], outputs: Outputs
) -> Callable[[Sequence[Any], list[Any]], list[Any]]:
    """All entries as one program of their arrays and numbers."""
    return jax.jit(computation(entries, outputs), **out_shardings(outputs))


def one_by_one(
    entries: Sequence[Entry], arrays: list[Any], numbers: Numbers, states: list[Any]
) -> list[Any]:
    """Run each entry's own program.

    Args:
        entries: in order.
        states: of the random ones the generator's states, in order.

    Returns:
        all values, each in its physical form; an exception in place of what an operation that
        failed, or one that needed its results, would have given.
    """
    values: list[Any] = []
    inputs = BatchInputs(arrays, values, numbers.by_kind)
    remaining = iter(states)
    for entry in entries:
        state = None if entry.state is None else next(remaining)
        leaves, bases = inputs.all(entry)
        before = [x for x in (*leaves, *(b[0] for b in bases if b)) if isinstance(x, Failure)]
        if before:
            values += [before[0]] * entry.operation.results
            continue
        try:
            values += entry.operation.eager(state, leaves, bases)
        except Exception as error:
            values += [Failure(entry, error)] * entry.operation.results
    return values


def begin_one_by_one(
    entries: Sequence[Entry],
    submit: Submit,
    arrays: Sequence[Any],
    numbers: Mapping[int, Sequence[Any]],
    states: Sequence[Any],
) -> None:
    """Begin to load or compile each entry's own program, in other threads.

    Args:
        as of `one_by_one`.
    """
    values: list[Any] = []
    inputs = BatchInputs(arrays, values, numbers)
    remaining = iter(states)
    for entry in entries:
        operation = entry.operation
        state = None if entry.state is None else next(remaining)
        operation.begin(submit, state, *inputs.all(entry))
        values += map(shape_of, forms_of(operation))


def forms_of(operation: BatchOperation) -> list[Form]:
    """The forms of its values."""
    forms = [*filter(None, operation.result_forms), *operation.base_forms]
    assert len(forms) == operation.results, operation.name
    return forms


def shape_of(form: Form) -> jax.ShapeDtypeStruct:
    """Of the value of one device."""
    return jax.ShapeDtypeStruct(form.shape, form.jax_dtype)


class Failure(NamedTuple):
    """In place of the value of an operation that failed: which operation, and its exception."""

    entry: Entry
    error: Exception
