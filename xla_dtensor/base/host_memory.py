"""Whether state that an optimizer creates like its parameters goes to the host's memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _ThreadState(threading.local):
    memory: str | None = None


_state = _ThreadState()


def of_states() -> str | None:
    """JAX's name of the memory that tensors made like others rest in; None for the devices'."""
    return _state.memory


@contextlib.contextmanager
def resting_in(memory: str) -> Iterator[None]:
    """For a block, tensors that are made like others (``torch.zeros_like``) rest in ``memory``."""
    before, _state.memory = _state.memory, memory
    try:
        yield
    finally:
        _state.memory = before
