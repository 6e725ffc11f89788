"""The processes of the program: which one this is, and JAX's key-value store between them.

One process that nobody launched with others is the only one of itself; then nothing here does
anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from xla_dtensor.base import executor, jax_private


@dataclass(frozen=True)
class Process:
    """One of the processes.

    Attributes:
        index: its number.
        host: the name of the machine.
        pid: its number there.
        facts: what all have to have in common: versions of libraries.
    """

    index: int
    host: str
    pid: int
    facts: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"process {self.index} on {self.host} (pid {self.pid})"


class Store:
    """JAX's key-value store under a prefix.

    Args:
        client: JAX's distributed client.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def is_open(self) -> bool:
        """Whether nobody has shut JAX's distributed runtime down."""
        return jax_private.global_state.client is self._client

    def put(self, key: str, value: str, *, again: bool = False) -> None:
        """Set a key; ``again`` if it may have a value."""
        self._client.key_value_set(f"xla_dtensor/{key}", value, allow_overwrite=again)

    def wait_for(self, key: str, seconds: float) -> str | None:
        """The value of a key, once it has one; None if it has none in that time."""
        try:
            return self._client.blocking_key_value_get(f"xla_dtensor/{key}", int(seconds * 1000))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def look(self, key: str) -> str | None:
        """The value of a key; None if it has none yet."""
        try:
            return self._client.key_value_try_get(f"xla_dtensor/{key}")
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def all_of(self, folder: str) -> dict[str, str]:
        """The keys below a folder, without its name, and their values."""
        start = f"xla_dtensor/{folder}/"
        return {
            key.partition(start)[2]: value for key, value in self._client.key_value_dir_get(start)
        }

    def forget(self, key: str) -> None:
        """Remove a key and those below it."""
        self._client.key_value_delete(f"xla_dtensor/{key}")


class _State:
    index = 0
    count = 1
    table: tuple[Process, ...] = ()
    store: Store | None = None
    coordinator = ""


_state = _State()


def join(index: int, table: tuple[Process, ...], store: Store, coordinator: str) -> None:
    """Note that this is one of several processes, which process 0 coordinates at an address."""
    _state.coordinator = coordinator
    _state.index, _state.table, _state.store = index, table, store
    _state.count = len(table)
    executor.choose()


def several() -> bool:
    """Whether there are other processes."""
    return _state.count > 1


def index() -> int:
    """The number of this process."""
    return _state.index


def count() -> int:
    """How many processes there are."""
    return _state.count


def known(index: int) -> Process:
    """Who a process is."""
    return _state.table[index]


def coordinator() -> str:
    """``"host:port"``, where process 0 coordinates the others."""
    return _state.coordinator


def store() -> Store:
    """The key-value store that all have; only where there are several."""
    assert _state.store is not None
    return _state.store
