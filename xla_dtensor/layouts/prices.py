"""The cost of changes of layout, in bytes of a collective's result on a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from xla_dtensor.layouts.factors import SUM, Factor
from xla_dtensor.layouts.parts import Group

State = int | None
"""The dim that an axis shards, or `SUM`; None of what is whole along it."""


@dataclass(frozen=True)
class Other:
    """How a result of a node moves along other axes.

    Attributes:
        factor: by what these cut the node.
        before, after: how these cut the result.
        nbytes: what a device has of it then, whole along these axes and this one.
        size: how many devices there are along them.
        inside: how many of these are in one slice or host.
        is_first: whether it moves along them before it does along this axis.
    """

    factor: Factor
    before: State
    after: State
    nbytes: float
    size: int
    inside: int
    is_first: bool


WORK_PER_BYTE = 100.0
"""How many floating-point operations cost as much as a byte that is moved. Accelerators do ten
times as many, but what is computed on all devices is kept on all of them, too."""

FILLED_PER_BYTE = 1000.0
"""How many bytes of a device's memory that are filled cost as much as a byte that is moved."""


def is_moved(before: State, after: State) -> bool:
    """Whether a value that goes from one state to another along an axis is communicated."""
    return before is not None and before != after


def collective(before: State, after: State, nbytes: float, size: int) -> tuple[str, float] | None:
    """The collective that takes a value from one state to another along an axis of ``size``, and
    the bytes of its result on a device, of the ``nbytes`` that one has of the whole; None if there
    is nothing to communicate. XLA's CPU compiler makes a sum of a reduce-scatter, and cuts that."""
    if not is_moved(before, after):
        return None
    if before == SUM:
        return ("all-reduce" if after is None else "reduce-scatter"), nbytes
    return ("all-gather", nbytes) if after is None else ("all-to-all", nbytes / size)


@dataclass(frozen=True)
class Prices:
    """What collectives cost.

    Attributes:
        startup: of each, however little it moves, in bytes.
        all_reduce, reduce_scatter: of each byte; of other kinds it is 1.
        kept: of each byte of state that a device reads or writes in its memory. `xd.tune` alone
            looks at it, as it alone says how state lies.
        slow: what a byte costs along an axis that leaves a slice or a host, next to one inside.
        lanes: elements to which shorter rows are filled up where they lie, and on slow links.
    """

    startup: float = 500.0
    all_reduce: float = 1.0
    reduce_scatter: float = 1.0
    kept: float = 0.0
    slow: float = 8.0
    lanes: int = 1

    def of(self, move: tuple[str, float] | None, each: float = 1.0) -> float:
        """Of a collective.

        Args:
            move: its kind and bytes; None if there is none.
            each: what a byte costs along its axes (`toll`).
        """
        if move is None:
            return 0.0
        kind, nbytes = move
        per_byte = {"all-reduce": self.all_reduce, "reduce-scatter": self.reduce_scatter}
        return self.startup + nbytes * each * per_byte.get(kind, 1.0)

    def toll(self, along: Iterable[tuple[int, int]]) -> float:
        """What a byte of a collective costs along several axes: what is summed inside of slices
        first goes in parts between them.

        Args:
            along: of each axis how many devices it has, and how many of them are in one slice.
        """
        along = list(along)
        inside = math.prod(own for _, own in along)
        if all(own == size for size, own in along):
            return 1.0
        return self.slow if inside == 1 else 1.0 + self.slow / inside


BY_BYTES = Prices()
"""By the bytes of results; a sum that is cut costs what XLA's CPU compiler makes of it, a sum. A
byte that leaves a host counts as eight: an H100 has 450 GB/s of NVLink and 50 of its network
card."""

COMPILED_FOR_GPUS = Prices(reduce_scatter=0.99)
"""A reduce-scatter costs a little less than a sum on GPUs, so that a sum is cut where it is made,
and no cast is between the two, behind which the GPU's compiler sees no reduce-scatter. The TPU's
sees it there too. Of a product whose result is cut it makes a ring of pieces instead, which moves a
sum's bytes."""

COMPILED_FOR_TPUS = Prices(slow=64.0, lanes=128)
"""A v5e has 200 GB/s along the two axes of its slice and 3 between slices, a v5p 600 and 6. A TPU's
vectors have 128 lanes, and libtpu sends arrays between slices as they lie: 16 columns of a table's
gradient, which 256 chips shared, took eight times their bytes."""

BY_TIME = Prices(startup=200_000.0, all_reduce=2.0, kept=1 / 8)
"""By the time that links of accelerators take: two microseconds at 100 GB/s before anything comes,
and a sum that all get whole goes along them twice. A byte in memory takes an eighth: an H100 reads
3,350 GB/s and its links have 450, a v5p 2,765 and a ring of it 200, a v5e 819 and 100."""


def exchanged(factor: Factor, result: Group, nbytes: float, size: int) -> float:
    """What a device needs of what others along the axis have, in a node's first result.

    Args:
        nbytes: what a device has of the result, whole along the axis.
        size: of the axis.
    """
    length = result.shape[factor.results[0]] / size
    return nbytes / size * min(factor.exchanges / length, 1.0)


def is_all_reduce(before: State, after: State) -> bool:
    """Whether that move is a sum that all devices get whole."""
    return before == SUM and after is None


def local_bytes(group: Group, axes: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> float:
    """What a device has of a group whose dims are sharded by ``axes``."""
    return group.nbytes / math.prod(sizes[axis] for names in axes for axis in names)
