"""Coordinates the processes that save one checkpoint, and decides when all of them save or stop.

Saving goes on in a thread of its own, in each process at its own pace, so this keeps clear of the
numbered steps in which the processes compare what they do (`xla_dtensor.runtime.agreement`): each
save has a name in JAX's key-value store, below which everything is.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import pickle
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from xla_dtensor.base.torch_private import DistWrapper
from xla_dtensor.errors import CheckpointError
from xla_dtensor.runtime import agreement, processes

RANDOM = "random"
"""The entry with the state of the random number generators, of each process its own."""

_PIECE = 2**19  # characters of a value in the store, whose messages are limited to 4 MiB
_LISTEN = 0.5  # seconds between two looks whether another process has failed
_LEAVE = 30.0  # seconds that process 0 gives the others to leave a checkpoint that has failed
_BLOCK = 1000  # decisions after which the earlier ones are forgotten

_numbers = itertools.count()


class Together:
    """One save of several processes; in a single one, of that alone.

    Args:
        name: the same in all processes, and of this save alone.
    """

    def __init__(self, name: str) -> None:
        self._key = f"checkpoints/{name}"
        self.first = processes.index() == 0
        self._told = False

    def gather(self, what: str, own: Any) -> list[Any]:
        """In process 0 what each process gives; in the others nothing.

        Raises:
            CheckpointError: another process has failed.
        """
        if not processes.several():
            return [own]
        if not self.first:
            self._put(f"{what}/{processes.index()}", own)
            return []
        return [own, *(self._get(f"{what}/{i}") for i in range(1, processes.count()))]

    def scatter(self, what: str, parts: list[Any]) -> Any:
        """What process 0 has for this one: ``parts``, which it alone has, by process.

        Raises:
            CheckpointError: another process has failed.
        """
        if self.first:
            for i in range(1, processes.count()):
                self._put(f"{what}/{i}", parts[i])
            return parts[0]
        return self._get(f"{what}/{processes.index()}")

    def share(self, what: str, value: Any = None) -> Any:
        """What process 0 says, in all.

        Raises:
            CheckpointError: another process has failed.
        """
        return self.scatter(what, [value] * processes.count() if self.first else [])

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others if the block raises, so that they don't wait. In process 0 wait, before
        it raises, until none of them writes any more: what was written can be removed."""
        store, me = (processes.store(), processes.index()) if processes.several() else (None, 0)
        try:
            yield
        except BaseException as error:
            if store is not None and not self._told:
                self._told = True
                text = f"{processes.known(me)}: {error or type(error).__name__}"
                store.put(f"{self._key}/failed/{me}", text)
                if self.first:
                    self._wait_until_left()
            raise
        finally:
            if store is not None and not self.first:
                store.put(f"{self._key}/left/{me}", "left")

    def _wait_until_left(self) -> None:
        end = time.monotonic() + _LEAVE
        for i in range(1, processes.count()):
            while time.monotonic() < end:
                if processes.store().wait_for(f"{self._key}/left/{i}", _LISTEN) is not None:
                    break

    def forget(self) -> None:
        """Remove what was said. All processes must have come further."""
        if processes.several() and self.first:
            processes.store().forget(self._key)

    def _put(self, what: str, value: Any) -> None:
        text = base64.b85encode(pickle.dumps(value)).decode()
        pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
        store = processes.store()
        for i, piece in enumerate(pieces):
            store.put(f"{self._key}/{what}/{i}", piece)
        store.put(f"{self._key}/{what}/count", str(len(pieces)))

    def _get(self, what: str) -> Any:
        """What another process of this program has said in this save; it comes from nowhere else,
        so it may be pickled."""
        count = int(self._wait_for(f"{self._key}/{what}/count"))
        text = "".join(self._wait_for(f"{self._key}/{what}/{i}") for i in range(count))
        return pickle.loads(base64.b85decode(text))

    def _wait_for(self, key: str) -> str:
        store = processes.store()
        while True:
            text = store.wait_for(key, _LISTEN)
            if text is not None:
                return text
            # A process that is gone ends this one, see `xla_dtensor.runtime.heartbeats`.
            failed = store.all_of(f"{self._key}/failed")
            if failed:
                raise CheckpointError(next(iter(failed.values())))


_calls: Counter[tuple[str, str]] = Counter()


def of_call(what: str, place: str) -> Together:
    """All processes in one call of ``torch.distributed.checkpoint``. They make the same calls with
    the same place in the same order, while calls for other places may go on in other threads."""
    _calls[what, place] += 1
    return Together(f"dcp/{what}/{quote(place, safe='')}/{_calls[what, place]}")


class Collectives(DistWrapper):
    """What ``torch.distributed.checkpoint`` asks of a process group, without one; errors of one
    process are all processes', as torch has it.

    Args:
        together: the processes.
    """

    def __init__(self, together: Together) -> None:
        super().__init__(None, False, 0)
        self._together = together
        self._turns = itertools.count()
        self.rank, self.is_coordinator = processes.index(), together.first

    def get_world_size(self) -> int:
        return processes.count()

    def broadcast_object(self, object: Any) -> Any:
        return self._together.share(f"turn/{next(self._turns)}", object)

    def gather_object(self, object: Any) -> list[Any] | None:
        found = self._together.gather(f"turn/{next(self._turns)}", object)
        return found if self.is_coordinator else None

    def all_gather_object(self, object: Any) -> list[Any]:
        return self.broadcast_object(self.gather_object(object))

    def scatter_object(self, object_list: list[Any] | None) -> Any:
        return self._together.scatter(f"turn/{next(self._turns)}", object_list or [])

    def barrier(self) -> None:
        self.all_gather_object(None)


class OwnParts(DefaultSavePlanner):
    """torch's planner; what is no shard is process 0's, but for what is below `RANDOM`."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if processes.index():
            plan.items[:] = [
                item
                for item in plan.items
                if item.type == WriteItemType.SHARD or item.index.fqn.startswith(f"{RANDOM}.")
            ]
        return plan


class Decisions:
    """Whether all processes save and stop after a step: process 0 decides, and hears of the signals
    that have come to the others. It costs a question to the key-value store and an answer."""

    def __init__(self) -> None:
        self._key = f"checkpoints/decisions/{next(_numbers)}"
        self._number = 0

    def take(self, due: bool, reason: str | None) -> tuple[bool, str | None]:
        """What holds for all after the next step.

        Args:
            due: whether a save is due; process 0's counts.
            reason: why this process has to stop, or None.
        """
        if not processes.several():
            return due, reason
        store, me = processes.store(), processes.index()
        block, number = divmod(self._number, _BLOCK)
        self._number += 1
        if number == 0 and block:
            agreement.meet(f"has come to the step {self._number - 1} of a CheckpointManager")
            if me == 0:
                store.forget(f"{self._key}/{block - 1}")
        key = f"{self._key}/{block}/{number}"
        if me == 0:
            wishes = store.all_of(f"{self._key}/wishes")
            reason = reason or next(iter(wishes.values()), None)
            store.put(key, json.dumps([due, reason]))
            return due, reason
        if reason is not None:
            store.put(f"{self._key}/wishes/{me}", reason, again=True)
        while (text := store.wait_for(key, _LISTEN)) is None:
            pass  # a process 0 that is gone ends this one
        due, reason = json.loads(text)
        return due, reason
