"""Installed packages: their code is followed where it has run.

A step may name a package of a million lines, to log a number or to draw a bar. What the user's own
code reads is found from its text; what all of such a package could read, if each of its functions
called each that it names, takes a minute to find and is beside the point. So of installed packages
(torch's and JAX's are not asked at all) only those functions count that a trace has seen running.

They must have run to be known, and what they change must be known before they run, to be undone and
repeated. Therefore the walk before a trace also takes the names from methods of what the step can
reach; and a trace that has run code nobody knew, and that names places nobody knew, is made again.
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from xla_dtensor.compilation.code_names import LIBRARIES, is_library

_executed: frozenset[types.CodeType] = frozenset()


class Recorder:
    """Knows the code of installed packages that traces have run, and notes it during one.

    A profiler that is at work can't be shared: then all code counts, as the user's own does.

    Attributes:
        grown: after a recording, whether there was code that no earlier trace had run.
        feeds: whether the trace lets the step's code find inputs in optimizers' param groups.
    """

    def __init__(self) -> None:
        self.grown = self.feeds = False
        self._blind = _profiler_at_work()

    def executed(self) -> frozenset[types.CodeType] | None:
        """The code that has run so far; None if nobody can tell."""
        return None if self._blind else _executed

    @contextlib.contextmanager
    def recording(self, wanted: bool) -> Iterator[None]:
        """Note what this thread runs.

        Args:
            wanted: whether to; it slows Python down.
        """
        self.grown = False
        if not wanted or self._blind:
            yield
            return
        profiler = cProfile.Profile(subcalls=False, builtins=False)
        try:
            profiler.enable()
        except ValueError:  # another profiler has been started meanwhile
            self._blind = self.grown = True
            yield
            return
        try:
            yield
        finally:
            profiler.disable()
            self._take(profiler.getstats())

    def _take(self, entries: list[Any]) -> None:
        global _executed
        codes = {entry.code for entry in entries if isinstance(entry.code, types.CodeType)}
        new = {code for code in codes - _executed if is_installed_file(code.co_filename)}
        self.grown = bool(new)
        _executed |= new


def _profiler_at_work() -> bool:
    monitoring = getattr(sys, "monitoring", None)  # which profilers use from Python 3.12 on
    tool = monitoring and monitoring.get_tool(monitoring.PROFILER_ID)
    return sys.getprofile() is not None or tool is not None


def is_installed(module_name: str | None) -> bool:
    """Whether a Python module belongs to an installed package, other than those that `is_library`
    knows."""
    if not module_name or module_name == "__main__" or is_library(module_name):
        return False
    filename = getattr(sys.modules.get(module_name), "__file__", None)
    return isinstance(filename, str) and is_installed_file(filename)


@functools.lru_cache(maxsize=8192)
def is_installed_file(filename: str) -> bool:
    """Whether a source file lies where a package has been installed, which isn't a library's."""
    directory, inner = os.path.split(filename)
    while directory != os.path.dirname(directory):
        if _has_packages(directory):
            return inner.partition(".")[0] not in LIBRARIES
        directory, inner = os.path.split(directory)
    return False


@functools.lru_cache(maxsize=8192)
def _has_packages(directory: str) -> bool:
    """Whether packages have been installed into a directory: their metadata lies beside them."""
    try:
        with os.scandir(directory) as entries:
            return any(entry.name.endswith(".dist-info") for entry in entries)
    except OSError:
        return False
