"""The least time that collectives take, from the bandwidth of the links they use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from xla_dtensor.mesh import device_order
from xla_dtensor.mesh.domains import domains
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
    numbers = domains(list(devices.flat))
    if chip.is_switched:
        return Switched(chip, numbers)
    every = device_order.extents(devices)
    inside = Torus({name: Lane(axes, chip) for name, axes in zip(names, every, strict=True)})
    return inside if len(set(numbers)) == 1 else Slices(inside, chip, numbers)


@dataclass(frozen=True)
class Lane:
    """The links that a mesh dim's devices talk over, in a torus.

    Attributes:
        axes: those of the torus that the dim extends along.
        chip: what the links are of.
    """

    axes: tuple[device_order.Extent, ...]
    chip: Chip

    @property
    def bandwidth(self) -> float:
        """Bytes per second that come in at the device that has the fewest links."""
        return sum(map(self.along, self.axes))

    def along(self, axis: device_order.Extent) -> float:
        """Of these what comes in along an axis. A ring is used in both directions by every device;
        at the end of a line a device has one link."""
        return self.chip.link * (2 if axis.is_ring else 1)

    def exchange(self, nbytes: float) -> float:
        """Seconds that an exchange of so many bytes of each device takes at the least: half of them
        go from one half of an axis to the other, in both directions (the book's section on
        AllToAll: of axes of one size the bytes of all times an axis' length, divided by four times
        the devices)."""
        return max(nbytes * axis.length / 4 / self.along(axis) for axis in self.axes)


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
            return max(lane.exchange(result) for lane in lanes if lane.axes)
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


def slow_bytes(collective: HloCollective, numbers: Sequence[int]) -> float:
    """What has to come in at a device over the slow network between domains: what all members in a
    domain lack together, once, over the cards of all of them.

    Args:
        numbers: the domain of each device, by its position in the mesh.
    """
    kind, result = collective.kind, collective.bytes
    groups = collective.groups or (tuple(range(len(numbers))),)
    if kind not in _LACKS:  # pairs
        apart = any(numbers[a] != numbers[b] for a, b, *_ in groups if a != b)
        return float(result) if apart else 0.0
    size = len(groups[0])
    # A domain that has few members has few cards, and lacks the more.
    own = min(min(Counter(numbers[i] for i in group).values()) for group in groups)
    if own == size:
        return 0.0
    lacking = float(_LACKS[kind](result, size, own))
    # Of an exchange each member lacks another part; and TPUs' hosts send what each chip asks for.
    return lacking if "all-to-all" in kind or collective.between_slices else lacking / own


@dataclass(frozen=True)
class Slices:
    """TPUs in several slices: a torus each, and the data-centre network between hosts.

    Attributes:
        inside: a slice's links.
        chip: what the devices are.
        numbers: the slice of each, by its position in the mesh.
    """

    inside: Torus
    chip: Chip
    numbers: Sequence[int]

    def seconds(self, collective: HloCollective) -> float:
        """Of what a compiled program does the slice's links or the network, since the compiler has
        a collective of its own for each; else the slower of the two."""
        over = slow_bytes(collective, self.numbers) / (self.chip.network / self.chip.devices)
        return over if collective.between_slices else max(over, self.inside.seconds(collective))


@dataclass(frozen=True)
class Switched:
    """GPUs: all of a domain (a host, or a rack) are linked by a switch, and each has a network card
    of its own to those of other domains.

    Attributes:
        chip: what the devices are.
        numbers: the domain of each device, by its position in the mesh.
    """

    chip: Chip
    numbers: Sequence[int]

    def seconds(self, collective: HloCollective) -> float:
        """Two bounds, of which the larger holds: what a device lacks has to come over its link to
        the switch; and what all members in a domain lack together has to come over their network
        cards, once."""
        kind, result = collective.kind, collective.bytes
        over = slow_bytes(collective, self.numbers) / self.chip.network
        if kind not in _LACKS:  # pairs
            return over or result / self.chip.link
        size = len(collective.groups[0]) if collective.groups else len(self.numbers)
        if size < 2:
            return 0.0
        # A switch can add what passes through it (NVLink SHARP, which NCCL uses by itself): a
        # device sends what it has once, and gets the sum.
        inside = result if kind == "all-reduce" else _LACKS[kind](result, size, 1)
        return max(inside / self.chip.link, over)
