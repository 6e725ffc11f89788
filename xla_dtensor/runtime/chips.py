"""What chips can do, from their makers' tables, and how long a program takes them at the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from xla_dtensor.base.config import config
from xla_dtensor.runtime import abstract

TERA, GIGA, GIB = 1e12, 1e9, 2**30


@dataclass(frozen=True)
class Chip:
    """One kind of chip.

    Attributes:
        name: as topologies call it.
        flops: bfloat16 operations per second of a chip.
        memory: bytes of its high-bandwidth memory that a program can have.
        memory_bandwidth: bytes per second.
        link: bytes per second in one direction over one link.
        devices: how many JAX devices it is.
        source: where these figures are from.
        is_switched: whether a switch is at the other end of its links, and every device of a
            machine is as near as any other; ``link`` is then that of all of them together.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    link: float
    devices: int
    source: str
    is_switched: bool = False


_CLOUD = "https://docs.cloud.google.com/tpu/docs/"

# Google's tables have the bandwidth of all of a chip's links (four in 2D tori, six in 3D ones) in
# both directions together. Of the memory libtpu keeps some to itself; what is left it says when it
# refuses a program (libtpu 0.0.52, 2026-11-22): 15.75 of 16 GiB, 95.73 of 95 "GB", 31.24 of 32, and
# 94.74 on each of the two devices that are a tpu7x.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197 * TERA, 15.75 * GIB, 819 * GIGA, 400 * GIGA / 8, 1, f"{_CLOUD}v5e"),
        Chip("v5p", 459 * TERA, 95.73 * GIB, 2765 * GIGA, 1200 * GIGA / 12, 1, f"{_CLOUD}v5p"),
        Chip("v6e", 918 * TERA, 31.24 * GIB, 1638 * GIGA, 800 * GIGA / 8, 1, f"{_CLOUD}v6e"),
        Chip(
            "tpu7x", 2307 * TERA, 189.48 * GIB, 7380 * GIGA, 1200 * GIGA / 12, 2, f"{_CLOUD}tpu7x"
        ),
    )
}

_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

# NVIDIA's tables have bfloat16 with sparsity, twice what dense products get, and NVLink in both
# directions together. By what JAX's ``device_kind`` has in it.
GPUS = {
    chip.name: chip
    for chip in (
        Chip(
            "A100-SXM4-40GB", 312 * TERA, 40e9, 1555 * GIGA, 300 * GIGA, 1, f"{_NVIDIA}a100", True
        ),
        Chip(
            "A100-SXM4-80GB", 312 * TERA, 80e9, 2039 * GIGA, 300 * GIGA, 1, f"{_NVIDIA}a100", True
        ),
        Chip(
            "H100 80GB HBM3", 989 * TERA, 80e9, 3350 * GIGA, 450 * GIGA, 1, f"{_NVIDIA}h100", True
        ),
        Chip("H200", 989 * TERA, 141e9, 4800 * GIGA, 450 * GIGA, 1, f"{_NVIDIA}h200", True),
    )
}


def chip_of(kind: str, device: Any) -> Chip | None:
    """What a topology's devices are; None where no table has them.

    Args:
        kind: the topology's.
        device: one of them, JAX's. Of a GPU it says itself how much memory programs can have.
    """
    if kind != "gpu":
        return CHIPS.get(kind)
    chip = next((chip for name, chip in GPUS.items() if name in device.device_kind), None)
    limit = _limit(device)
    return chip if chip is None or limit is None else replace(chip, memory=limit)


def _limit(device: Any) -> float | None:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else float(limit)


def memory_of(device: Any) -> float | None:
    """The bytes of a device's memory that a program may have: what ``xd.config.device_memory``
    says, else what there are; None if nobody knows, and of simulated devices.

    Args:
        device: JAX's, here or in the current ``xd.abstract`` block.
    """
    if config.device_memory is not None:
        return config.device_memory
    topology = abstract.current()
    if topology is not None:
        chip = chip_of(topology.kind, device)
        return None if chip is None else chip.memory / chip.devices
    if device.platform == "cpu":
        return None
    limit = _limit(device)
    # To two digits: devices of one kind differ by what else is on them, and processes that compute
    # together have to choose alike.
    return None if limit is None else float(f"{limit:.1e}")


@dataclass(frozen=True)
class Lane:
    """The links that a mesh dim's devices talk over.

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


def seconds(kind: str, result_bytes: int, size: int, lanes: Sequence[Lane]) -> float:
    """How long a collective takes at the least, if nothing else uses its links.

    Each device has to get what it doesn't have over the links of the mesh dims that the collective
    lies along. That is the usual lower bound of rings
    (https://jax-ml.github.io/scaling-book/sharding/); latencies are left out.

    Args:
        kind: of the collective.
        result_bytes: of its result on a device.
        size: devices in a group.
        lanes: of its mesh dims.
    """
    bandwidth = sum(lane.bandwidth for lane in lanes)
    if size < 2 or not bandwidth:
        return 0.0
    others = (size - 1) / size
    if kind == "all-gather":
        return result_bytes * others / bandwidth
    if kind == "reduce-scatter":
        return result_bytes * size * others / bandwidth
    if kind == "all-reduce":
        return 2 * result_bytes * others / bandwidth
    if kind in ("all-to-all", "ragged-all-to-all"):
        return result_bytes * size / 4 / bandwidth
    return result_bytes / lanes[0].chip.link
