"""The coordinator of several processes: a thread of process 0, behind JAX's key-value store.

Each process puts its messages under its own numbers, and all of them read one list of responses,
which is the order of their launches.
"""

from __future__ import annotations

import base64
import logging
import pickle
import threading
from collections.abc import Sequence
from typing import Any

from xla_dtensor.horovod.collectives.requests import Response
from xla_dtensor.horovod.ranks.coordinator import Coordinator
from xla_dtensor.runtime import processes

logger = logging.getLogger("xla_dtensor")

_LISTEN = 0.5  # seconds after which a listening thread sees that the store is closed


def outgoing(generation: int, rank: int, number: int) -> str:
    """The key of a message of a rank to process 0, by its number."""
    return f"horovod/{generation}/out/{rank}/{number}"


def incoming(generation: int, number: int) -> str:
    """The key of a list of responses, which all processes read in the order of its numbers."""
    return f"horovod/{generation}/in/{number}"


def packed(value: Any) -> str:
    """Requests and responses as a text, which is what the store keeps."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    """What `packed` was given."""
    return pickle.loads(base64.b64decode(text))


class Service:
    """Process 0's part: a thread per other process puts its messages into one `Coordinator`.

    Args:
        size: how many processes there are.
        generation: how many times ``hvd.init()`` has been called.
    """

    def __init__(self, size: int, generation: int) -> None:
        self._coordinator = Coordinator(size)
        self._generation = generation
        self._changed = threading.Condition()
        self._published = 0
        self._kept: dict[int, str] = {}
        self._read = dict.fromkeys(range(size), 0)
        self._threads = [
            threading.Thread(target=self._listen, args=(rank,), daemon=True)
            for rank in range(1, size)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, rank: int, text: str) -> bool:
        """A message of a process; whether it is its last."""
        read, items = unpacked(text)
        with self._changed:
            self._read[rank] = read
            found: list[Response] = []
            last = False
            for what, argument in items:
                if what == "submit":
                    found += self._coordinator.submit(rank, argument)
                elif what == "block":
                    found += self._coordinator.block(rank, argument)
                else:
                    found += self._coordinator.end(rank, argument)
                    self._read.pop(rank)
                    last = True
            if found:
                self._publish(found)
            self._forget()
        return last

    def wait_for(self, number: int, seconds: float) -> str | None:
        """Process 0's own way to a list of responses."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._kept, seconds)
            return self._kept.get(number)

    def _publish(self, found: Sequence[Response]) -> None:
        text = packed(found)
        self._kept[self._published] = text
        processes.store().put(incoming(self._generation, self._published), text)
        self._published += 1
        self._changed.notify_all()

    def _forget(self) -> None:
        """What all have read."""
        least = min(self._read.values(), default=self._published)
        for number in [n for n in self._kept if n < least]:
            del self._kept[number]
            processes.store().forget(incoming(self._generation, number))

    def _listen(self, rank: int) -> None:
        store = processes.store()
        number, last = 0, False
        while not last:
            key = outgoing(self._generation, rank, number)
            try:
                text = store.wait_for(key, _LISTEN)
                if text is not None:
                    number += 1
                    last = self.take(rank, text)
                    store.forget(key)
            except Exception as error:
                if store.is_open():
                    logger.warning("horovod's coordinator has lost process %d: %s", rank, error)
                return
