"""Records which code of installed packages a trace has run: that code alone is followed.

So is the user's own code that the walk hadn't found, once a trace has run it.

A step may name a package of a million lines, to log a number or to draw a bar. What the user's own
code reads is found from its text; what all of such a package could read, if each of its functions
called each that it names, takes a minute to find and is beside the point. So of installed packages
(torch's and JAX's are not asked at all) only those functions count that a trace has seen running.

They must have run to be known, and what they change must be known before they run, to be undone and
repeated. Therefore the walk before a trace also takes the names from methods of what the step can
reach; and a trace that has run code nobody knew, and that names places nobody knew, is made again.

The user's own code may be called by what the walk doesn't look into: by torch, where something has
been registered with it (``torch.library``, a hook on a node of autograd's graph); or by a name that
it makes up (``globals()[f"build_{kind}"]()``). Its functions are then starting points of another
walk, and the trace is made again.
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import gc
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Set
from typing import Any

from xla_dtensor.base.source_line import STDLIB, is_users
from xla_dtensor.compilation.code.names import LIBRARIES, is_library

_TOOLS = (3, 4)  # ids that `sys.monitoring` reserves for no kind of tool
_NAME = "xla_dtensor"
_executed: frozenset[types.CodeType] = frozenset()


class _Profile(cProfile.Profile):
    """Told apart from profilers of the user's."""


class CodeRecorder:
    """Knows the code of installed packages that traces have run, and notes it during one.

    Where a profiler is at work that can't be shared (before Python 3.12), all code of packages
    counts, as the user's own does.

    Attributes:
        grown: after a recording, whether there was code of packages that no earlier trace had run.
        unmet: likewise the user's own that the walk before it hadn't come by.
        ran: all code that has run in it; None if nobody could tell.
        feeds: whether the trace lets the step's code find inputs in optimizers' param groups.
    """

    def __init__(self) -> None:
        self.grown = self.feeds = False
        self.unmet: set[types.CodeType] = set()
        self.ran: frozenset[types.CodeType] | None = None
        self._blind = _profiler_at_work()

    def executed(self) -> frozenset[types.CodeType] | None:
        """The code that has run so far; None if nobody can tell."""
        return None if self._blind else _executed

    @contextlib.contextmanager
    def recording(self, meets_installed: bool, known: set[types.CodeType]) -> Iterator[None]:
        """Note what this thread runs.

        Args:
            meets_installed: whether the step's code names installed packages.
            known: the code that the walk has come by.
        """
        self.grown, self.unmet, self.ran = False, set(), None
        codes: set[types.CodeType] = set()
        noted = False
        try:
            with contextlib.nullcontext(False) if self._blind else _noting(codes) as noted:
                if not (noted or self._blind):  # another profiler runs, say `host_random`'s
                    self._blind = self.grown = meets_installed
                yield
        finally:
            if meets_installed and codes:
                self._take(codes)
            self.unmet = _users(codes, known)
            self.ran = frozenset(codes) if noted else None

    def _take(self, codes: set[types.CodeType]) -> None:
        global _executed
        new = {code for code in codes - _executed if is_installed_file(code.co_filename)}
        self.grown = bool(new)
        _executed |= new


@contextlib.contextmanager
def _noting(codes: set[types.CodeType]) -> Iterator[bool]:
    """Put the code that this thread runs into ``codes``; whether it can be done."""
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is None:
        if _profiler_at_work():
            yield False
            return
        profiler = _Profile(subcalls=False, builtins=False)
        profiler.enable()
        try:
            with _without_collections(profiler.disable, profiler.enable):
                yield True
        finally:
            profiler.disable()
            ran = (entry.code for entry in profiler.getstats())
            codes.update(code for code in ran if isinstance(code, types.CodeType))
        return
    for stale in _TOOLS:  # left by a trace that a signal ended; a process traces one step at a time
        if monitoring.get_tool(stale) == _NAME:
            monitoring.set_events(stale, 0)
            monitoring.free_tool_id(stale)
    tool = next((i for i in _TOOLS if monitoring.get_tool(i) is None), None)
    if tool is None:
        yield False
        return
    thread, collects = threading.get_ident(), threading.Event()

    def started(code: types.CodeType, offset: int) -> Any:
        if threading.get_ident() != thread or collects.is_set():
            return None
        codes.add(code)
        return monitoring.DISABLE  # once is enough, so that it costs next to nothing

    monitoring.use_tool_id(tool, _NAME)
    try:
        # A generator from outside of the step doesn't start in it, but goes on.
        for event in (monitoring.events.PY_START, monitoring.events.PY_RESUME):
            monitoring.register_callback(tool, event, started)
        monitoring.restart_events()  # what an earlier recording has disabled
        monitoring.set_events(tool, monitoring.events.PY_START | monitoring.events.PY_RESUME)
        with _without_collections(collects.set, collects.clear):
            yield True
    finally:
        if monitoring.get_tool(tool) == _NAME:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)


@contextlib.contextmanager
def _without_collections(
    pause: Callable[[], object], go_on: Callable[[], object]
) -> Iterator[None]:
    """A block in which this thread's garbage collections are between ``pause()`` and ``go_on()``.

    They come at any moment, and what they call isn't the step's: whose ``gc.callbacks`` count them
    would find each counted twice, when it happens and as what the step does in each call.
    """
    thread = threading.get_ident()

    def first(phase: str, info: object) -> None:
        if phase == "start" and threading.get_ident() == thread:
            pause()

    def last(phase: str, info: object) -> None:
        if phase == "stop" and threading.get_ident() == thread:
            go_on()

    gc.callbacks.insert(0, first)
    gc.callbacks.append(last)
    try:
        yield
    finally:
        gc.callbacks.remove(first)
        gc.callbacks.remove(last)


def users_code(codes: Set[types.CodeType]) -> set[types.CodeType]:
    """Those of the user's own files."""
    return {code for code in codes if not _is_foreign_file(code.co_filename)}


def _users(codes: set[types.CodeType], known: set[types.CodeType]) -> set[types.CodeType]:
    """Those of the user's own files, but for what is ``known`` and is defined in that."""
    found = users_code(codes - known)
    inner = list(known) if found else []
    while found and inner:
        nested = [c for c in inner.pop().co_consts if isinstance(c, types.CodeType)]
        found.difference_update(nested)
        inner += nested
    return found


def functions_of(codes: set[types.CodeType]) -> list[types.FunctionType]:
    """The functions that have one of these codes, and aren't put among a library's as its own."""
    found = gc.get_referrers(*codes) if codes else ()
    functions = [f for f in found if isinstance(f, types.FunctionType) and f.__code__ in codes]
    return [f for f in functions if not is_library(f.__module__)]


@functools.lru_cache(maxsize=8192)
def _is_foreign_file(filename: str) -> bool:
    """Whether a source file is Python's, ours, or of an installed package, libraries among them.
    What has none (``<string>``) is what dataclasses and the like generate for a class, which the
    walk follows."""
    return (
        not is_users(filename)
        or filename.startswith(("<string>", STDLIB))
        or _package_of(filename) is not None
    )


def _profiler_at_work() -> bool:
    """Whether this thread can't be looked at: from Python 3.12 on several may do so."""
    if hasattr(sys, "monitoring"):
        return False
    found = sys.getprofile()
    if isinstance(found, _Profile):  # left by a trace that a signal ended in `_noting`
        found.disable()
        return False
    return found is not None


def is_installed(module_name: str | None) -> bool:
    """Whether a Python module belongs to an installed package, other than those that `is_library`
    knows."""
    if not module_name or module_name == "__main__" or is_library(module_name):
        return False
    filename = getattr(sys.modules.get(module_name), "__file__", None)
    return isinstance(filename, str) and is_installed_file(filename)


def is_installed_file(filename: str) -> bool:
    """Whether a source file lies where a package has been installed, which isn't a library's."""
    package = _package_of(filename)
    return package is not None and package not in LIBRARIES


@functools.lru_cache(maxsize=8192)
def _package_of(filename: str) -> str | None:
    """The installed package that a source file is of; None if none have been installed there."""
    directory, inner = os.path.split(filename)
    while directory != os.path.dirname(directory):
        if _has_packages(directory):
            return inner.partition(".")[0]
        directory, inner = os.path.split(directory)
    return None


@functools.lru_cache(maxsize=8192)
def _has_packages(directory: str) -> bool:
    """Whether packages have been installed into a directory: their metadata lies beside them."""
    try:
        with os.scandir(directory) as entries:
            return any(entry.name.endswith(".dist-info") for entry in entries)
    except OSError:
        return False
