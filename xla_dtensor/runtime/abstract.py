"""The topology of the current ``xd.abstract`` block: devices that needn't be here.

While there is a topology, meshes are of its devices, and new tensors have layouts and no data.
"""

from __future__ import annotations

import threading
from typing import Any

from xla_dtensor.base import executor
from xla_dtensor.errors import TopologyError
from xla_dtensor.runtime import xla_flags
from xla_dtensor.runtime.topologies import Topology


class _State:
    """The topology is the process's, since autograd runs in threads of its own, and belongs to the
    thread whose blocks are open."""

    topology: Topology | None = None
    thread: threading.Thread | None = None


_state = _State()
_entering = threading.Lock()


def current() -> Topology | None:
    """The topology that tensors are laid out for; None where they have data."""
    return _state.topology


def compiler_options(given: dict[str, Any] | None) -> dict[str, Any]:
    """XLA's options for a program: the user's, and what the current topology wants besides."""
    topology = _state.topology
    own: dict[str, Any] = {} if topology is None else topology.compiler_options
    if topology is not None and topology.is_of_gpus:  # as on GPUs that are here
        own |= {xla_flags.EXCESS_PRECISION: False, **xla_flags.options(*xla_flags.PIPELINED)}
    return {**own, **(given or {})}


def enter(topology: Topology) -> Topology | None:
    """Make ``topology`` the current one, in all threads; returns the one before.

    Raises:
        TopologyError: another thread is in such a block.
    """
    with _entering:
        if _state.thread not in (None, threading.current_thread()):
            raise TopologyError(
                f"xd.abstract in the thread {threading.current_thread().name!r} while the thread "
                f"{_state.thread.name!r} is in such a block: it holds for all threads of a process "
                "(autograd has its own), so two would take each other's devices. Plan one after "
                "the other, or in processes"
            )
        before = _state.topology
        _make_current(topology)
    return before


def leave(before: Topology | None) -> None:
    """Make ``before``, which `enter` has returned, the current one again."""
    with _entering:
        _make_current(before)


def _make_current(topology: Topology | None) -> None:
    _state.topology = topology
    _state.thread = None if topology is None else threading.current_thread()
    executor.choose()
