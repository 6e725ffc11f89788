"""The findings as a table, one row per rule, and as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.rule_check.exceptions import ALLOWED
from tools.rule_check.findings import AGREE, DIFFERENT, LESS, MORE, Checked, Finding
from tools.rule_check.table import NOT_CHECKED
from xla_dtensor.rules.call import base_name
from xla_dtensor.rules.registry import rules

COLUMNS = ("rule", "calls", "silent", "wrong", "moving", "none", *(AGREE, LESS, MORE, DIFFERENT))
LEGEND = """\
silent: layouts for which the rule claims no communication; wrong: those that compile to some, the
allowed ones included
moving: layouts for which it claims some; none: those that compile to none
agree, less, more, different: results whose layout is the one that XLA would choose, or keeps less
of it sharded, more of it, or something else"""


@dataclass
class Row:
    """What was found of one rule."""

    calls: int = 0
    silent: int = 0
    wrong: int = 0
    moving: int = 0
    none: int = 0
    layouts: Counter[str] = field(default_factory=Counter)

    def add(self, finding: Finding) -> None:
        if finding.moves:
            self.moving += 1
            self.none += not finding.collectives and not finding.error
        else:
            self.silent += 1
        self.wrong += bool(finding.violation)
        self.layouts.update(finding.layouts)

    def cells(self) -> list[int]:
        counts = [self.calls, self.silent, self.wrong, self.moving, self.none]
        return counts + [self.layouts[kind] for kind in (AGREE, LESS, MORE, DIFFERENT)]


class Report:
    """Collects what was checked."""

    def __init__(self, checked: Iterable[Checked]) -> None:
        self.rows: defaultdict[str, Row] = defaultdict(Row)
        self.violations: list[Finding] = []
        self.allowed: list[Finding] = []
        self.reasons: dict[str, str] = {}
        for one in checked:
            self._add(one)

    def _add(self, checked: Checked) -> None:
        rule = checked.sample.rule
        if checked.reason:
            self.reasons.setdefault(rule, checked.reason)
            return
        row = self.rows[rule]
        row.calls += 1
        for finding in checked.findings:
            row.add(finding)
            if finding.violation:
                (self.allowed if finding.allowed else self.violations).append(finding)

    def not_checked(self, names: Sequence[str] = ()) -> dict[str, str]:
        """The registered rules without a finding, each with the reason."""
        unknown = "no call of it is in rules/check/table.py"
        return {
            name: NOT_CHECKED.get(name) or self.reasons.get(name, unknown)
            for name in names or rules()
            if name not in self.rows
        }

    def not_needed(self) -> list[str]:
        """The exceptions that nothing was found for."""
        needed = {f"{f.sample.func.namespace}::{base_name(f.sample.func)}" for f in self.allowed}
        return sorted(set(ALLOWED) - needed)

    def table(self) -> str:
        cells = [COLUMNS, *((name, *map(str, row.cells())) for name, row in self._sorted())]
        total = Row()
        for row in self.rows.values():
            for name in ("calls", "silent", "wrong", "moving", "none"):
                setattr(total, name, getattr(total, name) + getattr(row, name))
            total.layouts += row.layouts
        cells.append((f"all {len(self.rows)}", *map(str, total.cells())))
        widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
        return "\n".join(_line(line, widths) for line in cells)

    def _sorted(self) -> list[tuple[str, Row]]:
        return sorted(self.rows.items())

    def json(self) -> dict[str, Any]:
        return {
            "rules": {
                name: dict(zip(COLUMNS[1:], row.cells(), strict=True))
                for name, row in self._sorted()
            },
            "violations": [_json(f) for f in self.violations],
            "allowed": [_json(f) for f in self.allowed],
            "not_checked": self.not_checked(),
        }


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, *numbers = (
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((name, *numbers))


def _json(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "call": str(finding),
        "violation": finding.violation,
        "reason": finding.allowed,
    }
