"""What chips can do: memory, FLOP/s and bandwidths, from their makers' tables."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any

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
        peaks: operations per second by what is multiplied (`planning/flops.py` has the names);
            what isn't there takes as long as bfloat16, or longer.
        is_switched: whether a switch is at the other end of its links, and every device of a
            domain is as near as any other; ``link`` is then that of all of them together.
        network: bytes per second in one direction from one chip to other domains: a TPU's slices,
            a GPU's hosts or racks. A host's cards, shared by its chips.
        hosts: how many hosts are a domain, of chips that are switched.
        host: bytes per second in one direction between a chip and the memory of its host.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    link: float
    devices: int
    source: str
    peaks: tuple[tuple[str, float], ...] = ()
    is_switched: bool = False
    network: float = 0.0
    hosts: int = 1
    host: float = 16 * GIGA

    def seconds(self, operations: dict[str, float]) -> float:
        """How long operations take at the least on one of its devices.

        Args:
            operations: how many, by what is multiplied.
        """
        peaks = dict(self.peaks)
        total = sum(count / peaks.get(kind, self.flops) for kind, count in operations.items())
        return total * self.devices


_CLOUD = "https://docs.cloud.google.com/tpu/docs/"

# Google's tables have the bandwidth of all of a chip's links (four in 2D tori, six in 3D ones) in
# both directions together. Of the memory libtpu keeps some to itself; what is left it says when it
# refuses a program (libtpu 0.0.52, 2026-11-22): 15.75 of 16 GiB, 95.73 of 95 "GB", 31.24 of 32, and
# 94.74 on each of the two devices that are a tpu7x. ``network`` is the data-centre network between
# slices, of which the tables have the bandwidth of a chip: 50 Gb/s for v5p, 100 for v6e and tpu7x
# (whose hosts have 4 chips, a host of v6e 8 and four cards of 200 Gb/s); of v5e they have a host's,
# two cards of 100 Gb/s for 8 chips, and a pod's, 6.4 Tb/s for 256. ``host`` isn't in them; the
# scaling book has 16 to 32 GB/s (https://jax-ml.github.io/scaling-book/tpus/), and here it is 16.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            *("v5e", 197 * TERA, 15.75 * GIB, 819 * GIGA, 400 * GIGA / 8, 1, f"{_CLOUD}v5e"),
            *((("int8", 394 * TERA),), False, 25 * GIGA / 8),
        ),
        Chip(
            *("v5p", 459 * TERA, 95.73 * GIB, 2765 * GIGA, 1200 * GIGA / 12, 1, f"{_CLOUD}v5p"),
            *((("int8", 918 * TERA),), False, 50 * GIGA / 8),
        ),
        Chip(
            *("v6e", 918 * TERA, 31.24 * GIB, 1638 * GIGA, 800 * GIGA / 8, 1, f"{_CLOUD}v6e"),
            *((("int8", 1836 * TERA),), False, 100 * GIGA / 8),
        ),
        Chip(
            *("tpu7x", 2307 * TERA, 189.48 * GIB, 7380 * GIGA, 1200 * GIGA / 12, 2),
            *(f"{_CLOUD}tpu7x", (("fp8", 4614 * TERA),), False, 100 * GIGA / 8),
        ),
    )
}

_NVIDIA = "https://www.nvidia.com/en-us/"


def _gpu(
    name: str,
    memory: int,
    bandwidth: float,
    peaks: tuple[float, float, float, float, float, float],
    link: float,
    network: float,
    page: str,
    hosts: int = 1,
    host: float = 64,
) -> Chip:
    """A GPU, of figures in T and G per second; ``peaks`` for fp8, int8, bf16, tf32, fp32, fp64."""
    kinds = ("fp8", "int8", "bf16", "tf32", "fp32", "fp64")
    by_kind = tuple((kind, peak * TERA) for kind, peak in zip(kinds, peaks, strict=True) if peak)
    return Chip(
        *(name, peaks[2] * TERA, memory, bandwidth * GIGA, link * GIGA, 1, _NVIDIA + page),
        *(by_kind, True, network * GIGA, hosts, host * GIGA),
    )


# NVIDIA's tables have what tensor cores do with sparsity, twice what dense products get, and NVLink
# in both directions together. float32 is that of the other cores (products in float32 as it is),
# float64 that of tensor cores. ``memory`` is what the driver says that there is (XLA's descriptions
# of these GPUs, xla/backends/gpu/target_config/specs, have it so). ``network`` is the network card
# that NVIDIA's own machines have for each GPU: DGX A100 200 Gb/s, DGX H100, H200, B200 and GB200
# NVL72 400 Gb/s, DGX B300 and GB300 NVL72 800 Gb/s. Cards without NVLink's switch have the PCIe bus
# for both, 16 lanes of the fifth generation: that is as fast as what they reach can be. ``host`` is
# that bus (A100's is of the fourth generation), and for GB200 and GB300 NVLink-C2C's 450 GB/s,
# which two GPUs share.
GPUS = {
    chip.name: chip
    for chip in (
        _gpu(
            *("a100_40", 42_331_013_120, 1555, (0, 624, 312, 156, 19.5, 19.5), 300, 25),
            *("data-center/a100", 1, 32),
        ),
        _gpu(
            *("a100", 85_100_068_864, 2039, (0, 624, 312, 156, 19.5, 19.5), 300, 25),
            *("data-center/a100", 1, 32),
        ),
        _gpu(
            *("a100_pcie", 79_050_250_240, 1935, (0, 624, 312, 156, 19.5, 19.5), 32, 32),
            *("data-center/a100", 1, 32),
        ),
        _gpu(
            *("h100", 84_942_979_072, 3350, (1979, 1979, 989.5, 494.5, 67, 67), 450, 50),
            "data-center/h100",
        ),
        _gpu(
            *("h100_pcie", 84_942_979_072, 2039, (1513, 1513, 756.5, 378, 51, 51), 64, 64),
            "data-center/h100",
        ),
        _gpu(
            *("h200", 151_397_597_184, 4800, (1979, 1979, 989.5, 494.5, 67, 67), 450, 50),
            "data-center/h200",
        ),
        _gpu(
            *("b200", 191_514_411_008, 8000, (4500, 4500, 2250, 1125, 80, 40), 900, 50),
            "data-center/hgx",
        ),
        _gpu(
            *("b300", 297_021_865_984, 8000, (4500, 4500, 2250, 1125, 80, 1.3), 900, 100),
            "data-center/hgx",
        ),
        _gpu(
            *("gb200", 197_897_748_480, 8000, (5000, 5000, 2500, 1250, 90, 45), 900, 50),
            *("data-center/gb200-nvl72", 18, 225),
        ),
        _gpu(
            *("gb300", 297_021_079_552, 8000, (5000, 5000, 2500, 1250, 90, 1.4), 900, 100),
            *("data-center/gb300-nvl72", 18, 225),
        ),
        _gpu(
            *("rtx6000pro", 103_079_215_104, 1792, (1008, 1008, 504, 252, 126, 2), 64, 64),
            "products/workstations/professional-desktop-gpus/rtx-pro-6000",
        ),
    )
}

# By what JAX's ``device_kind`` has in it, of GPUs that are here.
_DEVICE_KINDS = {
    "A100-SXM4-40GB": "a100_40",
    "A100-SXM4-80GB": "a100",
    "A100 80GB": "a100_pcie",
    "H100 80GB HBM3": "h100",
    "H100 PCIe": "h100_pcie",
    "H200": "h200",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "RTX PRO 6000 Blackwell": "rtx6000pro",
    "TPU v5 lite": "v5e",  # before "TPU v5", which it begins with
    "TPU v5e": "v5e",
    "TPU v5p": "v5p",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def fraction() -> float:
    """The part of a GPU's memory that JAX's allocator takes, and programs have: three quarters,
    unless the environment has JAX's XLA_CLIENT_MEM_FRACTION (or its older name)
    (https://docs.jax.dev/en/latest/gpu_memory_allocation.html)."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    said = next((os.environ[name] for name in names if os.environ.get(name)), "0.75")
    return float(said)


def chip_of(kind: str, device: Any) -> Chip | None:
    """What a topology's devices are, with the memory that programs have; None where no table has
    them.

    Args:
        kind: the topology's.
        device: one of them, JAX's. One that is here says itself how much memory there is.
    """
    if kind in GPUS:
        return replace(GPUS[kind], memory=GPUS[kind].memory * fraction())
    if kind in CHIPS:
        return CHIPS[kind]
    chip, limit = _named(device.device_kind), limit_of(device)
    return chip if chip is None or limit is None else replace(chip, memory=limit * chip.devices)


def hosts_of_domain(device: Any) -> int:
    """How many hosts of a GPU's kind are behind one switch."""
    chip = _named(device.device_kind)
    return 1 if chip is None else chip.hosts


def _named(device_kind: str) -> Chip | None:
    found = (
        {**GPUS, **CHIPS}[name]
        for words, name in _DEVICE_KINDS.items()
        if re.search(rf"\b{re.escape(words)}\b", device_kind)
    )
    return next(found, None)


def limit_of(device: Any) -> float | None:
    """The bytes of memory that JAX's allocator gives programs on a device that is here; None where
    it doesn't say."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else float(limit)
