"""Sends a host value of one process to all others, over the devices; compares values."""

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
        size = _SMALLEST
        while size < piece.size:
            size *= _STEP
        own = np.zeros(size, np.uint8)
        if is_source:
            own[: piece.size] = piece
        sent = _summed(own.view(np.uint32))
        if not is_source:
            piece[:] = sent.view(np.uint8)[: piece.size]


def _bytes_of(value: np.ndarray) -> np.ndarray:
    """Its memory, if it is contiguous. Not all dtypes have a ``data``."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _summed(own: np.ndarray) -> np.ndarray:
    """The sum over the processes: all but one give zeros, so it is what that one gives, exactly."""
    import jax

    sharding, program = _program(own.size)
    first, *others = sorted(sharding.addressable_devices, key=lambda device: device.id)
    zeros = np.zeros_like(own)[None]
    parts = [jax.device_put(own[None], first), *(jax.device_put(zeros, d) for d in others)]
    shape = (len(sharding.device_set), own.size)
    summed = program(jax.make_array_from_single_device_arrays(shape, sharding, parts))
    with user_positions.reading():
        return np.asarray(summed)


@functools.cache
def _program(size: int) -> tuple[Any, Callable[[Any], Any]]:
    """For values of ``size`` words: the sharding, a row for each device, and what adds up.

    Of all devices, though one of each process has what is sent: beside a program on several of a
    process's devices one on a single one would get its numbers (`base/xla_faults.py:IN_FLIGHT`).
    """
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices(), dtype=object), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def added(parts: Any) -> Any:
        return parts.sum(axis=0, dtype=np.uint32)

    return sharding, jax.jit(added, out_shardings=replicated)


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
