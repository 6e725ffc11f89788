"""How many functions of the package something calls: hot paths are held to a number."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any


def package_calls(function: Callable[[], Any]) -> Counter[str]:
    """How often each function of the package is called while ``function`` runs."""
    found: Counter[str] = Counter()

    def look(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/xla_dtensor/" in name and "/tests/" not in name:
            found[f"{name.rpartition('/xla_dtensor/')[2]}:{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found
