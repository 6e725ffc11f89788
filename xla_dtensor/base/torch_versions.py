"""What differs between the supported torch versions (2.11 to 2.15), in one place.

Checked on 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0; what differs is written where it matters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

# Before torch 2.13, DTensor's C++ fast path took over for subclasses of DTensor too, and never
# called their ``__torch_dispatch__``.
SUBCLASSES_DISPATCH = TORCH_VERSION >= (2, 13)


def layout_pieces(mesh: DeviceMesh) -> list[list[tuple[int, int]]]:
    """Per mesh dim its (size, stride) pieces in the root's flat device list, major to minor.

    torch >= 2.13 keeps a canonical layout object per mesh dim; before, the mesh's layout had nested
    ``shape`` and ``stride`` tuples.
    """
    return _pieces(mesh._layout)


def layout_sizes(layout: Any) -> list[int]:
    """Per mesh dim of a mesh's layout its size."""
    return [math.prod(size for size, _ in pieces) for pieces in _pieces(layout)]


def _pieces(layout: Any) -> list[list[tuple[int, int]]]:
    if hasattr(layout, "axes"):
        return [list(zip(axis.shape, axis.stride, strict=True)) for axis in layout.axes]
    return [
        list(zip(_flat(shape), _flat(stride), strict=True))
        for shape, stride in zip(_as_tuple(layout.shape), _as_tuple(layout.stride), strict=True)
    ]


def _as_tuple(x: object) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def _flat(x: object) -> list[int]:
    if isinstance(x, tuple):
        return [leaf for item in x for leaf in _flat(item)]
    return [x]  # type: ignore[list-item]
