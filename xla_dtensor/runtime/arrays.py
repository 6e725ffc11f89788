"""Puts host values on devices and gets them back, where processes reach their own devices alone.

What is put, every process has (a value that differs from process to process is put shard by shard,
`put_shards`). What is got of an array that lies on several processes' devices is replicated first,
by a program that all processes have to run.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from xla_dtensor.runtime import abstract, agreement, heartbeats, processes, user_positions
from xla_dtensor.runtime.abstract_array import AbstractArray


def put(value: Any, sharding: Any) -> Any:
    """An array with ``sharding`` of a value that every process has.

    Args:
        value: a NumPy array, or a ``jax.Array``, which may lie on other devices.
        sharding: a JAX sharding.
    """
    if abstract.current() is not None or isinstance(value, AbstractArray):
        return AbstractArray(value.shape, value.dtype, sharding)
    import jax

    if not processes.several():
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable and value.sharding.device_set == sharding.device_set:
            return _resharded(sharding)(value)
        if value.is_fully_addressable and sharding.is_fully_replicated:
            return _to_all(value, sharding)
        value = get(value)
    value = np.asarray(value)
    check_equal(value)
    return put_shards(value.shape, sharding, lambda index: value[index])


def strong(array: Any) -> Any:
    """An array of JAX's whose dtype counts as a tensor's does: JAX also has weakly typed ones, of
    Python's numbers (``jnp.where(x > 0, 1.0, 2.0)``), which would take the dtype of what they are
    combined with, and which lowerings take for numbers."""
    import jax

    if not getattr(array, "weak_type", False):
        return array
    with jax.enable_x64(True):
        return jax.lax.convert_element_type(array, array.dtype)


def piece(value: Any, device: Any, sharding: Any) -> Any:
    """What ``device`` has of an array with ``sharding``, as an array of its own, in the memory that
    the sharding says."""
    import jax

    memory = sharding.memory_kind
    if memory is None or memory == device.default_memory().kind:
        return jax.device_put(value, device)
    return jax.device_put(value, jax.sharding.SingleDeviceSharding(device, memory_kind=memory))


def _to_all(value: Any, sharding: Any) -> Any:
    """The same value of this process on all of its devices, without a way over the host."""
    import jax

    pieces = [piece(value, device, sharding) for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, pieces)


def put_shards(
    shape: tuple[int, ...], sharding: Any, shard: Callable[[tuple[slice, ...]], np.ndarray]
) -> Any:
    """An array from its shards; only those of this process's devices are asked for.

    Args:
        shape: of the whole array.
        sharding: a JAX sharding.
        shard: gives the elements at an index.
    """
    if abstract.current() is not None:
        piece = shard((slice(0, 0),) * len(shape))  # for its dtype
        return AbstractArray(shape, piece.dtype, sharding)
    import jax

    return jax.make_array_from_callback(shape, sharding, shard)


def full(shape: tuple[int, ...], value: Any, dtype: Any, sharding: Any) -> Any:
    """An array of one value.

    Args:
        shape: of the whole array.
        value: a number.
        dtype: NumPy's.
        sharding: a JAX sharding, or None for the default device.
    """
    if abstract.current() is not None:
        return AbstractArray(shape, dtype, sharding)
    import jax

    with jax.enable_x64(True):
        if not _in_host_memory(sharding):
            return jax.numpy.full(shape, value, dtype=dtype, device=sharding)
        # Without a program for each shape: compiling one takes longer than filling the memory,
        # which all devices share (XLA writes to none that came from NumPy).
        number = np.asarray(value).astype(dtype)
        if sharding is None:
            return jax.device_put(np.full(shape, number))
        shard = np.full(sharding.shard_shape(shape), number)
        return jax.make_array_from_callback(shape, sharding, lambda index: shard)


def _in_host_memory(sharding: Any) -> bool:
    """Whether the devices compute in the host's memory."""
    import jax

    devices = jax.devices() if sharding is None else sharding.device_set
    return next(iter(devices)).platform == "cpu"


def put_each(shape: tuple[int, ...], sharding: Any, shards: dict[Any, np.ndarray]) -> Any:
    """An array from what each of this process's devices has of it.

    Args:
        shape: of the whole array.
        sharding: a JAX sharding.
        shards: by device.
    """
    if abstract.current() is not None:
        return AbstractArray(shape, next(iter(shards.values())).dtype, sharding)
    import jax

    pieces = [piece(shards[d], d, sharding) for d in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def put_own(value: Any, sharding: Any) -> Any:
    """An array with ``sharding`` of values that processes have of their own: the shard of each
    device is the value of its process, behind leading dims of size 1.

    Args:
        value: a ``jax.Array`` of this process.
        sharding: a JAX sharding whose leading dims are those along which the values differ.
    """
    import jax

    devices = sorted(sharding.addressable_devices, key=lambda device: device.id)
    lead = [sharding.mesh.shape[name] for name in sharding.spec if name is not None]
    shard = value.reshape((1,) * len(lead) + value.shape)
    pieces = [piece(shard, device, sharding) for device in devices]
    shape = (*lead, *value.shape)
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def own_shard(array: Any) -> Any:
    """The shard of this process's one device, as an array of its own."""
    (shard,) = array.addressable_shards
    return shard.data


def check_equal(value: Any, what: str = "distributes", *, always: bool = False) -> None:
    """See that all processes have the same value: under the debug switch, or ``always``.

    Raises:
        DivergenceError: they haven't.
    """
    if agreement.every_launch() or (always and agreement.checks_values()):
        value = np.ascontiguousarray(value)
        agreement.agree(
            f"{what} a value of shape {list(value.shape)}, {value.dtype}, with the checksum "
            f"{zlib.crc32(value.tobytes()):08x}",
            "The value has to be the same in all processes. Where each has its own: "
            "xla_dtensor.data.shard_batch(value, mesh, placements), DTensor.from_local(value, "
            "mesh, placements) or xla_dtensor.from_device_values(values, mesh)",
        )


def check_same(values: Iterable[np.ndarray], what: str) -> None:
    """See that all processes have the same values of the host, where these become replicated. A
    single number is as good as Python's, and isn't looked at.

    Raises:
        DivergenceError: they haven't.
    """
    if agreement.checks_values():
        for value in values:
            if value.size > 1:
                check_equal(value, what, always=True)


def is_equal(value: Any) -> bool:
    """Whether all processes have the same value; all have to ask.

    Args:
        value: what NumPy takes.
    """
    return len(set(checksums(value))) == 1


def checksums(value: Any) -> list[int]:
    """The checksums of the value that each process has; all have to ask.

    Args:
        value: what NumPy takes.
    """
    value = np.ascontiguousarray(value)
    what = f"brings a value of its own of shape {list(value.shape)}, {value.dtype}, to all devices"
    return list(map(int, agreement.texts_of_all(what, str(zlib.crc32(value.tobytes())))))


def is_here(array: Any) -> bool:
    """Whether this process can read all of an array without asking others."""
    return array.is_fully_addressable or array.is_fully_replicated


def about_to_read(array: Any, what: str) -> None:
    """What comes before the value of an array, or of a view of it, is brought to the host: where
    other processes have parts of it, all have to ask.

    Args:
        array: a ``jax.Array``.
        what: of which value, for the message where not all ask.

    Raises:
        DivergenceError: another process does something else.
    """
    if isinstance(array, AbstractArray):
        array.refuse()
    if processes.several() and not is_here(array):
        agreement.agree(f"reads the value of {what} on the host")


def get(array: Any) -> np.ndarray:
    """The value of an array on the host. Where other processes have parts of it, all have to ask.

    Args:
        array: a ``jax.Array`` or what NumPy takes.

    Raises:
        DistributedError: it was computed together with a process that is gone.
        RuntimeError: XLA has computed fewer elements than the array's shape says.
    """
    if not processes.several():
        value = np.asarray(array)
    elif getattr(array, "is_fully_addressable", True):
        with heartbeats.NamingTheLost():
            value = np.asarray(array)
    else:
        with user_positions.reading(), heartbeats.NamingTheLost():
            if not is_here(array):
                array = _resharded(_replicated(array.sharding))(array)
            value = np.asarray(array)
    if value.size != getattr(array, "size", value.size):  # `base/xla_faults.py:CUT_PADDING`
        raise RuntimeError(
            f"XLA has computed a tensor of shape {list(value.shape)} where one of "
            f"{list(np.shape(array))} was asked for: a fault of its partitioner. Please report the "
            "operations before this read; with xd.config.eager = 'strict', or other placements, "
            "they may be right"
        )
    return value


@functools.cache
def _resharded(sharding: Any) -> Callable[[Any], Any]:
    import jax

    jitted = jax.jit(_same, out_shardings=sharding)

    def resharded(array: Any) -> Any:
        with jax.enable_x64(True):
            return jitted(array)

    return resharded


def _same(array: Any) -> Any:
    return array


def _replicated(sharding: Any) -> Any:
    import jax

    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
