"""The error for ranks that call one collective with different shapes, dtypes or arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from xla_dtensor.horovod.collectives.collective import Request

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
    found = next(filter(None, _differences(parts)), "")
    if found:
        return f"{request.title}: mismatched {found}"
    for rank, part in parts.items():
        if wrong := part.collective.mistake(rank, part):
            return f"{request.title}: {wrong}"
    return ""


def _differences(parts: Parts) -> Iterator[str]:
    """Each thing that has to be the same, after those without which it can't be looked at."""
    requests = list(parts.values())
    yield _differing(parts, "collectives", [r.collective.kind for r in requests])
    yield _differing(parts, "process sets", [list(r.ranks) for r in requests])
    yield _differing(parts, "numbers of tensors", [len(r.shapes) for r in requests])
    for title in requests[0].collective.agreed():
        yield _differing(parts, title, [r.collective.agreed()[title] for r in requests])
    count = len(requests[0].shapes)
    for i in range(count):
        where = f" of tensor {i}" if count > 1 else ""
        shapes = [r.shapes[i] for r in requests]
        agreed = [r.collective.agreed_shape(r.shapes[i]) for r in requests]
        yield _differing(parts, f"data types{where}", [r.dtypes[i] for r in requests])
        yield _differing(parts, f"ranks of tensors{where}", [f"{len(s)} dims" for s in shapes])
        yield _differing(parts, f"shapes{where}", agreed)


def _differing(parts: Parts, title: str, values: Sequence[Any]) -> str:
    said: dict[str, list[int]] = {}
    for rank, value in zip(parts, values, strict=True):
        said.setdefault(str(value), []).append(rank)
    if len(said) == 1:
        return ""
    each = "; ".join(f"{listed(ranks)}: {text}" for text, ranks in said.items())
    return f"{title}: {each}"
