"""Ranks that are threads of one process, one per device, of which one runs at a time.

A thread runs until it waits for another, so a run is the same every time, and each has random
numbers of its own, as processes have. What all have come to is one collective of XLA's on the
devices.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from xla_dtensor.base.random import rng
from xla_dtensor.errors import HorovodInternalError, UnsupportedOpError
from xla_dtensor.horovod.collectives.requests import Response
from xla_dtensor.horovod.ranks.coordinator import Coordinator
from xla_dtensor.horovod.ranks.fusion import Waiting
from xla_dtensor.horovod.ranks.launches import Launches
from xla_dtensor.horovod.ranks.ranked import Ranked, RankedHandle


class Turns:
    """Lets one of the threads run, with its own random numbers, while the others wait.

    Args:
        size: how many threads there are.
    """

    def __init__(self, size: int) -> None:
        self._events = [threading.Event() for _ in range(size)]
        self._states = [_random_state() for _ in range(size)]
        self.is_over = False

    def begin(self, rank: int) -> None:
        """Wait for a thread's first turn."""
        self._events[rank].wait()
        self._events[rank].clear()
        _set_random_state(self._states[rank])

    def give(self, rank: int) -> None:
        """Let a thread run; the caller does nothing any more until `begin`."""
        self._events[rank].set()

    def change(self, rank: int, to: int) -> None:
        """Let another thread run, and wait for the next turn."""
        if to != rank:
            self._states[rank] = _random_state()
            self.give(to)
            self.begin(rank)
        if self.is_over:
            raise HorovodInternalError(f"rank {rank} ends, since the run was interrupted")


def _random_state() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state(), rng.get_state()


def _set_random_state(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
    rng.set_state(state[3])


class Rendezvous:
    """Where the threads' collectives come together. Only the thread whose turn it is calls it, so
    nothing is locked.

    Args:
        devices: by rank, its JAX device.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self.size = len(devices)
        self.turns = Turns(self.size)
        self._coordinator = Coordinator(self.size)
        self._launches = Launches(range(self.size), devices)
        self._waiting = Waiting()
        self._blocked: dict[int, RankedHandle] = {}
        self._ended: set[int] = set()

    def submit(self, rank: int, handle: RankedHandle) -> None:
        """A rank has come to a collective."""
        self._launches.put(rank, handle)
        self._take(self._coordinator.submit(rank, handle.request))

    def wait(self, rank: int, handle: RankedHandle) -> None:
        """Let the others run until the response is there."""
        while handle.response is None:
            if self._waiting:
                self._launch()
                continue
            self._blocked[rank] = handle
            self._take(self._coordinator.block(rank, handle.request.key))
            if handle.response is None and not self._waiting:
                self.turns.change(rank, self._next(rank))
            del self._blocked[rank]
        self._coordinator.unblock(rank)

    def look(self, rank: int, handle: RankedHandle) -> bool:
        """Whether the response is there; if not, the others have a turn."""
        if self._waiting:
            self._launch()
        if handle.response is None:
            self.turns.change(rank, self._next(rank))
        return handle.response is not None

    def end(self, rank: int, why: str) -> None:
        """A rank has come to its end; another one has its turn."""
        self._ended.add(rank)
        self._take(self._coordinator.end(rank, why))
        if self._waiting:
            self._launch()
        if len(self._ended) < self.size:
            self.turns.give(self._next(rank))

    def _next(self, rank: int) -> int:
        """Who can go on, after ``rank``. There is somebody: if all waited, the coordinator would
        have found it."""
        order = [(rank + i) % self.size for i in range(1, self.size + 1)]
        return next(r for r in order if self._can_run(r))

    def _can_run(self, rank: int) -> bool:
        handle = self._blocked.get(rank)
        return rank not in self._ended and (
            handle is None or handle.response is not None or self.turns.is_over
        )

    def _take(self, responses: Sequence[Response]) -> None:
        for response in responses:
            if not response.is_launched:
                self._launches.deliver(response)
            elif self._waiting.add(response):
                self._launch()

    def _launch(self) -> None:
        for batch in self._waiting.take():
            self._launches.launch(batch)


class Thread(Ranked):
    """A rank that is a thread of `run`.

    Args:
        rank: its number.
        rendezvous: where it meets the others.
    """

    def __init__(self, rank: int, rendezvous: Rendezvous) -> None:
        super().__init__(rank, rendezvous.size)
        self.local_size = rendezvous.size
        self._rendezvous = rendezvous

    @property
    def local_rank(self) -> int:
        return self._rank

    @property
    def mesh(self) -> NoReturn:
        raise UnsupportedOpError(
            "hvd.mesh() in hvd.run: each thread is one rank, with one device; a mesh is a process's"
        )

    def on_devices(self, value: torch.Tensor) -> torch.Tensor:
        return value.to("xla")

    def send(self, handle: RankedHandle) -> None:
        self._rendezvous.submit(self._rank, handle)

    def wait(self, handle: RankedHandle) -> None:
        self._rendezvous.wait(self._rank, handle)

    def look(self, handle: RankedHandle) -> bool:
        return self._rendezvous.look(self._rank, handle)
