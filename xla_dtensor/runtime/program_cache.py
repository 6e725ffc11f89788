"""JAX's persistent cache of compiled programs, in the user's cache folder.

Whoever has configured JAX's own (``JAX_COMPILATION_CACHE_DIR``, ``jax.config``) keeps what they
have. ``xd.config.cache`` says where.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from xla_dtensor.base import jax_private
from xla_dtensor.base.config import config

MAX_BYTES = 2**31  # what was not used for longest goes
_WRITTEN_BY_NOW = 60.0  # seconds, after which a program without a time was left by a dead process
_OPTIONS = (  # of JAX: name, its default, ours
    ("jax_compilation_cache_max_size", -1, MAX_BYTES),
    # Most eager programs take less than a second; reading one back takes a few milliseconds. To
    # write one down JAX looks at all files, 30 us each, so the shortest aren't kept.
    ("jax_persistent_cache_min_compile_time_secs", 1.0, 0.03),
)

own_folder: Path | None = None
"""The folder that this process uses, once JAX has started; None if programs are kept nowhere, or
where somebody has told JAX to."""


def folder(asked: str) -> Path | None:
    """Where programs are kept if the switch says ``asked``, or None. Programs for the CPU may use
    all instructions that it has, so machines that share a home have folders of their own."""
    if asked == "off":
        return None
    if asked != "user":
        return Path(asked).expanduser()
    return _of_user() / "programs" / machine()


def folder_of_plans(asked: str) -> Path | None:
    """Where what compilers have said of programs for devices that aren't here is kept, likewise,
    whatever the processor."""
    found = folder(asked)
    return found and (_of_user() if asked == "user" else found) / "plans"


def _of_user() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "xla_dtensor"


def machine() -> str:
    """This processor and the instructions that it has, which XLA's CPU compiler may use all of."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    except OSError:
        flags = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def use() -> None:
    """Have JAX keep programs there, unless it keeps them elsewhere or the folder can't be made."""
    import jax

    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    where = folder(config.cache)
    if where is None:
        return
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that can't be written to: programs are compiled each time
        return
    global own_folder
    own_folder = where
    if not os.access(where, os.W_OK):
        return  # JAX would warn at each program
    _forget_halves(where)
    jax.config.update("jax_compilation_cache_dir", str(where))
    for name, default, ours in _OPTIONS:
        if getattr(jax.config, name) == default:  # the user's own stay
            jax.config.update(name, ours)


def _forget_halves(where: Path) -> None:
    """Remove programs that a process was killed over while it wrote them: JAX, which looks at the
    time of each when it adds one, would warn at each new program from then on."""
    for program in where.glob("*-cache"):
        used = program.with_name(program.name.removesuffix("cache") + "atime")
        try:
            if not used.exists() and time.time() - program.stat().st_mtime > _WRITTEN_BY_NOW:
                program.unlink()
        except OSError:  # another process has removed it
            continue


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    """Compile without JAX's cache on disk, in this thread: programs for devices that aren't here it
    keeps and can't read back, and what it has read back it can't write down once more (JAX 0.10's
    CPU executables lack their functions then)."""
    with (
        _also_known_by(uuid.uuid4().hex),  # nothing is found
        jax_private.persistent_cache_min_compile_time_secs(1e9),
    ):
        yield


@contextlib.contextmanager
def kept_by_names(names: Sequence[str] | None) -> Iterator[None]:
    """Compile, in this thread, a program whose functions that XLA calls back are known by ``names``
    (`lowering/partitioned/named.py`), not by their addresses, by which no other process finds it;
    None if they aren't known."""
    if not names:
        yield
        return
    with _also_known_by(" ".join(names)), jax_private.without_addresses(True):
        yield


class _Part(threading.local):
    """A part of the keys of the cache, of this thread."""

    key = ""


_part = _Part()


@contextlib.contextmanager
def _also_known_by(key: str) -> Iterator[None]:
    _ask_for_a_part()
    before, _part.key = _part.key, f"{_part.key} {key}"
    try:
        yield
    finally:
        _part.key = before


@functools.cache
def _ask_for_a_part() -> None:
    """Have JAX ask for that part."""
    original = jax_private.cache_key_hook
    jax_private.replace("cache_key_hook", lambda: original() + _part.key)
