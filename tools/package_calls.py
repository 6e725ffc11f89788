"""How many functions of the package something calls, and of which files: hot paths are held to a
number, and a picture shows an operation's way."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import xla_dtensor

_PACKAGE = os.path.join(os.path.dirname(xla_dtensor.__file__), "")


def package_calls(function: Callable[[], Any]) -> Counter[str]:
    """How often each function of the package (``"forms/storage.py:put"``) is called while
    ``function`` runs, in the order of the first calls."""
    found: Counter[str] = Counter()

    def look(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(_PACKAGE):
            found[f"{name.removeprefix(_PACKAGE)}:{frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found
