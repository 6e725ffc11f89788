"""The least time that collectives take, from the bandwidth of the links they use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from xla_dtensor.mesh import device_order
from xla_dtensor.planning.collectives import HloCollective
from xla_dtensor.runtime.chips import Chip


class Links(Protocol):
    """The links between the devices of a mesh."""

    def seconds(self, collective: HloCollective) -> float:
        """How long the collective takes at the least, if nothing else uses its links; latencies
        are left out."""


def links(chip: Chip, devices: np.ndarray, names: Sequence[str]) -> Links:
    """The links of a mesh.

    Args:
        chip: what its devices are.
        devices, names: the mesh, and its dims' names.
    """
    if chip.is_switched:
        return Switched(chip, [domain_of(device, chip) for device in devices.flat])
    every = device_order.extents(devices)
    return Torus({name: Lane(axes, chip) for name, axes in zip(names, every, strict=True)})


@dataclass(frozen=True)
class Lane:
    """The links that a mesh dim's devices talk over, in a torus.

    Attributes:
        axes: for each axis of the torus that the dim extends along whether it closes to a ring. A
            ring is used in both directions by every device; at the end of a line a device has one
            link.
        chip: what the links are of.
    """

    axes: tuple[bool, ...]
    chip: Chip

    @property
    def bandwidth(self) -> float:
        """Bytes per second that come in at the device that has the fewest links."""
        return self.chip.link * sum(2 if ring else 1 for ring in self.axes)


@dataclass(frozen=True)
class Torus:
    """Each chip has links to the next ones, as TPUs have.

    Attributes:
        lanes: by mesh dim.
    """

    lanes: dict[str, Lane]

    def seconds(self, collective: HloCollective) -> float:
        """The usual lower bound of rings (https://jax-ml.github.io/scaling-book/sharding/): each
        device has to get what it lacks over the links of the mesh dims of the collective."""
        lanes = [self.lanes[dim] for dim in collective.dims if dim in self.lanes]
        bandwidth = sum(lane.bandwidth for lane in lanes)
        kind, size, result = collective.kind, collective.size, collective.bytes
        if size < 2 or not bandwidth:
            return 0.0
        if kind in ("all-to-all", "ragged-all-to-all"):
            return result * size / 4 / bandwidth
        if kind in _LACKS:
            return _LACKS[kind](result, size, 1) / bandwidth
        return result / lanes[0].chip.link


# What comes in at a device from outside of its part, of ``size`` devices in parts of ``own``: what
# is gathered, reduced or exchanged, of which the device's part has its share already.
_LACKS = {
    "all-gather": lambda result, size, own: result * (size - own) / size,
    "reduce-scatter": lambda result, size, own: result * (size - own),
    "all-reduce": lambda result, size, own: 2 * result * (size - own) / size,
    "all-to-all": lambda result, size, own: result * (size - own) / size,
    "ragged-all-to-all": lambda result, size, own: result * (size - own) / size,
}


@dataclass(frozen=True)
class Switched:
    """GPUs: all of a domain (a host, or a rack) are linked by a switch, and each has a network card
    of its own to those of other domains.

    Attributes:
        chip: what the devices are.
        domains: of each device, by its position in the mesh.
    """

    chip: Chip
    domains: Sequence[int]

    def seconds(self, collective: HloCollective) -> float:
        """Two bounds, of which the larger holds: what a device lacks has to come over its link to
        the switch; and what all members in a domain lack together has to come over their network
        cards, once."""
        kind, result = collective.kind, collective.bytes
        groups = collective.groups or (tuple(range(len(self.domains))),)
        if kind not in _LACKS:  # pairs
            apart = any(self.domains[a] != self.domains[b] for a, b, *_ in groups if a != b)
            return result / (self.chip.network if apart else self.chip.link)
        size = len(groups[0])
        if size < 2:
            return 0.0
        # A switch can add what passes through it (NVLink SHARP, which NCCL uses by itself): a
        # device sends what it has once, and gets the sum.
        inside = result if kind == "all-reduce" else _LACKS[kind](result, size, 1)
        # A domain that has few members has few cards, and lacks the more.
        own = min(min(Counter(self.domains[i] for i in group).values()) for group in groups)
        outside = _LACKS[kind](result, size, own) / own
        if "all-to-all" in kind:  # of which each member lacks another part
            outside *= own
        return max(inside / self.chip.link, outside / self.chip.network if own < size else 0.0)


def domain_of(device: Any, chip: Chip) -> int:
    """The domain of a GPU, by number: its host, or as many hosts as one switch links."""
    return int(device.process_index // chip.hosts)
