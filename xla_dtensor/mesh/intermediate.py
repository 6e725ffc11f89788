"""Intermediate shardings for moves on which XLA's partitioner would end the process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from xla_dtensor.base.xla_faults import MOVES
from xla_dtensor.mesh.frame import Frame

DimAxes = Sequence[Sequence[str]]
"""Per tensor dim the mesh axes that shard it, major first."""


def intermediate_shardings(frame: Frame, before: DimAxes, after: DimAxes) -> list[Any]:
    """Shardings to ask of XLA for a value on its way from one sharding to another; mostly none.

    Where two or more axes of three go from dims of a tensor to others at once, XLA's partitioner
    may divide by zero, which ends the process (jaxlib 0.10.2). Of random pairs of layouts of a 4-d
    tensor 10 in 1500 did on 2x2x2x2, ``P(("c", "d"), "b")`` to ``P("a", None, ("b", "d"), "c")``
    for one, 5 in 900 on 2x3x2, 2 in 900 on 4x2x2, none in 4000 on 2x2x2; none on two axes, and of
    tensors of fewer dims. With one axis at a time it never did. Neighbours in the mesh that go from
    one dim to another together, in their order, are one axis to XLA, and go at once: one by one
    they would move as much as often as there are axes.

    Args:
        frame: the devices.
        before, after: how the value is sharded first, and at last.

    Returns:
        The first sharding, and one for each time that axes change their dim; axes that begin to
        shard come first, as they make what moves smaller.
    """
    axes = [name for name, size in frame.sizes.items() if size > 1]
    if len(axes) < MOVES.axes[0] or len(before) < MOVES.dims:
        return []
    old, new = ({a: dim for dim, names in enumerate(d) for a in names} for d in (before, after))
    turning: list[list[str]] = []
    for a in old:
        if a in axes and new.get(a, old[a]) != old[a]:
            last = turning[-1][-1] if turning else None
            both = last is not None and (old[last], new[last]) == (old[a], new[a])
            if both and all(_in_a_row(last, a, d) for d in (axes, before[old[a]], after[new[a]])):
                turning[-1].append(a)
            else:
                turning.append([a])
    if len(turning) < 2:
        return []
    now = [list(names) for names in before]
    found = [_sharding(frame, now)]
    for together in [*([a] for a in new if a not in old), *turning]:
        for axis in together:
            if axis in old:
                now[old[axis]].remove(axis)
            now[new[axis]].append(axis)
        found.append(_sharding(frame, now))
    return found


def _in_a_row(one: Any, two: str, names: Sequence[str]) -> bool:
    """Whether the second of two names comes right after the first."""
    return (one, two) in itertools.pairwise(names)


def _sharding(frame: Frame, dims: DimAxes) -> Any:
    return frame.sharding(*(tuple(names) or None for names in dims))
