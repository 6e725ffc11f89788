"""Whether devices that aren't here are laid out for: the state behind ``xd.abstract``.

While there is a topology, meshes are of its devices, and new tensors have layouts and no data.
"""

from __future__ import annotations

from xla_dtensor.base import executor
from xla_dtensor.runtime.topologies import Topology


class _State:
    topology: Topology | None = None


_state = _State()


def current() -> Topology | None:
    """The topology that is laid out for; None where tensors have data."""
    return _state.topology


def enter(topology: Topology | None) -> Topology | None:
    """Lay out for ``topology`` from now on, in all threads (autograd has its own); what was laid
    out for before."""
    before, _state.topology = _state.topology, topology
    executor.choose()
    return before
