"""Which devices share a fast network, and which dims of a mesh lie across the slow one.

A TPU's slices are linked by the data-centre network, GPUs' hosts (or racks) by network cards. Both
are an order of magnitude slower than what links devices inside: that is a *domain* here. So the
dims of a mesh that move least should lie across: `init_device_mesh` takes the outermost ones.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from xla_dtensor.base.source_line import user_frame
from xla_dtensor.runtime import abstract
from xla_dtensor.runtime.chips import hosts_of_domain

# What dims are called along which every layer moves activations.
_CHATTY = frozenset({"tp", "mp", "sp", "cp", "model", "tensor", "context", "sequence"})


def domains(devices: Sequence[Any]) -> list[int]:
    """The number of the domain that each device is in.

    Args:
        devices: JAX's. Simulated ones are in domains where the current topology says so.
    """
    topology = abstract.current()
    if topology is not None and topology.slices > 1 and topology.is_here:
        each = len(topology.devices) // topology.slices
        place = {id(device): i // each for i, device in enumerate(topology.devices)}
        return [place[id(device)] for device in devices]
    if devices[0].platform == "tpu":
        return [int(getattr(device, "slice_index", None) or 0) for device in devices]
    if devices[0].platform in ("gpu", "cuda"):
        if _are_here(devices[0]):  # a host may have a process for each
            return [int(getattr(device, "slice_index", None) or 0) for device in devices]
        hosts = hosts_of_domain(devices[0])
        return [int(device.process_index // hosts) for device in devices]
    return [0] * len(devices)


def _are_here(device: Any) -> bool:
    """Whether JAX computes on a device and its like: GPUs then know which of them NVLink links,
    as their processes have told each other; those that are described to a compiler don't."""
    import jax

    return getattr(device, "client", None) is jax.devices()[0].client


def across(shape: Sequence[int], numbers: Sequence[int]) -> tuple[int, ...]:
    """Of each dim of a mesh how many domains lie along it, if the outermost dims lie across.

    Args:
        shape: of the mesh.
        numbers: its devices' domains, in any order.

    Returns:
        sizes that divide the mesh's and multiply to the number of domains; all 1 where domains
        have different numbers of devices, or there is one.
    """
    members = Counter(numbers)
    left = len(members) if len(set(members.values())) == 1 else 1
    found = []
    for size in shape:
        found.append(math.gcd(size, left))
        left //= found[-1]
    return tuple(found)


def inside(numbers: np.ndarray) -> tuple[int, ...]:
    """Of each dim of a mesh how many of the devices along it are in one domain: all where it
    doesn't leave any.

    Args:
        numbers: of domains, in the mesh's shape.
    """
    lines = (np.sort(numbers, axis=dim) for dim in range(numbers.ndim))
    leaves = ((np.diff(of, axis=dim) != 0).sum(dim).max() for dim, of in enumerate(lines))
    return tuple(n // (1 + int(m)) for n, m in zip(numbers.shape, leaves, strict=True))


def slow_axes(devices: Any, sizes: Mapping[str, int]) -> dict[str, int]:
    """The axes of a mesh's devices that leave a slice or a host, and how many of the devices along
    them are in one."""
    own = inside(np.array(domains(list(devices.flat))).reshape(devices.shape))
    return {name: n for name, n in zip(sizes, own, strict=True) if n < sizes[name]}


_told: dict[Any, Any] = {}  # as Python's registries of modules: a line is told once


def warn_of_crossing(
    names: Sequence[str],
    shape: Sequence[int],
    devices: Sequence[Any],
    chatty: Collection[str] = _CHATTY,
) -> None:
    """Tell whoever makes a mesh that one of its dims leaves a domain: what every layer moves would
    go over the slow network.

    Args:
        names, shape, devices: the mesh.
        chatty: the dims that this is about; those of the usual names of tensor parallelism.
    """
    if not set(chatty) & set(names):
        return
    numbers = domains(devices)
    count = len(set(numbers))
    if count == 1:
        return
    every = zip(names, shape, inside(np.array(numbers).reshape(shape)), strict=True)
    bad = [name for name, size, own in every if own < size and name in chatty]
    if bad:
        what = "GPUs' hosts (or racks)" if devices[0].platform == "gpu" else "slices"
        message = (
            f"the mesh {dict(zip(names, shape, strict=True))} has {len(devices)} devices in "
            f"{count} {what}, and its {', '.join(map(repr, bad))} lies across them: what it moves "
            "in each layer goes over the slow network. Give it no more devices than one of them "
            "has, and put the dims of data parallelism first, of sizes that multiply to a multiple "
            f"of {count}: init_device_mesh lays the outermost dims across"
        )
        frame = user_frame()
        file, line = ("", 0) if frame is None else (frame.filename, frame.lineno or 0)
        warnings.warn_explicit(message, UserWarning, file, line, registry=_told)
