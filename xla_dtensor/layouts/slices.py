"""Slices of sharded dims that devices can't share evenly, and those that cut off padding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from xla_dtensor.layouts.factors import Factor
from xla_dtensor.layouts.parts import Group, Node

_SLICES = ("dynamic_slice", "slice", "split", "strided_slice")


def is_cut_into(equation: Any, source: Group | None, sizes: Mapping[str, int]) -> bool:
    """Whether a slice is taken of a dim that is known to be sharded, and devices can't share it
    evenly: XLA passes on between neighbours what is needed, if nothing is asked for."""
    if equation.primitive.name not in _SLICES or source is None or source.known is None:
        return False
    for d, (axes, size) in enumerate(zip(source.known, source.shape, strict=True)):
        devices = math.prod(sizes[axis] for axis in axes)
        kept = equation.outvars[0].aval.shape[d]
        is_padding = -(-kept // devices) * devices == size
        if kept != size and kept % devices and not is_padding:
            return True
    return False


def cut_off_padding(node: Node, source: Group | None, group: Group | None) -> None:
    """A parameter of 10 columns on 4 devices is an array of 12; what is cut out of it lies as it
    did: another factor of the slice."""
    params = node.equation.params
    if source is None or group is None or source.known is None or params["strides"]:
        return
    for d, axes in enumerate(source.known):
        if axes and group.shape[d] < source.shape[d] and not params["start_indices"][d]:
            group.uneven.add(d)
            node.factors.append(Factor({0: d}, {0: d}))
