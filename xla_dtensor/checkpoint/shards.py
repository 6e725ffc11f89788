"""The shards of an xla tensor on this process's devices (chunks), read for saving and replaced.

To a checkpoint a tensor is one box of numbers, of which each device holds a smaller box, a *chunk*.
The box of a tensor that varies from device to device has a leading dim for each mesh axis along
which it does, as its array has. Padding is in no chunk, and devices that hold the same share one.
The only place that asks which shards are this process's own: the addressable ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from xla_dtensor.base import assertions, executor, interrupts
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import from_numpy, viewed_by_numpy
from xla_dtensor.forms.read import reading
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.of_form import Ours, new_tensor


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor.

    Attributes:
        offsets: where it begins, per dim.
        sizes: how long it is, per dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def box(self) -> tuple[slice, ...]:
        """The index of the chunk in the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Own:
    """What this process holds of a tensor of some form.

    Attributes:
        size: of the whole box.
        chunks: each piece with elements once, and the devices that hold it; in the order of their
            offsets. Of a tensor without elements, the whole.
        empty: the devices that hold padding alone.
        padded: the shape of each device's array.
    """

    size: tuple[int, ...]
    chunks: dict[Chunk, list[Any]]
    empty: list[Any]
    padded: tuple[int, ...]


def own_chunks(form: Form) -> Own:
    """What this process holds of a tensor of ``form``, which has no reduction pending."""
    lead = form.array_shape[: len(form.varying)]
    size = (*lead, *form.shape)
    whole = Chunk((0,) * len(size), size)
    if form.sharding is None or 0 in size:
        return Own(size, {whole: []}, [], form.array_shape)
    found: dict[Chunk, list[Any]] = {}
    empty = []
    indices = form.sharding.addressable_devices_indices_map(form.array_shape)
    for device, index in indices.items():
        parts = [part.indices(n) for part, n in zip(index, form.array_shape, strict=True)]
        begins = tuple(min(start, n) for (start, _, _), n in zip(parts, size, strict=True))
        ends = tuple(min(stop, n) for (_, stop, _), n in zip(parts, size, strict=True))
        chunk = Chunk(begins, tuple(e - b for b, e in zip(begins, ends, strict=True)))
        if chunk.numel:
            found.setdefault(chunk, []).append(device)
        else:
            empty.append(device)
    chunks = dict(sorted(found.items(), key=lambda item: item[0].offsets))
    return Own(size, chunks, empty, form.sharding.shard_shape(form.array_shape))


def check_whole(tensor: Ours, what: str) -> None:
    """Raise if a reduction of ``tensor`` is pending, or it has no values (yet) to look at.

    Args:
        what: is to be done with which tensor.
    """
    executor.current().refuse(what)
    form: Form = tensor._form
    partial = [p for p in form.placements or () if p.is_partial()]
    if partial:
        raise UnsupportedOpError(
            f"{what}: its placements on {form.mesh!r} are {list(form.placements or ())}, and a "
            "checkpoint has no unreduced values; redistribute it to Replicate() or Shard(dim) first"
        )


def host_value(tensor: Ours, own: Own, chunk: Chunk) -> torch.Tensor:
    """A copy of one chunk as a CPU tensor. No other chunk is looked at."""
    assertions.look()
    if 0 in own.size:
        return torch.empty(own.size, dtype=tensor.dtype)
    devices = own.chunks[chunk]
    with reading(tensor) as array:
        part = array
        if devices:
            # Another array of the same buffer: JAX keeps what it has copied to the host with the
            # array.
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            data = shards[devices[0]]
            part = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
        return from_numpy(np.asarray(part)[tuple(slice(0, n) for n in chunk.sizes)])


class LoadedTensor:
    """A tensor that is being loaded: memory of the host for each chunk, until all have come.

    The tensor has its new value when all of them have: until then it keeps the one that it had.

    Args:
        tensor: it; of the "meta" device, if it has no value yet.
    """

    def __init__(self, tensor: Ours) -> None:
        self.tensor: Any = tensor
        self.form: Form = tensor._form.with_meta(False)
        self.own = own_chunks(self.form)
        self._buffers: dict[Chunk, torch.Tensor] = {}

    @property
    def has_come(self) -> bool:
        """Whether anything was filled in since the last `finish`."""
        return bool(self._buffers)

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        """A CPU tensor of the chunk's shape, to be filled."""
        if chunk not in self._buffers:
            padded = self.own.padded if self.own.chunks[chunk] else chunk.sizes
            self._buffers[chunk] = torch.zeros(padded, dtype=self.form.dtype)
        return self._buffers[chunk][tuple(slice(0, n) for n in chunk.sizes)]

    @interrupts.atomic
    def finish(self) -> None:
        """Give the tensor what has been filled in, which is all of it."""
        values = {chunk: viewed_by_numpy(buffer) for chunk, buffer in self._buffers.items()}
        self._buffers = {}
        if 0 in self.own.size:
            return
        with jax.enable_x64(True):
            if self.form.sharding is None:
                (value,) = values.values()
                array = jax.numpy.asarray(value)
            else:
                # On CPU devices these arrays are the buffers.
                parts = [
                    arrays.piece(values[chunk], device, self.form.sharding)
                    for chunk, devices in self.own.chunks.items()
                    for device in devices
                ]
                if self.own.empty:
                    zeros = np.zeros(self.own.padded, self.form.jax_dtype)
                    sharding = self.form.sharding
                    parts += [arrays.piece(zeros, d, sharding) for d in self.own.empty]
                array = jax.make_array_from_single_device_arrays(
                    self.form.array_shape, self.form.sharding, parts
                )
        self._put(array)

    def _put(self, array: Any) -> None:
        tensor = self.tensor
        if tensor._form.meta:
            with torch.no_grad():
                loaded = new_tensor(array, self.form)
            self.tensor = loaded.requires_grad_(tensor.requires_grad)
        elif tensor._steps:
            with torch.no_grad():
                tensor.copy_(new_tensor(array, self.form))
        else:
            tensor._storage_.write(array, self.form)
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
