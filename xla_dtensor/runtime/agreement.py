"""Compares what several processes are about to compile or read: differences raise, not hang.

A program that only some processes compile, or that they compile in another order, would leave them
waiting for each other in its collectives. So before it is compiled, each process says what it is as
its n-th, and compares with process 0, which compares with all. Where one has to wait for another,
the other's last program is logged.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable

from xla_dtensor.base.config import config
from xla_dtensor.base.random import rng
from xla_dtensor.base.source_line import user_line
from xla_dtensor.errors import DivergenceError
from xla_dtensor.runtime import heartbeats, last_words, processes
from xla_dtensor.runtime.idle import is_idle

logger = logging.getLogger("xla_dtensor")

_TELL = 10  # seconds after which a process says whom it waits for
_lock = threading.Lock()


class _Sequence:
    number = 0


_sequence = _Sequence()


def every_launch() -> bool:
    """Whether launches are compared, too."""
    return config.check_processes == "launches" and processes.several()


def checks_values() -> bool:
    """Whether values that all processes have to have are compared where that is cheap."""
    return config.check_processes != "programs" and processes.several()


_SAME_PROGRAM = (
    "All have to execute the same operations on the same meshes in the same order; what one alone "
    "does may use CPU tensors, or .local_shards and .local_values()"
)


def agree(what: str | Callable[[], str], advice: str = _SAME_PROGRAM) -> None:
    """Go on if all processes come to this point with the same.

    Args:
        what: what the process is about to do; a function is called where there are several.
        advice: what to do about it, for the end of the message.

    Raises:
        DivergenceError: another process is about to do something else, or has ended.
    """
    if not processes.several():
        return
    with _lock:
        _sequence.number += 1
        _compare(_sequence.number, what if isinstance(what, str) else what(), advice)


def meet(what: str) -> None:
    """Go on once all processes have come to this point.

    Raises:
        DivergenceError: another process does something else, or has ended.
    """
    # The others go on when process 0 has seen all.
    agree(what)
    agree(f"{what}, and goes on")


def texts_of_all(what: str, own: str) -> list[str]:
    """A text of each process, in all of them.

    Args:
        what: what they are for, the same in all.
        own: this process's.

    Raises:
        DivergenceError: another process does something else, or has ended.
    """
    if not processes.several():
        return [own]
    store = processes.store()
    agree(what)
    key = f"texts/{_sequence.number}"
    store.put(f"{key}/{processes.index()}", own)
    found = []
    for index in range(processes.count()):
        text = None
        while text is None:
            text = store.wait_for(f"{key}/{index}", 1)
            if text is None and heartbeats.has_ended(index):
                raise DivergenceError(
                    f"{processes.known(index)} has ended, where the others wait for it: {what}"
                )
        found.append(text)
    meet(f"{what}, and has got all")
    if processes.index() == 0:
        store.forget(key)
    return found


def share_seeds() -> None:
    """Let fresh seeds be process 0's in all processes."""

    def shared(make: Callable[[], int]) -> int:
        return int(texts_of_all("draws a fresh seed", str(make()))[0])

    rng.share_seeds(shared)


def _compare(number: int, what: str, advice: str) -> None:
    store, me = processes.store(), processes.index()
    line = user_line().strip()
    store.put(f"program/{number}/{me}", json.dumps([what, line]))
    others = range(1, processes.count()) if me == 0 else [0]
    for other in others:
        theirs, their_line = _of(number, other, what, line)
        if theirs != what:
            text = _message(number, me, what, line) + _message(number, other, theirs, their_line)
            raise DivergenceError(
                f"the processes don't do the same in their step {number}:{text}\n{advice}"
            )
    if me == 0 and number > 2:
        # All have put this one, so they have read the one before.
        store.forget(f"program/{number - 2}")


def _message(number: int, index: int, what: str, line: str) -> str:
    return f"\n{processes.known(index)}: {what}" + (f"\n  {line}" if line else "")


def _of(number: int, other: int, what: str, line: str) -> tuple[str, str]:
    """What another process does in a step, and where."""
    store = processes.store()
    waited = 0
    while True:
        text = store.wait_for(f"program/{number}/{other}", 1)
        if text is not None:
            found = json.loads(text)
            return found[0], found[1]
        if heartbeats.has_ended(other):
            return "has come to the end of its program", ""
        waited += 1
        there = heartbeats.where(other)
        if there is None:
            continue
        if there.reads_for > heartbeats.STUCK < waited and is_idle():
            # Nothing that this process has launched is left to wait for.
            return "waits for what all processes can compute together only", there.line
        if waited % _TELL == 0 and not last_words.are_said():
            logger.warning(
                "xla_dtensor: process %d, which %s%s, has waited %d s for process %d%s",
                processes.index(),
                what,
                f" {line}" if line else "",
                waited,
                other,
                f", which is {there.line}" if there.line else "",
            )
