"""The executor of this thread: the top of a stack of objects that run operations.

Operations run where they stand, wait to be launched together, become part of a step's program, or
run on nothing at all (``xd.abstract``). Few ask which of these it is (`tests/test_layers.py`):
whoever works with storages tells the executor, and whoever needs a value asks it. The executors
are in `xla_dtensor.execution`; a step's trace is in `xla_dtensor.compilation.trace.step_trace`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

# What `Executor.refuse` is told where a tensor's value is wanted.
ITEM = ".item() (also float(), int(), bool(), `if tensor:`)"

NOTHING = nullcontext()

Route = Callable[[Any, Any, dict[str, Any]], Any]
"""``route(func, args, kwargs)``: the results of a call that it takes over, or NotImplemented."""

Settle = Callable[[Any, Any], bool]
"""``settle(found, left)``: `Executor.depends_on` has it."""


class MadeBefore(BaseException):
    """Something that a trace would make is to be there before it, as an input of the program. No
    error of the step's.

    Args:
        make: makes it.
    """

    def __init__(self, make: Callable[[], None]) -> None:
        super().__init__()
        self.make = make


class Executor:
    """Runs operations.

    What it is told has no effect here, and what it is asked is answered as where tensors have
    values: that is right for all that run operations eagerly. Traces answer otherwise.

    Attributes:
        trace: itself where operations run on JAX tracers; else None.
        batch: itself where operations are written down to be run later; else None.
        is_step: whether all that it runs becomes one program.
        has_values: whether the host can have the values of tensors (once they are computed).
        in_body: whether a branch or the body of a loop is traced, whose tensors are whole.
        routes: calls that it takes over before they are taken apart.
        random: the random numbers of the step that is traced (`thread_state.RandomNumbers`).
        wide: a traced optimizer's scalars in double precision (`numbers.wide_scalars`).
        positions: makes views at positions that are inputs (`dispatch.positions.Positions`).
            These last three are None where there is no such thing.
    """

    trace: Any = None
    batch: Any = None
    is_step = False
    has_values = True
    in_body = False
    routes: tuple[Route, ...] = ()
    random: Any = None
    wide: Any = None
    positions: Any = None

    # --- running operations -------------------------------------------------------------------

    def joins(self, call: Any) -> bool:
        """With several processes: bring tensors of a call (`plans.call.Call`) to where its others
        are. If it returns True, the call has to be taken apart anew."""
        return False

    def look(self, conditions: tuple[Any, ...], call: Any) -> None:
        """Look at whether ``conditions`` (`execution.conditions.Checked`) hold of a call's
        arguments, now or once there are values.

        Raises:
            Exception: torch's, if one is known not to hold.
        """

    def perform(self, plan: Any, call: Any) -> Any:
        """The results of a call, by its plan (`execution.interfaces.Plan`)."""
        raise NotImplementedError

    def convert(
        self,
        tensor: Any,
        form: Any,
        conversion: Callable[[], Any],
        traced: Callable[[Any], Any],
    ) -> Any:
        """A tensor's value in another ``form``, as a tensor of its own.

        Args:
            conversion: gives what computes the array (`execution.batch_program.Conversion`).
            traced: computes it of the tensor's array in a trace, as a part of its program.
        """
        raise NotImplementedError

    def is_copy(self, tensor: Any, of: Any) -> None:
        """A tensor that was just made, by `convert`, has the value of the tensor ``of``."""

    # --- arrays that no operation gives ---------------------------------------------------------

    def new_array(self, form: Any, eager: Callable[[], Any], traced: Callable[[Any], Any]) -> Any:
        """An array in ``form`` that no operation gives: by ``eager()``, or in a trace by
        ``traced(trace)``, as a part of its program."""
        return eager()

    def host_tensor(self, tensor: Any) -> Any:
        """The array of a CPU tensor that takes part in an operation of a trace."""
        raise NotImplementedError

    def host_constant(self, tensor: Any) -> Any:
        """In a trace: what gives the array of a CPU tensor that is the same in each call of what is
        traced; None if it isn't."""
        return None

    def made_of_constants(self, tensor: Any) -> Any:
        """``tensor``, of the CPU, that the package has just computed from what is the same in each
        call of what is traced."""
        return tensor

    def making_state(self) -> AbstractContextManager[Any]:
        """A block that fills state which outlives the step that is traced, in its first call."""
        return NOTHING

    def made_with(self, tensor: Any) -> Any:
        """What an optimizer has filled ``tensor`` with, its state, if it has made that in the step
        that is traced: a tensor; else None."""
        return None

    # --- storages -----------------------------------------------------------------------------

    def created(self, storage: Any) -> None:
        """A storage was made."""

    def owns(self, storage: Any) -> bool:
        """Whether a storage is there for as long as what this executor runs, and not from before a
        step that is traced."""
        return True

    def array_of(self, storage: Any, tensor: Any = None) -> Any:
        """The array of a storage, which is about to be used (through ``tensor``)."""
        return storage.array

    def touched(self, tensor: Any) -> None:
        """A view of ``tensor`` is being made."""

    def moves(self, tensor: Any, value: Any) -> None:
        """``tensor`` is about to get the memory of ``value`` (``tensor.data = value``)."""

    def writing(self, storage: Any) -> None:
        """A storage is about to get a new value."""

    def place(self, storage: Any, frame: Any) -> None:
        """Have the value of a storage on all devices of ``frame``, if it is on the default one."""
        storage.place(frame)

    def moving(self, storage: Any) -> None:
        """A storage's array is about to be moved to other devices."""

    # --- values -------------------------------------------------------------------------------

    def on_host(self, tensor: Any) -> Any:
        """The value of an xla tensor as a CPU tensor.

        Raises:
            PerDeviceValueError: it differs from device to device.
            DataDependentError: it has none (yet).
        """
        raise NotImplementedError

    def can_fetch(self, tensor: Any) -> bool:
        """Whether the host can have the value of an xla tensor that a step finds, or computes of
        such alone: in each call anew, within `recording`."""
        return False

    def has_text(self, tensor: Any, frame: Any) -> bool | None:
        """Whether text of an xla tensor that is made in ``frame``, or for it, shows its value; None
        if the value is none of the step's business, as nobody but people read the text.

        Raises:
            DataDependentError: it has no value yet, and the text is not only for people.
        """
        return self.has_values

    def printed_text(self, tensor: Any, frame: Any, spec: str) -> str | None:
        """What stands in ``frame`` for the number that an xla tensor without a value is, in text
        that is printed when the step has run; None if it isn't."""
        return None

    def recording(self) -> AbstractContextManager[Any]:
        """A block in which the package computes on CPU tensors for the step that is traced, in
        each call anew."""
        return NOTHING

    def item(self, tensor: Any) -> Any:
        """The value of an xla tensor of one element as a number of Python's."""
        return self.on_host(tensor).item()

    def gave_number(self, number: Any) -> None:
        """Python code was given a symbolic number."""

    def not_in_step(self, message: str, kind: Any = None) -> None:
        """Raise if what is done now can't be part of a step's program: a ``kind`` of error,
        `NotInStepError` unless said otherwise."""

    def refuse(self, what: str, way: str = "") -> None:
        """``what`` needs the value of a tensor: raise if there is none; ``way`` says what to do
        instead, where that isn't what it is for any value."""

    # --- what torch and Python do -------------------------------------------------------------

    def depends_on(self, read: Callable[[], Any], text: str, settle: Settle) -> None:
        """Python decides by what ``read`` gives; ``text`` names it. Where a step leaves something
        else than it has found, ``settle(found, left)`` may put that there before the first call, if
        it computes the same so, and says whether it has: then the second call is no other program.
        """

    def reads_grad(self, tensor: Any) -> None:
        """Python looks at ``tensor.grad``."""

    def sets_grad(self, tensor: Any) -> None:
        """Python is about to assign to ``tensor.grad``."""

    def backward(self, outputs: Any, keeps_graph: bool, accumulates: bool, to_leaves: bool) -> None:
        """A backward pass begins.

        Args:
            outputs: the tensors that it begins at.
            keeps_graph: whether there may be another one.
            accumulates: whether it adds to leaves' ``.grad`` (``x.backward()``); what
                ``torch.autograd.grad`` asks for is returned instead.
            to_leaves: whether it adds to that of all leaves (not ``backward(inputs=...)``).
        """

    def begin_recomputation(self) -> None:
        """``torch.utils.checkpoint`` starts to run a block again, in backward."""

    def end_recomputation(self) -> None:
        """It is done with it."""

    def in_optimizer(self) -> AbstractContextManager[None]:
        """A block in which an optimizer makes its step."""
        return NOTHING


class _Thread(threading.local):
    executor: Executor | None = None


_thread = _Thread()
_idle = Executor()

# `xla_dtensor.execution` says what these are, once there are tensors.
default: Callable[[], Executor] = lambda: _idle
"""The executor of a thread in which no block has put another one in place."""
at_once: Callable[[], Executor] = lambda: _idle
"""The one that runs each operation where it stands."""
choose: Callable[[], None] = lambda: None
"""To be called when what these hang on has changed: switches, an observer, other processes."""


def current() -> Executor:
    """The executor of this thread."""
    executor = _thread.executor
    return default() if executor is None else executor


def enclosing() -> Executor | None:
    """The executor that a block of this thread has put in place; None where that is the default."""
    return _thread.executor


def enclosing_batch() -> Any:
    """The batch that a block has put in place; None where there is none."""
    executor = _thread.executor
    return None if executor is None else executor.batch


def trace() -> Any:
    """The trace that this thread's operations are part of; None where they are of none."""
    executor = _thread.executor
    return None if executor is None else executor.trace


def is_in_step() -> bool:
    """Whether this thread's operations become one program: a trace, or a replayed step's call."""
    executor = _thread.executor
    return executor is not None and executor.is_step


class running:
    """Run this thread's operations by ``executor`` for a block."""

    __slots__ = ("_executor", "_outer")

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __enter__(self) -> Any:
        self._outer = _thread.executor
        _thread.executor = self._executor
        return self._executor

    def __exit__(self, *exc_info: object) -> None:
        _thread.executor = self._outer


def running_at_once() -> running:
    """Run this thread's operations where they stand for a block: a trace, if there is one, isn't
    told of them."""
    return running(at_once())
