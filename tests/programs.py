"""What is asked of XLA in a lowered program."""

from __future__ import annotations

import re


def constraints(text: str) -> list[str]:
    """The sharding constraints of a lowered program, per tensor dim: ``'[{"dp"}, {}]'``."""
    return re.findall(r"sdy\.sharding_constraint .*?<@\w+, (\[.*?\])>", text)
