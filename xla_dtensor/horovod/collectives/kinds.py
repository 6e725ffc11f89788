"""The kinds of collectives, a class for each: `Allreduce` to `Alltoall`, `Barrier`, `Join`.

Which method is asked by whom, and what it says by default, is in their base, `HorovodCollective`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.errors import HorovodInternalError, UnsupportedOpError
from xla_dtensor.horovod.collectives.collective import (
    Axes,
    Done,
    HorovodCollective,
    Pieces,
    Request,
    Sets,
)
from xla_dtensor.horovod.collectives.reductions import (
    Adasum,
    Average,
    Max,
    Min,
    ReduceOp,
    Sum,
    fractional,
    reduced,
    scaled,
)


@dataclass(frozen=True)
class _Reducing(HorovodCollective):
    """What both share.

    Attributes:
        op: the reduction.
        prescale, postscale: factors before and after it.
    """

    op: ReduceOp = Sum
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def title(self) -> str:
        return f"{self.kind} with {self.op.name}"

    def of_rank(self, rank: int) -> _Reducing:
        prescale, postscale = float(self.prescale), float(self.postscale)
        return dataclasses.replace(self, prescale=prescale, postscale=postscale)

    def agreed(self) -> dict[str, Any]:
        return {
            "reductions": self.op.name,
            "prescale factors": self.prescale,
            "postscale factors": self.postscale,
        }

    def mistake(self, rank: int, request: Request) -> str:
        count = len(request.ranks)
        if self.op == Adasum and count & (count - 1):
            return f"Adasum needs a power of two of ranks, not {count}"
        return super().mistake(rank, request)

    def _result(self, value: Any, axes: Axes, sets: Sets, count: int) -> Any:
        dtype = value.dtype
        value = scaled(value, self.prescale)
        if self.op == Average and not fractional(dtype):
            value = value.astype(jnp.int64)
        if dtype == jnp.bool_:
            value = value.astype(jnp.uint8)
        total = super()._result(value, axes, sets, count)
        if self.op == Average:
            total = total // count if not fractional(dtype) else total / count
        if dtype == jnp.bool_:
            total = total != 0
        return scaled(total.astype(dtype), self.postscale)

    def _check_gradient(self) -> None:
        if self.op not in (Average, Sum):
            raise UnsupportedOpError(
                f"the gradient of {_an(self.kind)} with {self.op!r}: there is one of Average and "
                "of Sum"
            )


def _an(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


@dataclass(frozen=True)
class Allreduce(_Reducing):
    """All ranks get the reduction of their tensors."""

    kind, xla_name = "allreduce", "all-reduce"
    keeps_shape = same_on_all = True

    @property
    def outlives_joins(self) -> bool:
        return self.op in (Average, Sum, Adasum)

    @property
    def is_fused(self) -> bool:
        return self.op != Adasum

    def _of_all(self, value: Any, axes: Axes) -> Any:
        if self.op in (Average, Sum):
            return jax.lax.psum(value, axes)
        if self.op == Min:
            return jax.lax.pmin(value, axes)
        if self.op == Max:
            return jax.lax.pmax(value, axes)
        return reduced(self.op, jax.lax.all_gather(value, axes))

    def _of_set(self, parts: Any, position: Any) -> Any:
        return reduced(self.op, parts)

    def gradients(self, done: Done, grads: list[Any]) -> list[Any]:
        """The same reduction of the ranks' gradients."""
        self._check_gradient()
        return done.again(self, grads)


@dataclass(frozen=True)
class Reducescatter(_Reducing):
    """Each rank gets its rows of the reduction of the ranks' tensors."""

    kind, xla_name = "reducescatter", "reduce-scatter"

    def __post_init__(self) -> None:
        if self.op == Adasum:
            raise HorovodInternalError(
                "reducescatter with Adasum: the ranks' whole tensors make its factors, so use "
                "hvd.allreduce(tensor, op=hvd.Adasum) and take the rows"
            )

    def check_on_devices(self, request: Request) -> None:
        count = len(request.ranks)
        if any(shape[0] % count for shape in request.shapes):
            raise UnsupportedOpError(
                f"reducescatter of tensors of shapes {[list(s) for s in request.shapes]} over "
                f"{count} devices: a per-device tensor has one shape on all of them, so dim 0 has "
                "to divide; pad it, or give one tensor per rank, hvd.per_rank(fn) or hvd.run"
            )

    def _of_all(self, value: Any, axes: Axes) -> Any:
        if self.op in (Average, Sum):
            return jax.lax.psum_scatter(value, axes, scatter_dimension=0, tiled=True)
        pieces = value.reshape(jax.lax.axis_size(axes), -1, *value.shape[1:])
        pieces = jax.lax.all_to_all(pieces, axes, split_axis=0, concat_axis=0, tiled=True)
        return reduced(self.op, pieces)

    def _of_set(self, parts: Any, position: Any) -> Any:
        return reduced(self.op, _piece_of_each(parts, position))

    def result_rows(self, rows: int, count: int) -> int:
        return rows // count

    def pieces(self, requests: Sequence[Request], tensor: int) -> Pieces | None:
        count = len(requests)
        least, more = divmod(requests[0].shapes[tensor][0], count)
        return [[least + (i < more) for i in range(count)]] * count if more else None

    def received(self, pieces: Pieces, position: int) -> list[int]:
        return [pieces[0][position]]

    def gradients(self, done: Done, grads: list[Any]) -> list[Any]:
        """Those of all ranks' rows."""
        self._check_gradient()
        factor = self.prescale * self.postscale
        if self.op == Sum:
            factor *= len(done.requests)
        if factor != 1:
            grads = [grad * factor for grad in grads]
        return done.again(Allgather(), grads)


@dataclass(frozen=True)
class Allgather(HorovodCollective):
    """All ranks get the rows of all, one rank's after the other's."""

    kind, xla_name = "allgather", "all-gather"
    same_on_all = rows_may_differ = True

    def _of_all(self, value: Any, axes: Axes) -> Any:
        return jax.lax.all_gather(value, axes, axis=0, tiled=True)

    def _of_set(self, parts: Any, position: Any) -> Any:
        return parts.reshape(-1, *parts.shape[2:])

    def result_rows(self, rows: int, count: int) -> int:
        return rows * count

    def pieces(self, requests: Sequence[Request], tensor: int) -> Pieces | None:
        rows = [request.shapes[tensor][0] for request in requests]
        return None if len(set(rows)) == 1 else [[n] * len(rows) for n in rows]

    def gradients(self, done: Done, grads: list[Any]) -> list[Any]:
        """The average of what the ranks say of this one's rows."""
        if done.position is None:  # devices, which have equally many
            return done.again(Reducescatter(Average), grads)
        own = []
        for tensor, average in enumerate(done.again(Allreduce(Average), grads)):
            rows = [request.shapes[tensor][0] for request in done.requests]
            own.append(average.narrow(0, sum(rows[: done.position]), rows[done.position]))
        return own


@dataclass(frozen=True)
class Broadcast(HorovodCollective):
    """All ranks get one rank's tensor.

    Attributes:
        root: the rank; once it is `placed`, its position in its set.
    """

    root: int

    kind, xla_name = "broadcast", "all-reduce"
    keeps_shape = same_on_all = True

    def agreed(self) -> dict[str, Any]:
        return {"root ranks": self.root}

    def mistake(self, rank: int, request: Request) -> str:
        ranks = request.ranks
        if self.root not in ranks:
            return f"root rank {self.root} is none of the {len(ranks)} ranks {list(ranks)}"
        return ""

    def set_of(self, sets: list[list[int]]) -> list[int]:
        return next((ranks for ranks in sets if self.root in ranks), sets[0])

    def placed(self, ranks: Sequence[int]) -> Broadcast:
        return Broadcast(ranks.index(self.root))

    def _of_all(self, value: Any, axes: Axes) -> Any:
        if jnp.issubdtype(value.dtype, jnp.complexfloating):
            parts = (self._of_all(part, axes) for part in (value.real, value.imag))
            return jax.lax.complex(*parts)
        own = jax.lax.axis_index(axes) == self.root
        if value.dtype == jnp.bool_:
            return jax.lax.pmax(jnp.where(own, value, False), axes)
        if fractional(value.dtype):
            # Its bits: a sum with zeros would make 0.0 of -0.0.
            bits = jax.lax.bitcast_convert_type(value, jnp.dtype(f"uint{8 * value.dtype.itemsize}"))
            return jax.lax.bitcast_convert_type(self._of_all(bits, axes), value.dtype)
        return jax.lax.psum(jnp.where(own, value, jnp.zeros_like(value)), axes)

    def _of_set(self, parts: Any, position: Any) -> Any:
        return parts[self.root]

    def gradients(self, done: Done, grads: list[Any]) -> list[Any]:
        """At the root the average of the ranks' gradients, elsewhere zeros."""
        averages = done.again(Allreduce(Average), grads)
        is_root = done.world.rank == self.root
        if not isinstance(is_root, bool):  # a number on each device
            return [torch.where(is_root, average, 0) for average in averages]
        return averages if is_root else [torch.zeros_like(average) for average in averages]


@dataclass(frozen=True)
class Alltoall(HorovodCollective):
    """Each rank's rows go to the ranks.

    Attributes:
        splits: how many go to each; None for equally many; a list, by rank, of who speaks for all.
    """

    splits: Any = None

    kind, xla_name = "alltoall", "all-to-all"
    rows_may_differ = True

    @property
    def differs_by_rank(self) -> bool:
        return isinstance(self.splits, list)

    def of_rank(self, rank: int) -> Alltoall:
        return Alltoall(self.splits[rank]) if isinstance(self.splits, list) else self

    def mistake(self, rank: int, request: Request) -> str:
        wrong = super().mistake(rank, request)
        if wrong:
            return wrong
        rows, count, splits = request.shapes[0][0], len(request.ranks), list(self.splits or ())
        if not splits and rows % count:
            wrong = (
                f"the {rows} rows of the tensor don't divide by the {count} ranks, and no splits "
                "are given"
            )
        elif splits and len(splits) != count:
            wrong = f"there are {len(splits)} splits {splits} for {count} ranks"
        elif splits and min(splits) < 0:
            wrong = f"one of the splits {splits} is negative"
        elif sum(splits) > rows:
            wrong = f"the splits {splits} add up to more than the {rows} rows of the tensor"
        return f"on rank {rank} {wrong}" if wrong else ""

    def check_on_devices(self, request: Request) -> None:
        if self.splits and len(set(self.splits)) > 1:
            raise UnsupportedOpError(
                f"alltoall with splits {list(self.splits)}: a per-device tensor has one shape on "
                "all devices; give equal splits, or one tensor per rank (a PerRank of hvd.per_rank)"
            )

    def placed(self, ranks: Sequence[int]) -> Alltoall:
        return Alltoall()

    def _of_all(self, value: Any, axes: Axes) -> Any:
        return jax.lax.all_to_all(value, axes, split_axis=0, concat_axis=0, tiled=True)

    def _of_set(self, parts: Any, position: Any) -> Any:
        return _piece_of_each(parts, position).reshape(-1, *parts.shape[2:])

    def sent_rows(self) -> int | None:
        return sum(self.splits) if self.splits else None

    def pieces(self, requests: Sequence[Request], tensor: int) -> Pieces | None:
        sent = [_sent(request) for request in requests]
        whole = all(sum(n) == r.shapes[0][0] for n, r in zip(sent, requests, strict=True))
        even = len({n for each in sent for n in each}) == 1
        return None if even and whole else sent

    def more_results(self, requests: Sequence[Request], position: int) -> list[Any]:
        """With splits: how many rows have come from each rank."""
        if self.splits is None:
            return []
        return [torch.tensor(_received(requests, position), dtype=torch.int32)]

    def gradients(self, done: Done, grads: list[Any]) -> list[Any]:
        """They go back the same ways."""
        position = done.position or 0
        received = _received(done.requests, position)
        grad = done.again(Alltoall(tuple(received)), grads)[0]
        kept = done.requests[position].shapes[0][0] - grad.shape[0]  # rows that went to nobody
        if kept:
            grad = torch.cat([grad, grad.new_zeros(kept, *grad.shape[1:])])
        return [grad]


def _sent(request: Request) -> list[int]:
    """How many rows of an alltoall go from a rank to each."""
    assert isinstance(request.collective, Alltoall)
    count = len(request.ranks)
    return list(request.collective.splits or [request.shapes[0][0] // count] * count)


def _received(requests: Sequence[Request], position: int) -> list[int]:
    """How many rows of an alltoall have come to a rank from each."""
    return [_sent(request)[position] for request in requests]


def _piece_of_each(parts: Any, position: Any) -> Any:
    """Of each member's value the piece that is for the member at ``position``."""
    count = parts.shape[0]
    pieces = parts.reshape(count, count, -1, *parts.shape[2:])
    return jax.lax.dynamic_index_in_dim(pieces, position, axis=1, keepdims=False)


# --- without tensors -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Barrier(HorovodCollective):
    """All ranks of a set come here."""

    kind = "barrier"
    outlives_joins = True


@dataclass(frozen=True)
class Join(HorovodCollective):
    """A rank takes part in what the others do, with zeros, until all have come here."""

    kind = "join"


@dataclass(frozen=True)
class ProcessSetChange(HorovodCollective):
    """All ranks add or remove the same process set.

    Attributes:
        change: which, and what is done with it.
    """

    change: str

    kind = "process_set"

    def agreed(self) -> dict[str, Any]:
        return {"arguments": self.change}
