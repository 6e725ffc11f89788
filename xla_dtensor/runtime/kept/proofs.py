"""What an earlier process has traced without an error, so that this one needn't.

One file of lines, each a digest. Each line is written at once, and what is no whole line is no
digest, so processes may write at the same time, and be killed over it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

import jax

from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.runtime.kept import environment
from xla_dtensor.runtime.kept.program import folder

MAX_BYTES = 2**22  # a begin from nothing is cheap

_known: Cache[Path, set[str]] = Cache("proofs on disk", 2)


def _path() -> Path | None:
    where = folder()
    return where and where / "proofs"


def digest_of(words: Callable[[], str | None]) -> str | None:
    """By which to ask for it; None where none is kept.

    Args:
        words: gives what is computed, as of a `KeptProgram`.
    """
    around = None if folder() is None else environment.words(jax.local_devices()[0])
    said = None if around is None else words()
    if said is None:
        return None
    about = f"{around}\n{said}"
    return hashlib.sha256(about.encode()).hexdigest()


def has(digest: str | None) -> bool:
    """Whether it is known that what has this digest can be traced."""
    path = _path()
    if digest is None or path is None:
        return False
    return digest in _known.get_or_make(path, lambda: _read(path))


def add(digest: str | None) -> None:
    """Keep that it can be."""
    path = _path()
    if digest is None or path is None:
        return
    with contextlib.suppress(OSError):  # a folder that can't be written to, or a full disk
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"\n{digest}\n")


def _read(path: Path) -> set[str]:
    try:
        if path.stat().st_size > MAX_BYTES:
            path.unlink()
        return set(path.read_text(errors="replace").splitlines())
    except OSError:
        return set()
