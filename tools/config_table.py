"""The table of switches in docs/config.md, made from that of the package.

python -m tools.config_table        # write it anew
"""

from __future__ import annotations

import re
from pathlib import Path

from xla_dtensor.base.switches import SWITCHES, Switch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
BEGIN, END = "<!-- made by tools/config_table.py -->\n\n", "\n<!-- end -->\n"
HEAD = ("switch", "values", "default", "what it does", "read", "variable")


def table() -> str:
    """The switches as a Markdown table."""
    rows = [HEAD, ("---",) * len(HEAD), *map(row, SWITCHES.values())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def row(switch: Switch) -> tuple[str, ...]:
    """What the page says of one."""
    default = f"`{switch.default!r}`"
    kind = re.sub("('[^']*')", r"`\1`", str(switch.kind))
    return f"`{switch.name}`", kind, default, switch.does, switch.read, f"`{switch.variable}`"


def with_table(text: str) -> str:
    """A page with the table of now in place of the one that it has."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
