"""What chosen layouts communicate, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from xla_dtensor.layouts.choose import Choice, Move
from xla_dtensor.layouts.integer_program import SECONDS

MOST = 40
"""Lines of a table."""


def report(choice: Choice) -> str:
    """The collectives that the layouts take, by module, largest first; and their sum."""
    if not choice.found:
        return f"none were found in {SECONDS:.0f} seconds: values lie as each operation has them"
    moves = choice.moves()
    table = Counter[tuple[str, ...]]()
    nbytes = Counter[tuple[str, ...]]()
    for move in moves:
        key = _module(move), move.kind, " ".join(move.axes), str(list(move.shape))
        table[key] += move.times
        nbytes[key] += round(move.nbytes * move.times)
    rows = [(*key, str(table[key]), f"{size / 1e6:.2f}") for key, size in nbytes.most_common(MOST)]
    lines = [*_aligned([("module", "collective", "axes", "of", "times", "MB"), *rows])]
    if len(nbytes) > MOST:
        lines.append(f"... and {len(nbytes) - MOST} lines more")
    total = sum(move.nbytes * move.times for move in moves) / 1e6
    lines.append(
        f"{table.total()} collectives of {total:.2f} MB a device and step, by this estimate"
    )
    if choice.graph.unknown:
        names = ", ".join(sorted(choice.graph.unknown))
        lines.append(f"left to XLA, and not in the sum: {names}")
    return "\n".join(lines)


def _module(move: Move) -> str:
    if move.equation is None:
        return "(result)"
    stack = str(move.equation.source_info.name_stack)
    return f"{stack}/{move.equation.primitive.name}".strip("/")


def _aligned(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:<{n}}" for text, n in zip(row, widths, strict=True)).rstrip()
