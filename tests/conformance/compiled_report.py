"""``python -m tests.conformance.compiled_report run.jsonl > TPU.md``: of ``--compile-for``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.conformance.compiled import CLASSES, EAGER, ERROR, FORMS, NAMED, PASS
from tests.conformance.report import cell, read
from xla_dtensor.runtime.chips import GPUS

MEANING = {
    PASS: "compiles",
    EAGER: "values decide shapes, so no compiled step has it; what an eager call launches compiles",
    NAMED: "an error of ours says why not, and what to do",
    ERROR: "an error of XLA's, or the end of the process",
}


def render(records: list[dict[str, Any]]) -> str:
    """The tables of a run's records."""
    records = sorted((r for r in records if r["forms"]), key=lambda r: r["name"])
    return "\n".join([*_head(records), *_rates(records), *_others(records)])


def _head(records: list[dict[str, Any]]) -> Iterator[str]:
    about = {f"{r['topology']} as {r['mesh']}, {r['dtype']}, limit {r['limit']}" for r in records}
    commits = Counter(r["commit"] for r in records).most_common()
    samples = sum(r["samples"] for r in records)
    minutes = sum(r["seconds"] for r in records) / 60
    which = "GPU" if records[0]["topology"].partition(":")[0] in GPUS else "TPU"
    yield f"# op_db through the {which}'s compiler\n"
    yield (
        f"{len(records)} entries that CPU torch runs, {samples} samples, compiled and not run: "
        f"{'; '.join(sorted(about))}; layouts as in REPORT.md. Forward and backward are one "
        f"program. Made in {minutes:.0f} minutes by `make conformance-{which.lower()}`, at "
        f"{', '.join(f'{commit} ({n})' for commit, n in commits)}.\n"
    )


def _rates(records: list[dict[str, Any]]) -> Iterator[str]:
    yield "| form | entries | compile | rate | " + " | ".join(CLASSES) + " |"
    yield "|---|" + "---:|" * (len(CLASSES) + 3)
    for form in FORMS:
        counts = Counter(r["forms"][form] for r in records if form in r["forms"])
        good, total = counts[PASS] + counts[EAGER], counts.total()
        cells = " | ".join(str(counts[kind]) for kind in CLASSES)
        yield f"| {form} | {total} | {good} | {100 * good / max(total, 1):.1f} % | {cells} |"
    yield ""
    for kind in CLASSES:
        yield f"- `{kind}`: {MEANING[kind]}"
    yield ""


def _others(records: list[dict[str, Any]]) -> Iterator[str]:
    for kind in (ERROR, NAMED):
        chosen = [r for r in records if kind in r["forms"].values()]
        if not chosen:
            continue
        yield f"## {kind}: {MEANING[kind]}\n"
        yield "| entry | forms | layouts | what it says |\n|---|---|---|---|"
        for record in chosen:
            forms = ", ".join(form for form in FORMS if record["forms"].get(form) == kind)
            failure = next(f for f in record["failures"] if f["class"] == kind)
            where = cell("; ".join(failure["layouts"]))
            yield f"| {record['name']} | {forms} | {where} | {cell(failure['text'])[:260]} |"
        yield ""
    eager = [r["name"] for r in records if EAGER in r["forms"].values()]
    if eager:
        yield f"## {EAGER}\n\n{', '.join(eager)}"


if __name__ == "__main__":
    print(render(read(sys.argv[1:])))
