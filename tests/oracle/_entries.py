"""What a scenario dumps, and the comparison of two dumps.

A dump is, per rank, a dict from name to `Entry`. Nothing here knows how a dump was made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Pending:
    """A local value that stands for its reduction over some dims of the mesh.

    Attributes:
        op: ``sum``, ``avg``, ``max`` or ``min``.
        dims: positions of the mesh dims to reduce over.
    """

    op: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One dumped value, as one rank sees it.

    Attributes:
        kind: ``sharded`` is a DTensor, ``local`` a plain tensor; ``partial`` is either of them with
            a reduction pending; ``value`` is either of them where only the value counts; ``none``
            is None.
        local: what the rank holds. Not kept for a ``Partial`` DTensor: how its value is spread over
            the ranks is the implementation's choice.
        full: the logical value of a DTensor.
        shape: as the program reads it: global of a DTensor, local of a plain tensor.
        stride: likewise; only where the scenario asked for it.
        pending: the reduction of a ``partial`` plain tensor.
    """

    kind: Literal["sharded", "local", "partial", "value", "none"]
    mesh_shape: tuple[int, ...] = ()
    local: torch.Tensor | None = None
    full: torch.Tensor | None = None
    placements: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    requires_grad: bool | None = None
    stride: tuple[int, ...] | None = None
    pending: Pending | None = None


Dump = dict[str, Entry]
_METADATA = ("kind", "placements", "shape", "dtype", "requires_grad", "stride", "pending")
_REDUCTIONS = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum}


def compare(expected: Sequence[Dump], actual: Sequence[Dump]) -> list[str]:
    """Every difference between two dumps, one line each, with its name and rank.

    Floating-point values agree if they differ by at most `TOLERANCE`, times the largest magnitude
    in the tensor where that is above 1; all else has to be equal.
    """
    if len(expected) != len(actual):
        return [f"{len(expected)} ranks expected, got {len(actual)}"]
    expected, actual = _reduced(expected), _reduced(actual)
    problems = []
    for rank, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
        if list(wanted) != list(got):
            missing, extra = set(wanted) - set(got), set(got) - set(wanted)
            problems.append(
                f"rank {rank}: the names differ: missing {sorted(missing)}, extra {sorted(extra)}"
                + ("" if missing or extra else ", the order too")
            )
        for name in wanted:
            if name in got:
                differences = _differences(wanted[name], got[name])
                problems += [f"{name}, rank {rank}: {text}" for text in differences]
    return problems


def _differences(expected: Entry, actual: Entry) -> Iterator[str]:
    for field in _METADATA:
        wanted, got = getattr(expected, field), getattr(actual, field)
        if wanted != got:
            yield f"{field} {wanted} expected, got {got}"
    for field in ("local", "full"):
        wanted, got = getattr(expected, field), getattr(actual, field)
        if (wanted is None) != (got is None):
            yield f"{field} value: {_brief(wanted)} expected, got {_brief(got)}"
        elif wanted is not None:
            text = _value_difference(wanted, got)
            if text:
                yield f"{field} value: {text}"


def _brief(value: torch.Tensor | None) -> str:
    return "none" if value is None else f"{value.dtype} {tuple(value.shape)}"


def _value_difference(expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"{_brief(expected)} expected, got {_brief(actual)}"
    if expected.numel() == 0 or torch.equal(expected, actual):
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = expected != actual
    else:
        finite = expected[expected.isfinite()].abs()
        scale = max(1.0, finite.max().item() if finite.numel() else 0.0)
        wrong = ~torch.isclose(actual, expected, rtol=0, atol=TOLERANCE * scale, equal_nan=True)
    if not wrong.any():
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements differ; at {list(index)} "
        f"{expected[index].item()} expected, got {actual[index].item()}"
    )


def _reduced(dumps: Sequence[Dump]) -> list[Dump]:
    """The dumps with every pending value reduced over the ranks that share it."""
    result = [dict(dump) for dump in dumps]
    for name in dumps[0]:
        entries = [dump.get(name) for dump in dumps]
        first = entries[0]
        assert first is not None
        pending = first.pending
        if pending is None or any(e is None or e.pending != pending for e in entries):
            continue
        coordinates = list(itertools.product(*map(range, first.mesh_shape)))
        for rank, own in enumerate(coordinates):
            group = [
                entry.local
                for entry, other in zip(entries, coordinates, strict=True)
                if all(own[i] == other[i] for i in range(len(own)) if i not in pending.dims)
            ]
            value = reduce(_REDUCTIONS[pending.op], group)
            if pending.op == "avg":
                value = value / len(group)
            result[rank][name] = replace(dumps[rank][name], local=value)
    return result
