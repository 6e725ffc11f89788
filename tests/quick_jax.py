"""JAX, quicker where thousands of small programs are lowered and compiled.

For tests only, since it replaces what is private to JAX; the programs are the same ones.
"""

from __future__ import annotations

import itertools
import os
import threading

import jax
from jax._src import compilation_cache, lru_cache
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

PROGRAMS = 500  # that one context lowers: it keeps their types and attributes
new_context = mlir.make_ir_context


class Contexts:
    """An MLIR context for all threads, and a new one after `PROGRAMS`.

    JAX makes one for each program. That, and filling it with the same types again, is a third of
    the time of an operation's first call.
    """

    def __init__(self) -> None:
        self.programs = itertools.count()
        self.context = new_context()

    def __call__(self) -> ir.Context:
        if next(self.programs) % PROGRAMS == PROGRAMS - 1:
            self.context = new_context()
        return self.context


class WholeFiles(lru_cache.LRUCache):
    """Kept programs that appear at once: JAX's own can be seen half written by another process, and
    stay so where that is killed."""

    def put(self, key: str, value: bytes) -> None:
        path = self.path / f"{key}{lru_cache._CACHE_SUFFIX}"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            part.write_bytes(value)
            os.replace(part, path)


def start() -> None:
    """Lower and compile quicker from now on, in this process."""
    for function in (Contexts.__call__, WholeFiles.put):
        function.__module__ = "jax"  # none of a step's Python
    mlir.make_ir_context = Contexts()
    compilation_cache.LRUCache = WholeFiles
    # However soon it was compiled: reading it is ten times as fast.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
