"""Which device has which part of a tensor, as a table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from xla_dtensor.forms.pieces import pieces
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

Range = tuple[int, int]
"""The first and the last index, as torch prints them."""

_MOST_DIMS = 3


def device_ranges(tensor: XLAShardedTensor) -> list[tuple[tuple[Range, ...], int]]:
    """Per device of the root mesh the part of each tensor dim that it has, and its number. No value
    is looked at."""
    form = tensor._form
    if form.unreduced:
        form = form.reduced()
    return [
        (tuple((part.start, part.stop - 1) for part in piece.index), piece.number)
        for piece in pieces(form)
    ]


def sharding_text(tensor: XLAShardedTensor) -> str:
    """What torch's ``visualize_sharding`` prints of a tensor of one or two dims; of one of three a
    table for each part of its first dim.

    Raises:
        RuntimeError: it has no dims, or more.
    """
    if not 1 <= tensor.ndim <= _MOST_DIMS:
        raise RuntimeError(
            f"visualize_sharding of a tensor of shape {list(tensor.shape)}: it shows tensors of "
            f"one to {_MOST_DIMS} dims; print(x.layout), or x.local_shards of all devices"
        )
    shards = device_ranges(tensor)
    if tensor.ndim < _MOST_DIMS:
        return _table([(*ranges, (0, 0))[:2] for ranges, _ in shards], [n for _, n in shards])
    parts = []
    for first in sorted({ranges[0] for ranges, _ in shards}):
        own = [(ranges[1:], number) for ranges, number in shards if ranges[0] == first]
        table = _table([ranges for ranges, _ in own], [number for _, number in own])
        parts.append(f"Dim 0: {first[0]}-{first[1]}\n{table}")
    return "\n\n".join(parts)


def rectangles(tensor: XLAShardedTensor) -> list[tuple[Range, Range, int]]:
    """The parts of a tensor of one or two dims, as torch's tables with colours take them."""
    return [
        (ranges[0], ranges[1] if len(ranges) > 1 else (0, 0), number)
        for ranges, number in device_ranges(tensor)
    ]


def _table(places: Sequence[tuple[Range, ...]], numbers: Sequence[int]) -> str:
    """As the package ``tabulate`` writes it, which torch needs for it."""
    rows, columns = (sorted({place[i] for place in places}) for i in (0, 1))
    cells = [["", *(f"Col {start}-{stop}" for start, stop in columns)]]
    for row in rows:
        line = [f"Row {row[0]}-{row[1]}"]
        for column in columns:
            devices = [n for at, n in zip(places, numbers, strict=True) if at == (row, column)]
            line.append("" if not devices else f"xla:{','.join(map(str, devices))}")
        cells.append(line)
    widths = [max(len(head) + 2, *map(len, rest)) for head, *rest in zip(*cells, strict=True)]
    lines = [cells[0], ["-" * width for width in widths], *cells[1:]]
    return "\n".join(
        "  ".join(itertools.starmap(str.ljust, zip(line, widths, strict=True))).rstrip()
        for line in lines
    )
