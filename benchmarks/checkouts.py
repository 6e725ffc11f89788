"""Another commit's files, for benchmarks that compare with it."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A worktree of ``commit``, for a block."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "checkout")
        subprocess.run([*git, "add", "--detach", path, commit], check=True)
        try:
            yield Path(path)
        finally:
            subprocess.run([*git, "remove", "--force", path], check=True)
