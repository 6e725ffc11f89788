"""Refuses steps that start threads, pools or processes, hand them work, or share queues with them.

All that would happen once, when the step is traced, and what they compute would be a constant.
"""

from __future__ import annotations

import _thread
import concurrent.futures.thread
import contextlib
import functools
import multiprocessing.process
import queue
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from xla_dtensor.base import executor
from xla_dtensor.base.source_line import user_line
from xla_dtensor.compilation.code import lasting
from xla_dtensor.compilation.code.installed import is_installed, is_installed_file
from xla_dtensor.compilation.code.names import describe, is_library
from xla_dtensor.compilation.code.patched import patched
from xla_dtensor.errors import DataDependentError
from xla_dtensor.execution.pieces import COMPILES


def others_run() -> bool:
    """Whether there is another thread that may run the user's Python: any but those in which
    programs are compiled."""
    own = {t.ident for t in threading.enumerate() if t.name.startswith(COMPILES)}
    return len(sys._current_frames().keys() - own) > 1


def users_code_runs_elsewhere() -> bool:
    """Whether another thread is in code that is neither a library's nor an installed package's
    (tqdm's monitor, a notebook's threads)."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # which would hold itself, and what its callers have
    for innermost in frames.values():
        frame: types.FrameType | None = innermost
        while frame is not None:
            name = frame.f_globals.get("__name__")
            if not (is_library(name) or is_installed(name)):
                return True
            frame = frame.f_back
    return False


def _is_package_s(work: Any) -> bool:
    """Whether a function belongs to an installed package: what that does beside the step (a
    progress bar's clock, a logger's connection) is no part of it."""
    while isinstance(work, functools.partial | types.MethodType):
        work = work.func if isinstance(work, functools.partial) else work.__func__
    code = getattr(work, "__code__", None)
    return code is not None and is_installed_file(code.co_filename)


def _work_of_thread(thread: threading.Thread, *_: Any) -> Any:
    return getattr(thread, "_target", None) or type(thread).run


def _first(work: Any, *_: Any) -> Any:
    return work


def _second(_: Any, work: Any, *__: Any) -> Any:
    return work


# Methods replaced while a step is traced: (owner, name, which argument is the work, message).
_STARTS: list[tuple[Any, str, Callable[..., Any], str]] = [
    (threading.Thread, "start", _work_of_thread, "starts a thread"),
    (_thread, "start_new_thread", _first, "starts a thread"),
    (
        concurrent.futures.thread.ThreadPoolExecutor,
        *("submit", _second, "hands work to a ThreadPoolExecutor"),
    ),
    (multiprocessing.process.BaseProcess, "start", _work_of_thread, "starts a process"),
]


def _starts() -> list[tuple[Any, str, Callable[..., Any], str]]:
    processes = sys.modules.get("concurrent.futures.process")  # it isn't imported without need
    if processes is None:
        return _STARTS
    pool = processes.ProcessPoolExecutor
    return [*_STARTS, (pool, "submit", _second, "hands work to a ProcessPoolExecutor")]


def replaced(cls: type) -> frozenset[str]:
    """The names of a class's methods that `none_started` replaces: that is no change of the
    step's."""
    names = {name for owner, name, _, _ in _starts() if owner is cls}
    return frozenset(names.union(("put", "get") if cls is queue.Queue else ()))


@contextlib.contextmanager
def none_started(trace: Any, shared: list[tuple[Any, str]]) -> Iterator[None]:
    """Refuse a step that starts threads or processes, hands work to them, puts into or takes from
    a queue, or leaves a lock acquired.

    Args:
        trace: whose thread is looked at; others go on.
        shared: queues, locks and semaphores from outside of the step, with their names.

    Raises:
        DataDependentError: it has done so (at the end, if the step's Python has caught that).
    """
    refused: list[DataDependentError] = []
    paths = {id(each): path for each, path in shared if isinstance(each, queue.Queue)}
    before = [_amount(each) for each, _ in shared]

    def refuse(text: str) -> None:
        refused.append(DataDependentError(f"the step {text}{user_line()}"))
        raise refused[-1]

    def started(original: Any, work_of: Any, what: str, *args: Any, **kwargs: Any) -> Any:
        if executor.trace() is trace:
            work = work_of(*args, *kwargs.values())
            if not _is_package_s(work):
                refuse(
                    f"{what} ({describe(work)}): that would happen when it is traced, not in every "
                    "call, and what it computes would be a constant; call the function itself "
                    "(operations on the devices run at the same time anyway), or do it outside"
                )
        return original(*args, **kwargs)

    def used(original: Any, name: str, each: Any, *args: Any, **kwargs: Any) -> Any:
        if id(each) in paths and executor.trace() is trace:
            refuse(_of_queue(f"calls {name}() of {paths[id(each)]}", each))
        return original(each, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner, name, work_of, what in _starts():
            original = getattr(owner, name)
            new = _wrapped(original, started, work_of, what)
            stack.enter_context(patched(owner, name, new))
        for name in ("put", "get") if paths else ():
            original = getattr(queue.Queue, name)
            stack.enter_context(patched(queue.Queue, name, _wrapped(original, used, name)))
        try:
            yield
        except DataDependentError as error:
            if error in refused[1:]:  # a later refusal, raised while the first one unwinds
                raise refused[0] from None
            raise
        finally:
            changed = (
                _of_queue(f"puts into, takes from or acquires {path}", each)
                for (each, path), amount in zip(shared, before, strict=True)
                if _amount(each) != amount
            )
            did = next(changed, None)
            if did is not None:
                lasting.note(did)
    if refused:
        raise refused[0]
    if did is not None and not others_run():  # they may have changed the amounts
        raise DataDependentError(f"the step {did}")


def _amount(each: Any) -> Any:
    """How much there is in a queue, or left of a semaphore or lock."""
    if isinstance(each, threading.Semaphore):
        return each._value
    return each.locked() if hasattr(each, "locked") else each.qsize()


def _wrapped(original: Any, call: Any, *rest: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(original, *rest, *args, **kwargs)

    return wrapper


def _of_queue(text: str, each: Any) -> str:
    return (
        f"{text}, a {type(each).__name__}: that would happen when it is traced, not in every call; "
        "do it outside, and pass what you take as an argument"
    )
