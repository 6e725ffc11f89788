"""The rule checker: ``python -m tools.rule_check``.

For calls of every rule, in layouts drawn for them, it compares (a) the result layouts that the rule
claims with those that XLA chooses when it may, and (b) the collectives in the compiled call with
the rule's claim of none or some. A rule that claims none where there are some is wrong, unless
`exceptions.py` has the reason. README.md of `rules` explains the table.

    samples.py     calls; those of elementwise ops are made from their schemas
    table.py       the calls of all other ops, and which rules can have none
    layouts.py     which layouts to check, and what the rule claims of each
    programs.py    compiling a call as dispatch does
    findings.py    the comparison
    exceptions.py  what may differ, and why
    report.py      the table
"""

from tools.rule_check.findings import Checked, Finding, check_call
from tools.rule_check.report import Report
from tools.rule_check.samples import Like, Sample, from_schemas
from tools.rule_check.table import samples

__all__ = [
    "Checked",
    "Finding",
    "Like",
    "Report",
    "Sample",
    "check_call",
    "from_schemas",
    "samples",
]
