"""Whether operations are being traced in this thread, and by whom."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from xla_dtensor.storage import Storage


class Trace(Protocol):
    """What is told about storages while operations run on JAX tracers instead of executables."""

    def created(self, storage: Storage) -> None:
        """A storage was made inside the trace."""

    def reading(self, storage: Storage) -> None:
        """A storage's array is about to be used."""

    def writing(self, storage: Storage) -> None:
        """A storage is about to get a new value."""

    def random_key(self) -> Any:
        """A fresh JAX PRNG key for a random operation."""

    def host_tensor(self, tensor: Any) -> Any:
        """The array of a CPU tensor that takes part in an operation."""

    def refuse(self, what: str) -> None:
        """Raise because ``what`` needs a value that doesn't exist while tracing."""


class _ThreadState(threading.local):
    trace: Trace | None = None


_state = _ThreadState()


def current() -> Trace | None:
    """The trace that is active in this thread."""
    return _state.trace


class active:
    """Make ``trace`` the active one for a block (None suspends tracing)."""

    def __init__(self, trace: Trace | None) -> None:
        self._trace = trace

    def __enter__(self) -> Trace | None:
        self._outer = _state.trace
        _state.trace = self._trace
        return self._trace

    def __exit__(self, *exc_info: object) -> None:
        _state.trace = self._outer
