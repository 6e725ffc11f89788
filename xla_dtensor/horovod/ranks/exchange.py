"""Launches collectives of ranks that have tensors of their own, as one XLA program.

The ranks are processes, threads, or the entries of a `PerRank`. A rank's device has the rank's
value, and XLA's collective runs over these devices; values of different sizes are padded to the
largest, since a program has one shape on all devices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.horovod.collectives.collective import HorovodCollective
from xla_dtensor.horovod.collectives.requests import Response
from xla_dtensor.runtime import arrays

Array = Any  # a NumPy array, or a jax.Array on one device
Values = dict[int, Sequence[Array]]
"""By rank, its arrays: NumPy's, or on one device."""


def run(
    responses: Sequence[Response], values: Sequence[Values], devices: Sequence[Any]
) -> list[list[Exchanged]]:
    """Collectives of the same ranks, in one program, which nobody has waited for yet.

    Args:
        responses: what they are.
        values: of each, the arrays of the ranks that are here, also of those that have joined.
        devices: by rank, its JAX device.

    Returns:
        of each, what has become of its tensors.
    """
    found = [
        [Exchanged(response, i, given) for i in range(len(response.one.shapes))]
        for response, given in zip(responses, values, strict=True)
    ]
    sent = [each for group in found for each in group if not each.is_empty]
    if sent:
        _launch(sent, [devices[rank] for rank in responses[0].ranks])
    return found


class Exchanged:
    """One tensor of a collective, of all its ranks.

    Args:
        response: the collective.
        position: the tensor's number in it.
        values: the arrays of the ranks that are here.

    Attributes:
        shards: by rank, what its device has afterwards, with a leading dim of 1; empty if nothing
            was sent.
    """

    def __init__(self, response: Response, position: int, values: Values) -> None:
        request = response.one
        self.ranks = response.ranks
        self.values = {rank: arrays[position] for rank, arrays in values.items()}
        self.shards: dict[int, Any] = {}
        self.shape = request.shapes[position]
        self.dtype = jnp.dtype(request.dtypes[position])
        self.collective = request.collective.placed(response.ranks)
        requests = list(response.requests.values())
        self._pieces = request.collective.pieces(requests, position)

    @property
    def most(self) -> int:
        """The rows that every piece is padded to."""
        assert self._pieces is not None
        return max(max(each) for each in self._pieces)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        if 0 in self.shape[1:] or (self._pieces is None and 0 in self.shape):
            return True
        return self._pieces is not None and self.most == 0

    def block(self, rank: int) -> Array:
        """What the rank's device is given."""
        value = self.values[rank]
        if self._pieces is None:
            return value
        if self.collective.same_on_all:
            return _padded(value, self.most)
        ends = np.cumsum([0, *self._pieces[self.ranks.index(rank)]])
        pieces = [_padded(value[a:b], self.most) for a, b in itertools.pairwise(ends)]
        return _concatenated(pieces)

    def is_ready(self, rank: int) -> bool:
        """Whether the rank's device is done with it."""
        return not self.shards or self.shards[rank].is_ready()

    def result(self, rank: int, on_host: bool) -> Array:
        """What the rank gets, waited for if it goes to the host.

        Args:
            rank: the rank.
            on_host: whether it is wanted as a NumPy array.
        """
        received = None
        if self._pieces is not None:
            received = self.collective.received(self._pieces, self.ranks.index(rank))
        if not self.shards:
            rows = [self.collective.result_rows(n, len(self.ranks)) for n in self.shape[:1]]
            rows = rows if received is None else [sum(received)]
            return np.zeros((*rows, *self.shape[1:]), self.dtype)
        shard = self.shards[rank]
        with jax.enable_x64(True):
            moved = arrays.get(shard) if on_host else jax.device_put(shard, jax.local_devices()[0])
            if received is None:
                return moved[0]
            pieces = moved.reshape(len(received), self.most, *moved.shape[2:])
            return _concatenated([pieces[i, :n] for i, n in enumerate(received)])


def _padded(value: Array, rows: int) -> Array:
    pads = [(0, rows - value.shape[0]), *[(0, 0)] * (value.ndim - 1)]
    return (np if isinstance(value, np.ndarray) else jnp).pad(value, pads)


def _concatenated(pieces: list[Array]) -> Array:
    return (np if isinstance(pieces[0], np.ndarray) else jnp).concatenate(pieces)


def _launch(sent: Sequence[Exchanged], devices: Sequence[Any]) -> None:
    """Give each its shards."""
    program, sharding = _program(tuple(each.collective for each in sent), tuple(devices))
    device_of = dict(zip(sent[0].ranks, devices, strict=True))
    with jax.enable_x64(True):
        inputs = []
        for each in sent:
            blocks = {device_of[rank]: each.block(rank)[None] for rank in each.values}
            shape = (len(devices), *next(iter(blocks.values())).shape[1:])
            inputs.append(arrays.put_each(shape, sharding, blocks))
        title = " ".join(sorted({f"horovod.{each.collective.kind}" for each in sent}))
        with jax.profiler.TraceAnnotation(title):
            outputs = program(*inputs)
    for each, output in zip(sent, outputs, strict=True):
        shards = {shard.device: shard.data for shard in output.addressable_shards}
        each.shards = {rank: shards[device_of[rank]] for rank in each.values}


@functools.lru_cache(maxsize=1024)
def _program(
    collectives: tuple[HorovodCollective, ...], devices: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The program of some collectives on some devices, and how its inputs lie on them."""
    mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,))
    spec = jax.sharding.PartitionSpec(_AXIS)

    def on_device(*blocks: Any) -> Any:
        results = _fused(collectives, [block[0] for block in blocks])
        return tuple(result[None] for result in results)

    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped), jax.sharding.NamedSharding(mesh, spec)


_AXIS = "rank"


def _fused(collectives: Sequence[HorovodCollective], values: list[Any]) -> list[Any]:
    """Their results. Reductions of one kind and dtype are one, of a buffer of them all."""
    together: dict[Any, list[int]] = {}
    for i, (collective, value) in enumerate(zip(collectives, values, strict=True)):
        together.setdefault((collective, value.dtype if collective.is_fused else i), []).append(i)
    results: list[Any] = [None] * len(values)
    for (collective, _), members in together.items():
        if len(members) == 1:
            results[members[0]] = collective.on_device(values[members[0]], (_AXIS,))
            continue
        buffer = jnp.concatenate([values[i].reshape(-1) for i in members])
        total = collective.on_device(buffer, (_AXIS,))
        ends = np.cumsum([0, *(values[i].size for i in members)])
        for i, start, end in zip(members, ends[:-1], ends[1:], strict=True):
            results[i] = total[start:end].reshape(values[i].shape)
    return results
