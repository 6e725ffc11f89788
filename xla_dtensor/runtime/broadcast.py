"""Sends host values from process to process, over the devices; compares values."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from xla_dtensor.errors import DivergenceError
from xla_dtensor.runtime import agreement, processes, user_positions

PIECE = 1 << 24
"""Bytes that are sent at once: what this takes on each side, whatever the value's size."""

_SMALLEST, _STEP = 1 << 12, 8  # a program for each of a few lengths, not for each value's


def shifted(value: np.ndarray, by: int) -> np.ndarray:
    """The bytes that the process ``by`` numbers further on gives here; all call it.

    Args:
        value: this process's: bytes, of any number.
        by: the last process's neighbour is the first.

    Raises:
        DivergenceError: another process does something else.
    """
    count, me = processes.count(), processes.index()
    lengths = agreement.texts_of_all(f"gives bytes to the process {by} before it", str(value.size))
    found = np.empty(int(lengths[(me + by) % count]), np.uint8)
    for start in range(0, max(map(int, lengths)), PIECE):
        piece = value[start : start + PIECE]
        size = _padded(max(min(int(length) - start, PIECE) for length in lengths))
        own = np.zeros(size, np.uint8)
        own[: piece.size] = piece
        sent = _run(own.view(np.uint32), _shift(size // 4, by)).view(np.uint8)
        wanted = found[start : start + PIECE]
        wanted[:] = sent[: wanted.size]
    return found


def send(value: np.ndarray, source: int) -> None:
    """Overwrite ``value``, in every other process, with that of process ``source``; all call it.

    Args:
        value: of the same shape and dtype in all, contiguous.
        source: a process's number.

    Raises:
        DivergenceError: another process does something else, or has another shape or dtype.
    """
    agreement.agree(
        f"distributes process {source}'s value of shape {list(value.shape)}, {value.dtype}",
        "All processes have to distribute tensors of the same shapes in the same order, also where "
        "the values are one process's",
    )
    flat = _bytes_of(value)
    is_source = processes.index() == source
    for start in range(0, flat.size, PIECE):
        piece = flat[start : start + PIECE]
        own = np.zeros(_padded(piece.size), np.uint8)
        if is_source:
            own[: piece.size] = piece
        # The sum over the processes: all but one give zeros, so it is what that one gives, exactly.
        sent = _run(own.view(np.uint32), _sum(own.size // 4))
        if not is_source:
            piece[:] = sent.view(np.uint8)[: piece.size]


def _bytes_of(value: np.ndarray) -> np.ndarray:
    """Its memory, if it is contiguous. Not all dtypes have a ``data``."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _padded(size: int) -> int:
    found = _SMALLEST
    while found < size:
        found *= _STEP
    return found


def _run(own: np.ndarray, program: Callable[[Any], Any]) -> np.ndarray:
    """What a program gives this process of a row of each process."""
    import jax

    sharding = _rows()
    first, *others = _own_devices(sharding)
    zeros = np.zeros_like(own)[None]
    parts = [jax.device_put(own[None], first), *(jax.device_put(zeros, d) for d in others)]
    shape = (len(sharding.device_set), own.size)
    result = program(jax.make_array_from_single_device_arrays(shape, sharding, parts))
    with user_positions.reading():
        if result.is_fully_replicated:
            return np.asarray(result)
        (row,) = (s.data for s in result.addressable_shards if s.device == first)
        return np.asarray(row)[0]


@functools.cache
def _rows() -> Any:
    """A row for each device.

    Of all devices, though one of each process has what is sent: beside a program on several of a
    process's devices one on a single one would get its numbers (`base/xla_faults.py:IN_FLIGHT`).
    """
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices(), dtype=object), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))


def _own_devices(sharding: Any) -> list[Any]:
    return sorted(sharding.addressable_devices, key=lambda device: device.id)


@functools.cache
def _sum(size: int) -> Callable[[Any], Any]:
    """Adds up rows of ``size`` words."""
    import jax

    replicated = jax.sharding.NamedSharding(_rows().mesh, jax.sharding.PartitionSpec())

    def added(parts: Any) -> Any:
        return parts.sum(axis=0, dtype=np.uint32)

    return jax.jit(added, out_shardings=replicated)


@functools.cache
def _shift(size: int, by: int) -> Callable[[Any], Any]:
    """Gives each process's first device the row that another process's has."""
    import jax

    sharding = _rows()
    firsts: dict[int, int] = {}  # the place of each process's first device
    for place, device in sorted(enumerate(sharding.mesh.devices.flat), key=lambda each: each[1].id):
        firsts.setdefault(device.process_index, place)
    count = len(firsts)
    pairs = [(firsts[(i + by) % count], firsts[i]) for i in range(count)]

    def shift(row: Any) -> Any:
        return jax.lax.ppermute(row, "device", pairs)

    return jax.jit(
        jax.shard_map(shift, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec)
    )


def check_shared(value: np.ndarray, pieces: Mapping[str, np.ndarray], advice: str) -> None:
    """See that processes that hold the same piece of a value have the same elements in it; all call
    it.

    Args:
        value: this process's.
        pieces: those of it that others hold, too, by what to call them.
        advice: what to do where they differ.

    Raises:
        DivergenceError: they differ, or another process does something else.
    """
    what = f"distributes values of its own of shape {list(value.shape)}, {value.dtype}"
    own = {name: zlib.crc32(_bytes_of(piece).data) for name, piece in pieces.items()}
    found = [json.loads(text) for text in agreement.texts_of_all(what, json.dumps(own))]
    first: dict[str, int] = {}
    for index, sums in enumerate(found):
        for name, checksum in sums.items():
            other = first.setdefault(name, index)
            if found[other][name] != checksum:
                raise DivergenceError(
                    f"{processes.known(other)} and {processes.known(index)} have different values "
                    f"of a tensor of shape {list(value.shape)}, {value.dtype}, and both hold it, "
                    f"{name}. {advice}"
                )
