"""A report as a table, and two reports side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from xla_dtensor.base.source_line import of_equal_layers
from xla_dtensor.planning.rows import Row

MOST = 20  # rows of a table


def as_text(report: Any) -> str:
    """The report as a table of a hundred columns."""
    return "\n".join(_lines(report))


def _lines(report: Any) -> Iterator[str]:
    mesh = ", ".join(f"{name}={size}" for name, size in report.mesh.items()) or "no mesh"
    yield f"{report.step} on {report.topology or 'the devices here'} ({report.chips} chips), {mesh}"
    if report.hops:
        hops = ", ".join(f"{name} {n:.2f}" for name, n in report.hops.items())
        yield f"  links between neighbours: {hops}"
    yield from (f"  note: {note}" for note in report.notes)
    yield ""
    yield from _memory(report)
    yield ""
    yield from _times(report)
    if report.was_read:
        yield ""
        yield from _collectives(report)
    if report.replicated and report.chips > 1:
        yield ""
        yield "on every device as a whole:"
        for one in sorted(report.replicated, key=lambda one: -one.bytes)[:MOST]:
            yield f"  {size(one.bytes):>10}  {one.name} {list(one.shape)} {one.dtype}"
    if report.source:
        yield ""
        yield f"the chip's figures: {report.source}"


def _memory(report: Any) -> Iterator[str]:
    memory = report.memory
    yield "memory of one device:"
    for name in ("arguments", "temporaries", "outputs", "aliased"):
        value = getattr(memory, name)
        if value is not None:
            yield f"  {size(value):>10}  {name}"
    verdict = ""
    if memory.available is not None:
        over = memory.needed - memory.available
        of = f" of {size(memory.available)}"
        verdict = f"{of}: fits" if over <= 0 else f"{of}: {size(over)} too much"
    yield f"  {size(memory.needed):>10}  needed{verdict}"
    if memory.host:
        yield f"  {size(memory.host):>10}  of the host's memory besides"
    for line in memory.largest:
        yield f"              {line}"


def _times(report: Any) -> Iterator[str]:
    kinds = ", ".join(f"{kind} {n:.4g}" for kind, n in report.flops_by_kind.items())
    yield f"operations: {report.flops:.4g} in matrix products, on all chips ({kinds or 'none'})"
    if report.bound is None:
        return
    for name, value in report.seconds.items():
        mark = "  <- the bound" if value == report.bound else ""
        yield f"  {milliseconds(value):>10}  {name}{mark}"
    if report.scheduled is not None:
        waits = [f"{dim} {milliseconds(t)}" for dim, t in report.exposed.items() if t]
        waited = f", waiting for {', '.join(waits)}" if waits else ""
        yield f"  {milliseconds(report.scheduled):>10}  in XLA's order of instructions{waited}"
    if report.tokens_per_second is not None:
        yield f"  at most {report.tokens_per_second:,.0f} tokens/s"
    if report.mfu is not None:
        yield f"  MFU at most {100 * report.mfu:.1f} %"


def _collectives(report: Any) -> Iterator[str]:
    yield (
        f"collectives: {size(report.collective_bytes)} on one device, in "
        f"{sum(row.count for row in report.collectives)}; {100 * report.attributed:.0f} % of the "
        "bytes are of a known module"
    )
    if report.domains > 1:
        yield (
            f"  {size(report.slow_bytes)} come in at a device over the slow network between "
            f"{report.domains} slices or hosts"
        )
    table = alike(report.collectives)
    if table:
        head = f"{'bytes':>10} {'count':>6} {'at least':>10} {'exposed':>10}"
        yield f"  {head}  kind, mesh dims, for what"
    for row in table[:MOST]:
        what = f"{row.kind} {'+'.join(row.dims) or '?'}"
        where = " ".join(filter(None, (row.module or "?", row.part)))
        mark = "  activations along the batch" if row.activations else ""
        mark += f"  slow: {size(row.slow_bytes)}" if row.slow_bytes else ""
        yield (
            f"  {size(row.bytes):>10} {row.count or '':>6} {milliseconds(row.seconds):>10} "
            f"{milliseconds(row.exposed):>10}  {what:<24} {where}{mark}"
        )
    if len(table) > MOST:
        left = sum(row.bytes for row in table[MOST:])
        yield f"  {size(left):>10}         in {len(table) - MOST} more rows"


def alike(table: Iterable[Row]) -> list[Row]:
    """The rows with those of layers that differ by their number alone, ``layers.*.wq``, as one."""
    groups: dict[Any, list[Row]] = {}
    for row in table:
        module = of_equal_layers(row.module)
        own = row.of_parameters, row.activations, row.between_slices
        key = row.kind, row.dims, module, row.part, *own
        groups.setdefault(key, []).append(row)
    merged = [
        dataclasses.replace(
            members[0],
            module=key[2],
            count=sum(row.count for row in members),
            bytes=sum(row.bytes for row in members),
            seconds=sum(row.seconds for row in members),
            exposed=sum(row.exposed for row in members),
            slow_bytes=sum(row.slow_bytes for row in members),
        )
        for key, members in groups.items()
    ]
    return sorted(merged, key=lambda row: -row.bytes)


def compared(a: Any, b: Any) -> str:
    """Two reports beside each other.

    Args:
        a, b: of two variants of a step.
    """
    lines = [f"{'':<26}{'a':>16}{'b':>16}{'b / a':>9}"]

    def line(name: str, one: float | None, other: float | None, text: object) -> None:
        if one is None and other is None:
            return
        ratio = f"{other / one:.3f}" if one and other is not None else ""
        write = text if callable(text) else str
        shown = ["" if v is None else write(v) for v in (one, other)]
        lines.append(f"{name:<26}{shown[0]:>16}{shown[1]:>16}{ratio:>9}")

    for name in ("needed", "arguments", "temporaries", "outputs"):
        line(f"memory, {name}", getattr(a.memory, name), getattr(b.memory, name), size)
    line("collectives, bytes", a.collective_bytes, b.collective_bytes, size)
    line("  over slow links", a.slow_bytes or None, b.slow_bytes or None, size)
    for kind in sorted({row.kind for row in (*a.collectives, *b.collectives)}):
        both = [sum(r.bytes for r in x.collectives if r.kind == kind) for x in (a, b)]
        line(f"  {kind}", both[0], both[1], size)
    line("operations", float(a.flops), float(b.flops), "{:.4g}".format)
    for name in dict.fromkeys((*a.seconds, *b.seconds)):
        line(f"time, {name}", a.seconds.get(name), b.seconds.get(name), milliseconds)
    line("time, scheduled", a.scheduled, b.scheduled, milliseconds)
    for name in dict.fromkeys((*a.exposed, *b.exposed)):
        line(f"  waiting for {name}", a.exposed.get(name), b.exposed.get(name), milliseconds)
    line("time, bound", a.bound, b.bound, milliseconds)
    line("tokens/s at most", a.tokens_per_second, b.tokens_per_second, "{:,.0f}".format)
    line("MFU at most", a.mfu, b.mfu, "{:.3f}".format)
    head = [f"a: {a.step} on {a.topology}, {a.mesh}", f"b: {b.step} on {b.topology}, {b.mesh}", ""]
    return "\n".join([*head, *lines])


def size(count: float) -> str:
    """Bytes in words: ``"2.38 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def milliseconds(value: float) -> str:
    """A time in words."""
    return f"{1e3 * value:.3g} ms"
