"""Calls that trace a step, from the trace to the launch: what other threads' calls leave to them.

While a step is traced, tensors hold tracers, and gradients, optimizers and attributes are as the
step would leave them; what was found of them before is part of the program, and holds until it is
launched. So a call of another step in another thread waits if it uses what may be written: all that
the trace can reach, and from its end on what its program writes. Who waits holds up nobody that it
waits for: a call that is traced waits before its Python runs, for programs that are compiled, and
these wait before their launch for traces alone.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.base import interrupts
from xla_dtensor.base.source_line import user_line
from xla_dtensor.compilation.code.identities import memory_on_host
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.sharing import lock
from xla_dtensor.runtime import processes
from xla_dtensor.tensors.of_form import is_ours

Memory = Mapping[int, Any]
"""Of tensors: what has it, by what tells it from others, which what has it keeps its own."""


def memory_of(tensors: Iterable[Any]) -> dict[int, Any]:
    """The memory of tensors, on the devices and of the CPU; what isn't a tensor has none."""
    found: dict[int, Any] = {}
    for tensor in tensors:
        if is_ours(tensor):
            found[id(tensor._storage_)] = tensor._storage_
        elif isinstance(tensor, torch.Tensor):
            found[memory_on_host(tensor)] = tensor
    return found


under_way: list[FirstCall] = []
"""Those of all threads; changed under `forms.sharing.lock`."""


class FirstCall:
    """A call that traces a step, as a context: until its program is launched, or it has failed."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        # Whether its Python may still run; what it may write.
        self.is_traced = True
        self.writes: dict[int, Any] = {}
        # What other threads' launches have used since it has begun.
        self.launched_on: set[int] = set()
        self._waiting: list[threading.Lock] = []

    @interrupts.atomic
    def __enter__(self) -> FirstCall:
        # With several processes there is no lock from a look to the launch (`sharing.launching`).
        if not processes.several():
            with lock:
                under_way.append(self)
        return self

    @interrupts.atomic
    def __exit__(self, *exc_info: object) -> None:
        with lock:
            if self in under_way:
                under_way.remove(self)
        self.let_go_on()

    @interrupts.atomic
    def only_writes(self, memory: Memory) -> None:
        """The trace is over, and its program writes to this, or needs it as the trace found it."""
        with lock:
            self.is_traced = False
            self.writes = {**memory}
        self.let_go_on()

    def let_go_on(self) -> None:
        """Let those who wait look again."""
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            turn.release()

    @interrupts.interruptible
    def wait(self) -> None:
        """Wait until something of it is over. (A lock for each who waits: one that is interrupted
        leaves nothing behind that others wait for.)"""
        self._turn().acquire()

    @interrupts.atomic
    def _turn(self) -> threading.Lock:
        turn = threading.Lock()
        with lock:
            if self in under_way:
                turn.acquire()
                self._waiting.append(turn)
        return turn


def may_launch(uses: Iterable[int], but_compiled: bool = False) -> FirstCall | None:
    """What a launch of this thread has to wait for, or None: then it launches before
    `forms.sharing.lock`, under which this is asked, is given back.

    Args:
        uses: the memory that it uses.
        but_compiled: it doesn't wait for programs that are being compiled.
    """
    used = set(uses)
    busy = _that_writes(used, True if but_compiled else None)
    if busy is None:
        for call in _of_others():
            call.launched_on |= used
    return busy


def claim(memory: Memory) -> bool:
    """This thread's trace is about to begin, and may write to this: wait for programs that are
    compiled, and write to it.

    Returns:
        whether a launch may have changed what was found of it.
    """
    has_changed = False
    while True:
        with lock:
            busy = _that_writes(memory, traced=False)
            if busy is None:
                return _note(memory) or has_changed
            # What an attempt before this one has claimed: ``busy`` may wait for that.
            own = _of_this_thread()
            for call in own:
                call.writes = {}
        for call in own:
            call.let_go_on()
        busy.wait()
        has_changed = True


def claim_met(memory: Memory, shape: Sequence[int]) -> None:
    """This thread's trace has come to memory that it wasn't known to reach.

    Raises:
        DataDependentError: the program of another thread is about to write to it.
    """
    with lock:
        if _that_writes(memory, traced=False) is not None:
            raise DataDependentError(
                f"the step uses a tensor of shape {list(shape)} that another step, which "
                "another thread calls for the first time, is about to write to: put a lock "
                f"around both calls, or give it the tensor as an argument{user_line()}"
            )
        _note(memory)


def _that_writes(uses: Collection[int], traced: bool | None) -> FirstCall | None:
    """The call of another thread that may write to some of this memory, if it is being traced, if
    it isn't any more, or (None) in either case."""
    for call in _of_others():
        wanted = traced is None or call.is_traced is traced
        if wanted and not call.writes.keys().isdisjoint(uses):
            return call
    return None


def _note(memory: Memory) -> bool:
    """Let this thread's call have this, too; whether others have launched on it."""
    have_launched = False
    for call in _of_this_thread():
        call.writes.update(memory)
        if not call.launched_on.isdisjoint(memory):
            call.launched_on.clear()
            have_launched = True
    return have_launched


def _of_this_thread() -> list[FirstCall]:
    thread = threading.get_ident()
    return [call for call in under_way if call.thread == thread]


def _of_others() -> list[FirstCall]:
    thread = threading.get_ident()
    return [call for call in under_way if call.thread != thread]
