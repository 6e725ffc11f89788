"""`HorovodCollective`, the base of the kinds of collectives, and `Request`, a rank's part of one.

Where the code needs to know something of a kind, it asks a method here, which the kind's class
overrides: `reducing` has `Allreduce` and `Reducescatter`, `moving` has `Allgather`, `Broadcast` and
`Alltoall`, `meetings` those without tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

Axes = tuple[str, ...]
Shape = tuple[int, ...]
Sets = tuple[tuple[int, ...], ...] | None
"""None if all devices are one set; else the members of each set, of equal sizes."""

Pieces = list[list[int]]
"""How many rows go from each rank to each, by sender and receiver."""


@dataclass(frozen=True)
class HorovodCollective:
    """What the ranks do together. Its fields are what the caller has said, besides tensors; they
    are plain data, and equal ones share a compiled program.

    Attributes:
        kind: its name.
        xla_name: that of XLA's collective, by which it is priced.
        keeps_shape: whether a result has the tensor's shape; else it has rows, and so has the
            tensor.
        same_on_all: whether all ranks get the same; else each gets the pieces that are for it.
        rows_may_differ: whether the ranks' tensors may have different first dims.
    """

    kind: ClassVar[str]
    xla_name: ClassVar[str]
    keeps_shape: ClassVar[bool] = False
    same_on_all: ClassVar[bool] = False
    rows_may_differ: ClassVar[bool] = False

    @property
    def outlives_joins(self) -> bool:
        """Whether ranks that have joined take part, with zeros."""
        return False

    @property
    def differs_by_rank(self) -> bool:
        """Whether the caller, who speaks for all ranks, has said other things for each."""
        return False

    @property
    def is_fused(self) -> bool:
        """Whether those of one dtype are computed as one, of a buffer of them all."""
        return False

    @property
    def title(self) -> str:
        """What it is, for an error."""
        return self.kind

    # --- what its ranks ask for -----------------------------------------------------------------

    def agreed(self) -> dict[str, Any]:
        """What has to be the same on all ranks, by how errors call it."""
        return {}

    def agreed_shape(self, shape: Shape) -> list[Any]:
        """What of a tensor's shape has to be the same on all ranks."""
        return ["any", *shape[1:]] if self.rows_may_differ else list(shape)

    def mistake(self, rank: int, request: Request) -> str:
        """What is wrong with one rank's part; "" if nothing."""
        if not self.keeps_shape and () in request.shapes:
            return f"rank {rank} has a tensor without dims, where rows are needed"
        return ""

    def check_on_devices(self, request: Request) -> None:
        """Raise for results whose shapes differ by rank, which a per-device tensor can't have."""

    def of_rank(self, rank: int) -> HorovodCollective:
        """What one rank asks for, where the caller speaks for all."""
        return self

    def set_of(self, sets: list[list[int]]) -> list[int]:
        """Of several sets at once, the one that the fields are about."""
        return sets[0]

    # --- what devices compute -------------------------------------------------------------------

    def placed(self, ranks: Sequence[int]) -> HorovodCollective:
        """With nothing but what devices have to know of it, by positions among its ranks."""
        return self

    def on_device(self, value: Any, axes: Axes, sets: Sets = None) -> Any:
        """What a device has afterwards, inside of ``jax.shard_map``; of `placed`.

        Args:
            value: what it has. If it is cut, dim 0 is the set's size times a piece.
            axes: the mesh axes along which the ranks are, major to minor.
            sets: which devices are together. One that is in none keeps its value.
        """
        count = jax.lax.axis_size(axes) if sets is None else len(sets[0])
        if not value.size:  # which XLA's collectives don't take
            rows = self.result_rows(value.shape[0], count)
            return jnp.zeros((rows, *value.shape[1:]), value.dtype)
        result = self._result(value, axes, sets, count)
        if sets is not None and self.keeps_shape:
            inside = (jnp.array(sets) == jax.lax.axis_index(axes)).any()
            result = jnp.where(inside, result, value)
        return result

    def _result(self, value: Any, axes: Axes, sets: Sets, count: int) -> Any:
        if sets is None:
            return self._of_all(value, axes)
        # All devices' values, of which each takes those of its set: sets may be any lists of
        # devices, for which XLA has no groups on all platforms. A device in none takes the first's.
        me, table = jax.lax.axis_index(axes), jnp.array(sets)
        members = table[jnp.argmax((table == me).any(1))]
        position = jnp.argmax(members == me)
        return self._of_set(jax.lax.all_gather(value, axes)[members], position)

    def _of_all(self, value: Any, axes: Axes) -> Any:
        """The result where all devices are one set: XLA's collective."""
        raise NotImplementedError

    def _of_set(self, parts: Any, position: Any) -> Any:
        """The result of the member at a position, from all members' values."""
        raise NotImplementedError

    # --- the shapes of what is sent -------------------------------------------------------------

    def sent_rows(self) -> int | None:
        """How many of a tensor's rows are sent at all, where that isn't all of them."""
        return None

    def result_rows(self, rows: int, count: int) -> int:
        """The rows of a result, of tensors with so many rows on all ranks."""
        return rows

    def pieces(self, requests: Sequence[Request], tensor: int) -> Pieces | None:
        """How a tensor is cut, where pieces differ in size; None where it is sent as it is.

        Args:
            requests: the ranks' parts, in order.
            tensor: its number.
        """
        return None

    def received(self, pieces: Pieces, position: int) -> list[int]:
        """The rows of what comes to a rank, one piece after the other."""
        return [each[position] for each in pieces]

    # --- what the caller gets -------------------------------------------------------------------

    def more_results(self, requests: Sequence[Request], position: int) -> list[Any]:
        """Results besides the tensors'.

        Args:
            requests: the ranks' parts, in order.
            position: that of the rank among them.
        """
        return []

    def gradients(self, done: Done, grads: list[Any]) -> list[Any]:
        """The tensors' gradients.

        Args:
            done: what was done.
            grads: of the results.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Request:
    """One rank's part of a collective: what of it the others have to know. Plain data, that goes
    between threads as it is and between processes pickled.

    Attributes:
        collective: what is to be done, as this rank asks for it.
        name: under which the ranks' parts find each other.
        ranks: the ranks that take part, of the process set.
        set_id: the process set's number.
        shapes, dtypes: of the rank's tensors; several in a grouped collective.
    """

    collective: HorovodCollective
    name: str
    ranks: tuple[int, ...]
    set_id: int = 0
    shapes: tuple[Shape, ...] = ()
    dtypes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What the ranks' parts have in common."""
        return f"{self.set_id}:{self.name}"

    @property
    def title(self) -> str:
        """As errors call it."""
        kind = self.collective.kind
        return f"{kind} {self.name.removeprefix(f'{kind}.')!r}"


@dataclass(frozen=True)
class Done:
    """A collective that is done, as its gradient sees it.

    Attributes:
        requests: the ranks' parts, in order.
        position: the caller's among them; None where one process drives all ranks.
        world: the ranks as the caller sees them.
        again: does a collective of gradients, with the same ranks.
    """

    requests: Sequence[Request]
    position: int | None
    world: Any
    again: Callable[[HorovodCollective, list[Any]], list[Any]]
