"""The error for ranks that call one collective with different shapes, dtypes or arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from xla_dtensor.horovod.requests import Request

Parts = dict[int, Request]


def listed(ranks: Iterable[int]) -> str:
    """``rank 1``, or ``ranks 0, 2 and 3``.

    Args:
        ranks: some ranks.
    """
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    head = ", ".join(map(str, numbers[:-1]))
    return f"ranks {head} and {numbers[-1]}" if numbers else "no rank"


def disagreement(parts: Parts) -> str:
    """What the ranks don't agree on; "" if they do.

    Args:
        parts: each rank's part of one collective.
    """
    request = next(iter(parts.values()))
    what = request.title
    for title, view in _COMMON:
        found = _differing(parts, title, view)
        if found:
            return f"{what}: mismatched {found}"
    for position in range(len(request.shapes)):
        where = f" of tensor {position}" if len(request.shapes) > 1 else ""
        found = _differing(parts, f"data types{where}", _dtype(position))
        found = found or _differing(parts, f"ranks of tensors{where}", _dims(position))
        found = found or _differing(parts, f"shapes{where}", _SHAPE[request.kind](position))
        if found:
            return f"{what}: mismatched {found}"
    return _inside(what, parts)


def _differing(parts: Parts, title: str, view: Callable[[Request], Any]) -> str:
    said: dict[str, list[int]] = {}
    for rank, request in parts.items():
        said.setdefault(str(view(request)), []).append(rank)
    if len(said) == 1:
        return ""
    each = "; ".join(f"{listed(ranks)}: {text}" for text, ranks in said.items())
    return f"{title}: {each}"


_COMMON: tuple[tuple[str, Callable[[Request], Any]], ...] = (
    ("collectives", lambda r: r.kind),
    ("process sets", lambda r: list(r.ranks)),
    ("numbers of tensors", lambda r: len(r.shapes)),
    ("reductions", lambda r: r.op),
    ("prescale factors", lambda r: r.prescale),
    ("postscale factors", lambda r: r.postscale),
    ("root ranks", lambda r: r.root),
    ("arguments", lambda r: r.detail),
)


def _dtype(position: int) -> Callable[[Request], Any]:
    return lambda r: r.dtypes[position]


def _dims(position: int) -> Callable[[Request], Any]:
    return lambda r: f"{len(r.shapes[position])} dims"


def _whole(position: int) -> Callable[[Request], Any]:
    return lambda r: list(r.shapes[position])


def _rows(position: int) -> Callable[[Request], Any]:
    """Shapes whose first dim may differ."""
    return lambda r: ["any", *r.shapes[position][1:]]


_SHAPE: dict[str, Callable[[int], Callable[[Request], Any]]] = {
    "allreduce": _whole,
    "broadcast": _whole,
    "reducescatter": _whole,
    "allgather": _rows,
    "alltoall": _rows,
    "barrier": _whole,
    "process_set": _whole,
}


def _inside(what: str, parts: Parts) -> str:
    """What is wrong on single ranks."""
    for rank, request in parts.items():
        if request.kind == "broadcast" and request.root not in request.ranks:
            return (
                f"{what}: root rank {request.root} is none of the {len(request.ranks)} ranks "
                f"{list(request.ranks)}"
            )
        if request.kind in ("allgather", "reducescatter", "alltoall"):
            for shape in request.shapes:
                if not shape:
                    return f"{what}: rank {rank} has a tensor without dims, where rows are needed"
        if request.kind == "alltoall" and (wrong := _splits(request)):
            return f"{what}: on rank {rank} {wrong}"
        if request.op == "Adasum" and len(request.ranks) & (len(request.ranks) - 1):
            return f"{what}: Adasum needs a power of two of ranks, not {len(request.ranks)}"
    return ""


def _splits(request: Request) -> str:
    rows, count, splits = request.shapes[0][0], len(request.ranks), list(request.splits)
    if not splits:
        return (
            ""
            if rows % count == 0
            else (
                f"the {rows} rows of the tensor don't divide by the {count} ranks, and no splits "
                "are given"
            )
        )
    if len(splits) != count:
        return f"there are {len(splits)} splits {splits} for {count} ranks"
    if min(splits) < 0:
        return f"one of the splits {splits} is negative"
    if sum(splits) > rows:
        return f"the splits {splits} add up to more than the {rows} rows of the tensor"
    return ""
