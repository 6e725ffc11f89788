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
        is_slow: whether they leave a slice or a host.
        is_first: whether it moves along them before it does along this axis.
    """

    factor: Factor
    before: State
    after: State
    nbytes: float
    size: int
    is_slow: bool
    is_first: bool


STARTUP_BYTES = 500.0
"""What a collective costs, however little it moves, in bytes."""
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


SCATTERED_ON_GPUS = 0.99
"""What a reduce-scatter costs on GPUs, of what the sum costs that XLA's CPU compiler makes of it: a
little less, so that a sum is cut where it is made, and no cast is between the two, behind which the
GPU's compiler sees no reduce-scatter. The TPU's sees it there too. Of a product whose result is cut
it makes a ring of pieces instead, which moves a sum's bytes."""


SLOW = 8.0
"""What a byte costs along an axis that leaves a slice or a host, of what it costs inside: an H100
has 450 GB/s of NVLink and 50 of its network card, a v5e 100 along a ring and 3."""


def toll(along: Iterable[tuple[int, bool]]) -> float:
    """What a byte of a collective costs along several axes: what is summed inside of slices first
    goes in parts between them.

    Args:
        along: of each axis how many devices it has, and whether it is slow.
    """
    along = list(along)
    inside = math.prod(size for size, is_slow in along if not is_slow)
    if not any(is_slow for _, is_slow in along):
        return 1.0
    return SLOW if inside == 1 else 1.0 + SLOW / inside


def paid(move: tuple[str, float] | None, scattered: float, each: float = 1.0) -> float:
    """What a collective of so many bytes costs.

    Args:
        move: its kind and bytes; None if there is none.
        scattered: what a reduce-scatter costs, of its bytes.
        each: what a byte costs along its axes (`toll`).
    """
    if move is None:
        return 0.0
    kind, nbytes = move
    return STARTUP_BYTES + nbytes * each * (scattered if kind == "reduce-scatter" else 1.0)


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
