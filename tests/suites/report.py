"""``python -m tests.suites.report RECORDS... > REPORT.md``: what torch's own suites say, in a page.

Takes the records of `tests.suites` and of `tests.conformance`, which has a report of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conformance.expected import reason as reason_of_operation
from tests.suites import modules, optimizers
from tests.suites.expected import reason

Record = dict[str, Any]
TITLES = {
    "modules": "`module_db`: every module of torch, in training and evaluation",
    "optimizers": "`optim_db`: every setting of every optimizer",
    "operations": "`op_db`: every operation",
}
FORMS = {
    "modules": modules.FORMS,
    "optimizers": optimizers.FORMS,
    "operations": ("forward", "backward", "method", "inplace", "out", "alias"),
}


def read(paths: list[str]) -> list[Record]:
    """The records; of two of one entry and setting the later one."""
    found: dict[tuple[str, ...], Record] = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            record = json.loads(line)
            record.setdefault("suite", "operations")
            key = (record["suite"], record["name"], record["dtype"], record["mesh"])
            found[key] = record
    return list(found.values())


def why(record: Record, form: str) -> str | None:
    """The reason for which a form of an entry may fail."""
    if record["suite"] == "operations":
        return reason_of_operation(record["name"], form, record["dtype"])
    return reason(record["suite"], record["name"], form)


def render(records: list[Record], commit: str) -> str:
    return "\n".join([*_summary(records, commit), *_failures(records)]) + "\n"


def _summary(records: list[Record], commit: str) -> Iterator[str]:
    yield "# torch's own suites\n"
    limits = sorted({record["limit"] for record in records if record["suite"] == "modules"})
    settings = f", with up to {limits[-1]} settings of a module in each mode" if limits else ""
    yield (
        f"Made at {commit}{settings}; `make suites` makes it again. Everything runs on sharded "
        "tensors, in layouts drawn for it, and is compared with CPU torch. Nothing may fail "
        "without a reason (`expected.py` here and in `tests/conformance`).\n"
    )
    for suite, title in TITLES.items():
        chosen = [record for record in records if record["suite"] == suite]
        if not chosen:
            continue
        yield f"## {title}\n"
        yield "| on | form | entries | pass | rate | with a reason | without |"
        yield "|---|---|---:|---:|---:|---:|---:|"
        for dtype, mesh in sorted({(r["dtype"], r["mesh"]) for r in chosen}):
            some = [r for r in chosen if (r["dtype"], r["mesh"]) == (dtype, mesh)]
            for form in FORMS[suite]:
                having = [r for r in some if form in r["forms"]]
                if not having:
                    continue
                counts = Counter(
                    "pass" if r["forms"][form] == "pass" else "reason" if why(r, form) else "none"
                    for r in having
                )
                rate = f"{100 * counts['pass'] / len(having):.1f} %"
                yield (
                    f"| {dtype}, {mesh} | {form} | {len(having)} | {counts['pass']} | {rate} | "
                    f"{counts['reason']} | {counts['none']} |"
                )
        samples = sum(r["samples"] for r in chosen)
        closer = sum(r.get("more_exact", 0) for r in chosen)
        yield (
            f"\n{len(chosen)} entries, {samples} settings or samples; {closer} results are outside "
            "of torch's tolerance of CPU torch's, but as close to double precision.\n"
        )
    if all(record["suite"] != "operations" for record in records):
        yield "`op_db` has a [report of its own](../conformance/REPORT.md).\n"


def _failures(records: list[Record]) -> Iterator[str]:
    yield "## Failures\n"
    rows = []
    for record in sorted(records, key=lambda r: (r["suite"], r["name"], r["dtype"])):
        seen = set()
        for failure in record["failures"]:
            form = failure["form"]
            if form in seen:
                continue
            seen.add(form)
            text = why(record, form) or f"**no reason**: {failure['text']}"
            cells = [record["suite"], record["name"], f"{form}, {record['dtype']}"]
            cells += [failure["class"], text]
            rows.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    if not rows:
        yield "None."
        return
    yield "| suite | entry | form | class | reason |\n|---|---|---|---|---|"
    yield from dict.fromkeys(rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]


def _commit() -> str:
    command = ["git", "log", "-1", "--format=%h of %as"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    print(render(read(sys.argv[1:]), _commit()), end="")
