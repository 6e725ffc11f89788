"""Figures of benchmarks, kept: a JSON file per run."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "history"


def record(benchmark: str, figures: Any) -> Path:
    """Write what was measured, and where, to ``history/<benchmark>-<time>-<commit>.json``.

    Args:
        figures: anything that JSON knows.

    Returns:
        The file.
    """
    now = datetime.datetime.now(datetime.UTC)
    commit = _git("rev-parse", "--short", "HEAD")
    changed = "+" if _git("status", "--porcelain", "--untracked-files=no") else ""
    about = {
        "benchmark": benchmark,
        "time": now.isoformat(timespec="seconds"),
        "commit": commit + changed,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "jax", "jaxlib")},
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "load": os.getloadavg()[0],
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{benchmark}-{now:%Y%m%dT%H%M%S}-{commit}.json"
    path.write_text(json.dumps({**about, "figures": figures}, indent=2) + "\n")
    return path


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(FOLDER.parent), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
