"""The topology of the current ``xd.abstract`` block: devices that needn't be here.

While there is a topology, meshes are of its devices, and new tensors have layouts and no data.
"""

from __future__ import annotations

from typing import Any

from xla_dtensor.base import executor
from xla_dtensor.runtime.topologies import Topology


class _State:
    topology: Topology | None = None


_state = _State()


def current() -> Topology | None:
    """The topology that tensors are laid out for; None where they have data."""
    return _state.topology


def compiler_options(given: dict[str, Any] | None) -> dict[str, Any]:
    """XLA's options for a program: the user's, and what the current topology wants besides."""
    return {**(_state.topology.compiler_options if _state.topology else {}), **(given or {})}


def enter(topology: Topology | None) -> Topology | None:
    """Make ``topology`` the current one, in all threads (autograd has its own); returns the one
    before."""
    before, _state.topology = _state.topology, topology
    executor.choose()
    return before
