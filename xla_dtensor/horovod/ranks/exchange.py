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

from xla_dtensor.horovod.ranks.kernels import Kernel
from xla_dtensor.horovod.reductions import ReduceOp
from xla_dtensor.horovod.requests import Request, Response, failed
from xla_dtensor.runtime import arrays

Array = Any  # a NumPy array, or a jax.Array on one device
Values = dict[int, Sequence[Array]]
"""By rank, its arrays: NumPy's, or on one device."""


def run(
    responses: Sequence[Response], values: Sequence[Values], devices: Sequence[Any]
) -> list[dict[int, list[Output]]]:
    """Collectives of the same ranks, in one program.

    Args:
        responses: what they are.
        values: of each, the arrays of the ranks that are here, also of those that have joined.
        devices: by rank, its JAX device.

    Returns:
        of each, the results of the ranks that are here, which nobody has waited for yet.
    """
    ranks = responses[0].ranks
    own = [rank for rank in ranks if rank in values[0]]
    jobs = [
        [_Job(response, i, given) for i in range(len(_first(response).shapes))]
        for response, given in zip(responses, values, strict=True)
    ]
    launched = [job for group in jobs for job in group if not job.is_empty]
    shards = _launch(launched, ranks, own, [devices[rank] for rank in ranks])
    found = {id(job): output for job, output in zip(launched, shards, strict=True)}
    return [
        {rank: [Output(job, rank, found.get(id(job), {}).get(rank)) for job in group]
         for rank in own}
        for group in jobs
    ]  # fmt: skip


def outcomes(
    responses: Sequence[Response], values: Sequence[Values], devices: Sequence[Any]
) -> list[tuple[Response, dict[int, list[Output]]]]:
    """As `run`, each with its response; where it fails all of them say why, and have no results.

    Args:
        responses, values, devices: as of `run`.
    """
    try:
        return list(zip(responses, run(responses, values, devices), strict=True))
    except Exception as error:  # XLA's, which is an error of all ranks
        return [(failed(response, error), {}) for response in responses]


class Output:
    """What a rank gets of a collective.

    Args:
        job: the collective.
        rank: the rank.
        shard: what its device has; None where nothing was sent.
    """

    def __init__(self, job: _Job, rank: int, shard: Any) -> None:
        self._job, self._rank, self._shard = job, rank, shard

    def is_ready(self) -> bool:
        """Whether the devices are done with it."""
        return self._shard is None or self._shard.is_ready()

    def array(self, on_host: bool) -> Array:
        """The value, waited for if it goes to the host.

        Args:
            on_host: whether it is wanted as a NumPy array.
        """
        shard = self._shard
        with jax.enable_x64(True):
            if shard is None:
                return self._job.result(self._rank, None)
            one = (
                np.asarray(shard)[0]
                if on_host
                else jax.device_put(shard, jax.local_devices()[0])[0]
            )
            return self._job.result(self._rank, one)


def zeros(response: Response) -> list[np.ndarray]:
    """What a rank that has joined takes part with.

    Args:
        response: a collective of the others.
    """
    request = _first(response)
    pairs = zip(request.shapes, request.dtypes, strict=True)
    return [np.zeros(shape, jnp.dtype(dtype)) for shape, dtype in pairs]


def received_splits(response: Response, rank: int) -> list[int]:
    """How many rows of an alltoall have come to a rank from each.

    Args:
        response: the alltoall.
        rank: the rank.
    """
    position = response.ranks.index(rank)
    return [_splits(response.requests[each])[position] for each in response.ranks]


def _first(response: Response) -> Request:
    return next(iter(response.requests.values()))


def _splits(request: Request) -> list[int]:
    count = len(request.ranks)
    return list(request.splits) or [request.shapes[0][0] // count] * count


class _Job:
    """One tensor of a collective."""

    def __init__(self, response: Response, position: int, values: Values) -> None:
        self.response, self.position = response, position
        self.values = {rank: arrays[position] for rank, arrays in values.items()}
        request = _first(response)
        self.kind, self.count = request.kind, len(response.ranks)
        self.shape = request.shapes[position]
        self.dtype = jnp.dtype(request.dtypes[position])
        self.kernel = Kernel(
            request.kind,
            ReduceOp[request.op] if request.op else ReduceOp.Sum,
            request.prescale,
            request.postscale,
            self.count,
            response.ranks.index(request.root) if request.root >= 0 else 0,
        )
        self._layout = getattr(self, f"_{request.kind}", self._same)()

    # Of each kind: how many rows go from a rank to each, by sender and receiver, where that
    # differs; None where the value is sent as it is.

    def _same(self) -> None:
        return None

    def _allgather(self) -> list[list[int]] | None:
        rows = [self._rows(rank) for rank in self.response.ranks]
        return None if len(set(rows)) == 1 else [[n] * self.count for n in rows]

    def _alltoall(self) -> list[list[int]] | None:
        splits = [_splits(self.response.requests[rank]) for rank in self.response.ranks]
        whole = all(
            sum(each) == self._rows(rank)
            for rank, each in zip(self.response.ranks, splits, strict=True)
        )
        even = len({n for each in splits for n in each}) == 1
        return None if even and whole else splits

    def _reducescatter(self) -> list[list[int]] | None:
        least, more = divmod(self.shape[0], self.count)
        pieces = [least + (i < more) for i in range(self.count)]
        return [pieces] * self.count if more else None

    def _rows(self, rank: int) -> int:
        return self.response.requests[rank].shapes[self.position][0]

    @property
    def most(self) -> int:
        """The rows that every piece is padded to."""
        assert self._layout is not None
        return max(max(each) for each in self._layout)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        if 0 in self.shape[1:] or (self._layout is None and 0 in self.shape):
            return True
        return self._layout is not None and self.most == 0

    def block(self, rank: int) -> Array:
        """What the rank's device is given."""
        value = self.values[rank]
        if self._layout is None:
            return value
        own = self._layout[self.response.ranks.index(rank)]
        if self.kind == "allgather":
            return _padded(value, self.most)
        ends = np.cumsum([0, *own])
        pieces = [_padded(value[a:b], self.most) for a, b in itertools.pairwise(ends)]
        return _concatenated(pieces)

    def result(self, rank: int, output: Array | None) -> Array:
        """What the rank gets, out of what its device has afterwards."""
        position = self.response.ranks.index(rank)
        if output is None:
            rows = (self._result_rows(position),) if self.shape else ()
            return np.zeros((*rows, *self.shape[1:]), self.dtype)
        if self._layout is None:
            return output
        if self.kind == "reducescatter":
            return output[: self._layout[0][position]]
        received = [each[position] for each in self._layout]
        pieces = output.reshape(self.count, self.most, *output.shape[1:])
        return _concatenated([pieces[i, :n] for i, n in enumerate(received)])

    def _result_rows(self, position: int) -> int:
        if self.kind in ("allreduce", "broadcast"):
            return self.shape[0]
        if self._layout is not None:
            if self.kind == "reducescatter":
                return self._layout[0][position]
            return sum(each[position] for each in self._layout)
        if self.kind == "allgather":
            return self.shape[0] * self.count
        return self.shape[0] if self.kind == "alltoall" else self.shape[0] // self.count


def _padded(value: Array, rows: int) -> Array:
    pads = [(0, rows - value.shape[0]), *[(0, 0)] * (value.ndim - 1)]
    return (np if isinstance(value, np.ndarray) else jnp).pad(value, pads)


def _concatenated(pieces: list[Array]) -> Array:
    return (np if isinstance(pieces[0], np.ndarray) else jnp).concatenate(pieces)


def _launch(
    jobs: Sequence[_Job], ranks: Sequence[int], own: Sequence[int], devices: Sequence[Any]
) -> list[dict[int, Array]]:
    """Of each job, the shard of each rank that is here, with a leading dim of 1."""
    if not jobs:
        return []
    program, sharding = _program(tuple(job.kernel for job in jobs), tuple(devices))
    device_of = dict(zip(ranks, devices, strict=True))
    with jax.enable_x64(True):
        inputs = []
        for job in jobs:
            blocks = {device_of[rank]: job.block(rank)[None] for rank in own}
            shape = (len(ranks), *next(iter(blocks.values())).shape[1:])
            inputs.append(arrays.put_each(shape, sharding, blocks))
        title = " ".join(sorted({f"horovod.{job.kind}" for job in jobs}))
        with jax.profiler.TraceAnnotation(title):
            outputs = program(*inputs)
    found = []
    for output in outputs:
        shards = {shard.device: shard.data for shard in output.addressable_shards}
        found.append({rank: shards[device_of[rank]] for rank in own})
    return found


@functools.lru_cache(maxsize=1024)
def _program(kernels: tuple[Kernel, ...], devices: tuple[Any, ...]) -> tuple[Any, Any]:
    """The program of some collectives on some devices, and how its inputs lie on them."""
    mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,))
    spec = jax.sharding.PartitionSpec(_AXIS)

    def on_device(*blocks: Any) -> Any:
        results = _fused(kernels, [block[0] for block in blocks])
        return tuple(result[None] for result in results)

    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped), jax.sharding.NamedSharding(mesh, spec)


_AXIS = "rank"


def _fused(kernels: Sequence[Kernel], values: list[Any]) -> list[Any]:
    """The kernels' results. Reductions of one kind and dtype are one, of a buffer of them all."""
    together: dict[Any, list[int]] = {}
    for i, (kernel, value) in enumerate(zip(kernels, values, strict=True)):
        alone = kernel.kind != "allreduce" or kernel.op == ReduceOp.Adasum
        together.setdefault((kernel, i if alone else value.dtype), []).append(i)
    results: list[Any] = [None] * len(values)
    for (kernel, _), members in together.items():
        if len(members) == 1:
            results[members[0]] = kernel.on_device(values[members[0]], (_AXIS,))
            continue
        buffer = jnp.concatenate([values[i].reshape(-1) for i in members])
        total = kernel.on_device(buffer, (_AXIS,))
        ends = np.cumsum([0, *(values[i].size for i in members)])
        for i, start, end in zip(members, ends[:-1], ends[1:], strict=True):
            results[i] = total[start:end].reshape(values[i].shape)
    return results
