"""A table of what chosen layouts communicate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from xla_dtensor.base.source_line import is_users, module_in, of_equal_layers, short_path
from xla_dtensor.layouts.choice import Choice
from xla_dtensor.layouts.parts import DimAxes

MOST = 40
"""Lines of a table."""

_HEADER = ("for", "operation", "layouts", "collectives", "times", "MB", "second best")


def report(choice: Choice) -> str:
    """A line for each operation that communicates: the module or the user's line that it is for,
    how its operands lie as it takes them, and its results; what moves, how often in the step, and
    the megabytes, on a device; and those of its next best layout. Largest first; then the sum."""
    if not choice.found:
        return "none were found: values lie as each operation has them"
    moves = choice.moves()
    of_node: dict[int, list[Any]] = {}
    for move in moves:
        of_node.setdefault(move.node, []).append(move)
    times = Counter[tuple[str, ...]]()
    nbytes = Counter[tuple[str, ...]]()
    second: dict[tuple[str, ...], float] = {}
    for number, own in of_node.items():
        kinds = dict.fromkeys(f"{move.kind} {' '.join(move.axes)}" for move in own)
        key = (*_names(choice, number), _layouts(choice, number), ", ".join(kinds))
        times[key] += own[0].times
        nbytes[key] += round(sum(move.nbytes * move.times for move in own))
        other = choice.second_best(number)
        if other is not None:
            second[key] = second.get(key, 0.0) + other * own[0].times
    rows = [
        (*key, str(times[key]), _megabytes(size), _megabytes(second.get(key)))
        for key, size in nbytes.most_common(MOST)
    ]
    lines = [*_aligned([_HEADER, *rows])]
    if len(nbytes) > MOST:
        lines.append(f"... and {len(nbytes) - MOST} lines more")
    total = sum(move.nbytes * move.times for move in moves)
    count = sum(move.times for move in moves)
    lines.append(
        f"{count} collectives of {_megabytes(total)} MB a device and step, by this estimate"
    )
    if choice.by_clock:
        lines.append("the clock has ended a search: another run may find other layouts")
    if choice.graph.unknown:
        names = ", ".join(sorted(choice.graph.unknown))
        lines.append(f"left to XLA, and not in the sum: {names}")
    return "\n".join(lines)


def _names(choice: Choice, number: int) -> tuple[str, str]:
    """Whom a node is for, and what it is."""
    equation = choice.graph.nodes[number].equation
    if equation is None:
        return "", "result"
    module, part = module_in(str(equation.source_info.name_stack))
    named = of_equal_layers(module)
    # In a backward pass the line is that of ``loss.backward()``.
    line = "(backward)" if part == "backward" else _line(equation.source_info.traceback)
    return f"{named} {line}".strip(), equation.primitive.name


def _line(trace: Any) -> str:
    """The user's innermost line of a traceback of JAX's."""
    for frame in () if trace is None else trace.frames:
        if is_users(frame.file_name):
            return short_path(f"{frame.file_name}:{frame.line_num}")
    return ""


def _layouts(choice: Choice, number: int) -> str:
    """``[dp, None] [None, tp] -> [dp, tp]``."""
    node = choice.graph.nodes[number]
    operands = [choice.operand(number, i) for i in range(len(node.operands))]
    results = [choice.result(number, i) for i in range(len(node.results))]
    given = [_text(*found) for found in results if found is not None]
    taken = [_text(axes) for axes in operands if axes is not None]
    return " ".join([*taken, "->", *given] if given else taken)


def _text(axes: DimAxes, sums: Sequence[str] = ()) -> str:
    dims = ["None" if not names else "*".join(names) for names in axes]
    return f"[{', '.join(dims)}{'; sum over ' if sums else ''}{' '.join(sums)}]"


def _megabytes(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.2f}"


def _aligned(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:<{n}}" for text, n in zip(row, widths, strict=True)).rstrip()
