"""The batch of one call of a replayed step, and the program that it is compiled to."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from xla_dtensor.base.torch_private import activation_memory_budget
from xla_dtensor.compilation.call.inputs import LostArrays, check_alive, refuse_deleted
from xla_dtensor.compilation.program.input_layouts import Pinning, compile_somehow
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.execution import lazy
from xla_dtensor.execution.batch import Batch, WaitingStorage
from xla_dtensor.execution.batch_program import (
    ARRAY,
    BARRIER,
    KINDS,
    VALUE,
    Entry,
    Failure,
    Outputs,
    computation,
    out_shardings,
)
from xla_dtensor.execution.interfaces import Call, Plan
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.storage import Pending, Storage
from xla_dtensor.mesh import Frame
from xla_dtensor.runtime import arrays
from xla_dtensor.runtime.jax_runtime import code_bytes


class ReplayedProgram:
    """What a sequence of operations was compiled to.

    Attributes:
        outputs: what it computes: first what takes the place of the arrays that it takes over, in
            their order.
        place_of: where each is among them.
    """

    def __init__(
        self,
        recorded: StepBatch,
        entries: tuple[Entry, ...],
        wanted: Outputs,
        options: dict[str, Any] | None,
    ) -> None:
        self._entries, self._lines = entries, recorded.lines
        replaced = recorded.overwritten(wanted)
        self._taken = [array for array, _ in replaced]
        taken = set(self._taken)
        self._kept = [i for i in range(len(recorded.arrays)) if i not in taken]
        self._wanted = wanted
        self.outputs = tuple(dict.fromkeys((*(output for _, output in replaced), *wanted)))
        self.place_of = {output: i for i, output in enumerate(self.outputs)}
        compute = computation(entries, self.outputs)
        order = sorted(range(len(recorded.arrays)), key=[*self._taken, *self._kept].__getitem__)

        def step(taken: list[Any], kept: list[Any], numbers: list[Any]) -> list[Any]:
            arrays = [*taken, *kept]
            return compute([arrays[i] for i in order], numbers)

        inputs = self._inputs(recorded)  # for shapes and shardings; nothing is donated
        shardings = out_shardings(self.outputs)

        def traced() -> Any:
            # Another function each time, or JAX would give the same text again.
            return jax.jit(functools.partial(step), donate_argnums=0, **shardings).trace(*inputs)

        pinning = Pinning()
        with jax.enable_x64(True):
            first = traced()
            wanted_shardings = shardings.get("out_shardings", ())
            pinning.loosen(first.jaxpr.jaxpr, recorded.frame, inputs, wanted_shardings)
            self.compiled = compile_somehow(first.lower, lambda: traced().lower(), options, pinning)

    def computes(self, wanted: Outputs) -> bool:
        """Whether it gives all that is wanted."""
        return wanted == self._wanted or self.place_of.keys() >= set(wanted)

    def __call__(self, recorded: StepBatch) -> list[Any]:
        """Launch it."""
        inputs = self._inputs(recorded)
        inputs[0][:] = lazy.to_take_over(inputs[0], recorded)
        with jax.enable_x64(True):
            if LostArrays.seen:
                refuse_deleted((*inputs[0], *inputs[1]))
            try:
                results: list[Any] = self.compiled(*inputs)
            except BaseException as error:
                check_alive(inputs[0], error)
                raise
        return results

    def _inputs(self, recorded: StepBatch) -> tuple[list[Any], list[Any], list[Any]]:
        taken, kept = ([recorded.arrays[i] for i in some] for some in (self._taken, self._kept))
        return taken, kept, recorded.numbers()

    def difference(self, later: ReplayedProgram) -> str:
        """Where another program's operations begin to be others."""
        pairs = itertools.zip_longest(self._entries, later._entries)
        for i, (mine, others) in enumerate(pairs):
            if mine != others:
                before, now = (e and e.operation.name for e in (mine, others))
                line = self._lines[i]() if mine is not None else ""
                return f"operation {i + 1}: from {before} to {now}{line}"
        return "the values that the step leaves behind are others"

    def size(self) -> int:
        """Its bytes."""
        return code_bytes(self.compiled) or 0


class Refused:
    """What takes the place of a program where XLA refuses to compile the operations.

    Attributes:
        is_whole: whether each of them alone is known to run.
    """

    def __init__(self, error: Exception, step: str, operations: int) -> None:
        error.add_note(
            f"in a call of {step}, whose {operations} operations XLA refuses as one program, and "
            "which is raised in each call that asks for the same; the function itself, without "
            "xd.compile, launches them in parts; clear_cache() lets the next call try again"
        )
        self.is_whole = False
        self._first: Exception | None = error
        self._error = _alike(error)

    def computes(self, wanted: Outputs) -> bool:
        """Nothing, whatever is wanted: it stands for all programs of these operations."""
        return True

    def __call__(self, recorded: StepBatch) -> list[Any]:
        """Raise what XLA has said."""
        first, self._first = self._first, None
        raise first or _alike(self._error)

    def size(self) -> int:
        """Its bytes."""
        return 0


def _alike(error: Exception) -> Exception:
    """The same error without the frames that it has come through: they hold a call's tensors."""
    try:
        return copy.copy(error)
    except Exception:  # its class may want other arguments
        return RuntimeError(f"{type(error).__name__}: {error}")


def _unknown() -> str:
    return ""


class StepBatch(lazy.Lazy):
    """What one call writes down; nothing is launched before a value is read, or the call is over.

    Args:
        program_of: finds or compiles the program of what has been written down, if it is wanted.
    """

    is_step = True

    def __init__(self, program_of: Callable[[StepBatch], ReplayedProgram | Refused | None]) -> None:
        self._program_of = program_of
        self._optimizers = 0
        self._recomputing: list[tuple[int, int | None, dict[int, int]]] = []
        super().__init__()

    def _start(self) -> None:
        super()._start()
        # A new batch begins, to which values of the earlier one are arrays: nothing to tie to.
        self._recomputing = [(0, None, {}) for _ in self._recomputing]

    # Not `Lazy`'s, which notes the user's line: that costs half as much as recording the operation.
    _write_down = Batch._write_down

    _array = Batch._array  # not `Lazy`'s, which launches after so many bytes of inputs

    def _add_in_optimizer(self, plan: Plan, call: Call) -> list[Any]:
        """Write a call down; state that an optimizer makes in its first step is there at once, so
        that this step's program is that of all later ones, which have it as an input."""
        filled = call.filled_with()
        form = plan.result_forms[0] if plan.result_forms else None
        # Only forms that stay the same when the step moves its values to the mesh's devices.
        if (
            isinstance(filled, int | float)
            and form is not None
            and not form.varying
            and form.placed(self._frame) is form
        ):
            return [arrays.full(form.array_shape, filled, form.jax_dtype, form.sharding)]
        return super().add(plan, call)

    @contextlib.contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """A block in which an optimizer makes its step."""
        self._optimizers += 1
        self.add = self._add_in_optimizer  # type: ignore[method-assign]
        try:
            yield
        finally:
            self._optimizers -= 1
            if not self._optimizers:
                del self.add

    # --- recomputation ------------------------------------------------------------------------

    def begin_recomputation(self) -> None:
        """What the block reads from outside goes through a barrier from here on, or XLA would find
        that all of it has been computed before, and keep that alive."""
        latest = self._pending[-1].code if self._pending else None
        self._recomputing.append((self._values, latest, {}))
        self._operand, self._stored = self._operand_again, self._stored_again  # type: ignore
        self._takes_known = False

    def end_recomputation(self) -> None:
        """The block is over."""
        self._recomputing.pop()
        if not self._recomputing:
            del self._operand, self._stored, self._takes_known

    def _operand_again(self, source: Any) -> int:
        return self._barred(super()._operand(source))

    def _stored_again(self, storage: Storage) -> int:
        return self._barred(super()._stored(storage))

    def _barred(self, code: int) -> int:
        first, latest, known = self._recomputing[-1]
        index, kind = divmod(code, KINDS)
        if kind != ARRAY and (kind != VALUE or index >= first):
            return code
        if code not in known:
            # One barrier with the backward pass's newest value: XLA can't recompute before it.
            operands = (code,) if latest is None else (code, latest)
            (behind,) = self._write_down(Entry(BARRIER, operands))
            known[code] = behind.code
        return known[code]

    def cut(self) -> None:
        """A step's operations stay together, however many they are."""

    @property
    def entries(self) -> list[Entry]:
        return self._entries

    @property
    def arrays(self) -> list[Any]:
        return self._arrays

    @property
    def lines(self) -> list[Callable[[], str]]:
        return [_unknown] * len(self._entries)

    @property
    def frame(self) -> Frame | None:
        return self._frame

    def numbers(self) -> list[Any]:
        return self._numbers.packed()

    def wanted(self) -> Outputs:
        """What storages wait for; `_launch` gives it to those that were found last, since a miss
        collects garbage and asks again."""
        self._found = self._waiting()
        return tuple((one.pending.index, one.form) for one in self._found)

    def overwritten(self, wanted: Outputs) -> list[tuple[int, tuple[int, Form]]]:
        """The arrays that nobody will look at any more, each with what takes its place."""
        found = []
        outputs = dict(wanted)
        for reference, value, form, _ in self._replaced.values():
            storage = reference()
            if storage is None:
                continue
            index = self._array_indices.get(id(value))
            new = storage.value
            if (
                index is not None
                and new.__class__ is Pending
                and outputs.get(new.index) is form
                and value.size > 1  # scalars (step counts) may share one array
            ):
                found.append((index, (new.index, form)))
        return found

    def _launch(self) -> list[tuple[WaitingStorage, Form, Any]]:
        program: ReplayedProgram | Refused | None = None
        try:
            with self._outside_of_traces():
                program = self._program_of(self)
                if program is None:
                    return []
                results = program(self)
        except Exception:
            refused = program if isinstance(program, Refused) else None
            if (refused is not None and refused.is_whole) or any(
                array.is_deleted() for array in self._arrays if isinstance(array, jax.Array)
            ):
                raise
            # Run one by one: if a single operation fails, its error names it and its line.
            alone = self._one_by_one(self._waiting())
            if any(isinstance(value, Failure) for _, _, value in alone):
                return alone
            if refused is not None:
                refused.is_whole = True
            raise
        assert isinstance(program, ReplayedProgram)  # a `Refused` has raised
        place_of = program.place_of
        found, self._found = self._found, []
        return [(one, one.form, results[place_of[one.pending.index, one.form]]) for one in found]

    def backward(self, outputs: Any, keeps_graph: bool, accumulates: bool, to_leaves: bool) -> None:
        if activation_memory_budget() != 1:
            raise UnsupportedOpError(
                'torch._functorch.config.activation_memory_budget with watch="replay": what the '
                "backward pass finds saved is chosen when a step is traced; leave watch out, or "
                "use torch.utils.checkpoint"
            )


class NotingStepBatch(StepBatch):
    """The same, which notes where in the user's code operations are: for messages."""

    _write_down = lazy.Lazy._write_down
    lines = lazy.Lazy.lines
