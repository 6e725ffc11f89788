"""The devices' properties, and the memory in use, as ``torch.xla`` reports them.

The process's devices are one to torch. Where torch has one number, it is that of the device that
holds the most: the one that a larger model would not fit on. Of simulated devices, whose allocator
keeps no statistics, the live arrays are counted.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import threading
import weakref
from typing import Any

from xla_dtensor.base import assertions, events, executor
from xla_dtensor.base.config import config
from xla_dtensor.runtime import abstract, jax_runtime
from xla_dtensor.runtime.chips import limit_of


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """What ``torch.xla.get_device_properties()`` gives.

    Attributes:
        name: the kind of the devices, as XLA calls it.
        platform: ``"cpu"`` (simulated), ``"gpu"``, ``"tpu"`` or what a plugin calls itself.
        total_memory: bytes on each; of simulated devices, of the host.
        count: how many devices the process drives.
    """

    name: str
    platform: str
    total_memory: int
    count: int


class _Peak:
    """The most bytes since a reset. XLA's own peak can't be reset: until it rises again, what was
    in use whenever somebody asked is what is known."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = self._before = 0

    def update(self, in_use: int, peak_of_xla: int) -> int:
        with self._lock:
            if peak_of_xla > self._before:
                self._seen = max(self._seen, peak_of_xla)
            self._seen = max(self._seen, in_use)
            return self._seen

    def reset(self, in_use: int, peak_of_xla: int) -> None:
        with self._lock:
            self._seen, self._before = in_use, peak_of_xla


_peak = _Peak()


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
        return None if topology.chip is None else topology.chip.memory / topology.chip.devices
    if device.platform == "cpu":
        return None
    limit = limit_of(device)
    # To two digits: devices of one kind differ by what else is on them, and processes that compute
    # together have to choose alike.
    return None if limit is None else float(f"{limit:.1e}")


def device_name() -> str:
    """The kind of the process's devices, as XLA calls it."""
    return _devices()[0].device_kind


def device_properties() -> DeviceProperties:
    """What kind of devices there are, how many, with how much memory."""
    devices = _devices()
    return DeviceProperties(
        devices[0].device_kind, devices[0].platform, free_and_total()[1], len(devices)
    )


def synchronize() -> None:
    """Wait until the devices have done what was asked of them.

    Raises:
        IndexError, RuntimeError: an index was out of range in what they have done, or an array
            couldn't be computed; each is told once, however long somebody keeps the array.
    """
    import jax

    events.settle()
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    try:
        jax.block_until_ready(arrays)
    except jax.errors.JaxRuntimeError:
        new = [error for error in map(_new_failure, arrays) if error is not None]
        if new:
            raise new[0] from None
    assertions.look()


# Arrays that couldn't be computed, by identity. The last exception's traceback may keep one alive
# for the rest of the process: a checkpoint that is written later has nothing to do with it.
_failed: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _new_failure(array: Any) -> Exception | None:
    """Why an array couldn't be computed, if nobody has been told."""
    try:
        array.block_until_ready()
    except RuntimeError as error:
        told = _failed.get(id(array)) is array
        _failed[id(array)] = array
        return None if told else error
    return None


def allocated() -> int:
    """Bytes in use on the device that holds the most."""
    return stats()["allocated_bytes.all.current"]


def peak() -> int:
    """The most bytes in use since the start or the last `reset_peak`; of simulated devices, and
    after a reset until XLA's own peak rises, the most of when it was asked for."""
    return stats()["allocated_bytes.all.peak"]


def reset_peak() -> None:
    """Let `peak` start again."""
    _peak.reset(*_in_use_and_peak(_statistics()))


def reserved() -> int:
    """Bytes that XLA's allocator has taken from the device, in use or not."""
    return stats()["reserved_bytes.all.current"]


def peak_reserved() -> int:
    """The most bytes that it has taken; what it takes it keeps."""
    return stats()["reserved_bytes.all.peak"]


def free_and_total() -> tuple[int, int]:
    """Free bytes and all bytes of the device that holds the most; of simulated devices, of the
    host."""
    if _devices()[0].platform == "cpu":
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    fullest = max(_statistics(), key=lambda each: each["bytes_in_use"])
    total = fullest.get("bytes_limit", 0)
    return total - fullest["bytes_in_use"], total


def stats() -> dict[str, Any]:
    """A dict with torch's names for what is known, and ``"devices"``: for each device what XLA's
    allocator says, a dict of its own names."""
    statistics = _statistics()
    in_use, peak_of_xla = _in_use_and_peak(statistics)
    most = _peak.update(in_use, peak_of_xla)
    taken = max(max(each.get("pool_bytes", 0), each["bytes_in_use"]) for each in statistics)
    return {
        "allocated_bytes.all.current": in_use,
        "allocated_bytes.all.peak": most,
        "reserved_bytes.all.current": taken,
        "reserved_bytes.all.peak": max(taken, most),
        "num_alloc_retries": 0,
        "num_ooms": 0,
        "devices": statistics,
    }


def _devices() -> list[Any]:
    import jax

    jax_runtime.start()
    return jax.local_devices()


def _in_use_and_peak(statistics: list[dict[str, int]]) -> tuple[int, int]:
    in_use = max(each["bytes_in_use"] for each in statistics)
    return in_use, max(each.get("peak_bytes_in_use", in_use) for each in statistics)


def _statistics() -> list[dict[str, int]]:
    executor.current().refuse("how much memory is in use, which")
    events.settle()
    devices = _devices()
    found = [device.memory_stats() for device in devices]
    if all(found):
        return [dict(each) for each in found if each]
    import jax

    in_use: collections.Counter[int] = collections.Counter()
    for array in jax.live_arrays():
        if not array.is_deleted():
            for shard in array.addressable_shards:
                in_use[shard.device.id] += shard.data.nbytes
    return [{"bytes_in_use": in_use[device.id]} for device in devices]
