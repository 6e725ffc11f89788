"""``python -m tests.conformance.report report.jsonl > REPORT.md``: tables of a run's records."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.conformance.compare import ERRORS_OF_TORCH
from tests.conformance.expected import EXPECTED, reason

FORMS = ("forward", "backward", "method", "inplace", "out", "alias")
CLASSES = ("wrong", "precision", "shape/dtype", "error", "unsupported")  # worst first
MEANING = {
    "wrong": "other numbers than CPU torch's",
    "precision": "outside of torch's tolerance, but within 1.2e-4 of the largest number (float32)",
    "shape/dtype": "another shape, dtype, device or number of results",
    "error": "an exception, a timeout, or the end of the process",
    "unsupported": "`UnsupportedOpError` or `NotImplementedError`",
}
TOP = 25

Record = dict[str, Any]


def read(paths: Iterable[str]) -> list[Record]:
    """The records of several files; of two of the same entry and settings the later one."""
    found: dict[tuple[str, ...], Record] = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            record = json.loads(line)
            found[record["name"], record["dtype"], record["mesh"]] = record
    return list(found.values())


def render(records: list[Record]) -> str:
    return "\n".join([*_head(records), *_rates(records), *_causes(records), *_failures(records)])


def _head(records: list[Record]) -> Iterator[str]:
    yield "# Conformance with CPU torch\n"
    settings = sorted({f"{r['dtype']} on {r['mesh']}, limit {r['limit']}" for r in records})
    tried = sum(r["samples"] for r in records)
    yield f"{len(records)} entries of `op_db`, {tried} samples: {'; '.join(settings)}.\n"
    closer = sum(r.get("more_exact", 0) for r in records)
    yield (
        f"{closer} results count as passed that are outside of torch's tolerance of CPU torch's, "
        "but as close to what CPU torch computes in double precision: within the tolerance of it, "
        f"or within {ERRORS_OF_TORCH:.0f} times CPU torch's own error.\n"
    )


def _rates(records: list[Record]) -> Iterator[str]:
    for dtype, mesh in sorted({(r["dtype"], r["mesh"]) for r in records}):
        chosen = [r for r in records if (r["dtype"], r["mesh"]) == (dtype, mesh)]
        yield f"## {dtype} on {mesh}\n"
        yield "| form | entries | pass | rate | " + " | ".join(CLASSES) + " | expected |"
        yield "|---|" + "---:|" * (len(CLASSES) + 4)
        for form in FORMS:
            counts = Counter(r["forms"][form] for r in chosen if form in r["forms"])
            total = counts.total()
            if not total:
                continue
            allowed = sum(
                reason(r["name"], form, r["dtype"]) is not None
                and r["forms"].get(form, "pass") != "pass"
                for r in chosen
            )
            cells = " | ".join(str(counts[c]) for c in CLASSES)
            rate = f"{100 * counts['pass'] / total:.1f} %"
            yield f"| {form} | {total} | {counts['pass']} | {rate} | {cells} | {allowed} |"
        yield ""


def _causes(records: list[Record]) -> Iterator[str]:
    """The most frequent texts of errors, each counted once per entry and form."""
    failures = [(r["name"], f) for r in records for f in r["failures"]]
    for kind, title in (("unsupported", "Unsupported overloads"), ("error", "Causes of errors")):
        causes: dict[str, dict[str, None]] = {}
        for name, failure in failures:
            if failure["class"] == kind:
                place = causes.setdefault(_cause(failure["text"]), {})
                place[f"{name} ({failure['form']})"] = None
        if not causes:
            continue
        yield f"## {title}\n"
        yield "| cause | entries | for example |\n|---|---:|---|"
        ranked = sorted(causes.items(), key=lambda item: -len(item[1]))
        for cause, names in ranked[:TOP]:
            examples = ", ".join(list(names)[:4])
            yield f"| {cell(cause)} | {len(names)} | {examples} |"
        if len(ranked) > TOP:
            yield f"| {len(ranked) - TOP} other causes | {sum(len(n) for _, n in ranked[TOP:])} | |"
        yield ""


def _cause(text: str) -> str:
    overload = re.search(r"aten::\w+(\.\w+)?", text)
    if text.startswith("UnsupportedOpError") and overload:
        return overload.group() + (" (decomposition)" if "decomposition of" in text else "")
    return re.sub(r"\d+", "N", text)[:140]


def _failures(records: list[Record]) -> Iterator[str]:
    for kind in CLASSES:
        rows: list[str] = []
        seen: set[tuple[str, str, str]] = set()  # once per dtype, not per mesh
        for record in sorted(records, key=lambda r: (r["name"], r["dtype"])):
            for failure in record["failures"]:
                form = failure["form"]
                entry = record["name"], form, record["dtype"]
                if failure["class"] != kind or entry in seen:
                    continue
                seen.add(entry)
                note = reason(record["name"], form, record["dtype"])
                where = "; ".join(failure["layouts"])
                text = cell(failure["text"])[:160] + (f" **expected: {note}**" if note else "")
                rows.append(f"| {' | '.join(entry)} | {cell(where)} | {text} |")
        if rows:
            yield f"## {kind}: {MEANING[kind]}\n"
            yield "| entry | form | dtype | layouts | first failure |\n|---|---|---|---|---|"
            yield from rows
            yield ""
    if EXPECTED:
        yield "## Expected failures\n\n| entry | form | reason |\n|---|---|---|"
        for name, forms in sorted(EXPECTED.items()):
            for form, why in forms.items():
                yield f"| {name} | {form} | {why} |"


def cell(text: str) -> str:
    """``text`` for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(render(read(sys.argv[1:])))
