"""Errors in backward passes of xla tensors, which would otherwise end the process.

While an exception of Python leaves a node of the autograd graph, the engine asks the device guard
what device it guards (C++: ``~InlineStreamGuard`` -> ``PythonDeviceGuard::type``, ``noexcept``).
The guard of an out-of-tree backend can be a Python object, and ours is. CPython forbids a call to
return with an exception pending, so ``std::terminate`` follows. Therefore the guard takes the
exception away when it is asked, and it is raised again where the backward pass was started.
Checked on torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from xla_dtensor import _context

_CPU = torch.device("cpu")
_EXHAUSTED: Iterator[None] = iter(())


class _Pending(threading.local):
    error: BaseException | None = None


_pending = _Pending()


def take_pending() -> None:
    """Put aside the exception that is pending in this thread, if one is.

    ``next`` of an exhausted iterator with a default returns the default, unless an exception is
    pending already: then it raises that one.
    """
    try:
        next(_EXHAUSTED, None)
    except BaseException as error:
        _pending.error = error


def install() -> None:
    """Wrap the function through which every backward pass of Python starts, as
    ``torch.compiler`` does for its own ends."""
    original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # From a CPU result the graph may lead to xla tensors (`.cpu()`); for one that does not
        # nothing changes, as CPU nodes run in this thread anyway.
        if not all(getattr(t, "device", _CPU).type in ("xla", "cpu") for t in outputs):
            return original(outputs, *args, **kwargs)
        trace = _context.current()
        if trace is not None:
            keeps_graph, inputs = bool(args[1]), args[3]
            trace.backward(outputs, keeps_graph, kwargs.get("accumulate_grad", True) and not inputs)
        _pending.error = None
        # In this thread: the exception is put aside here, and thread-local state (a trace, JAX's
        # 64-bit types) holds. Nothing is lost, the devices work asynchronously.
        with torch.autograd.set_multithreading_enabled(False):
            try:
                return original(outputs, *args, **kwargs)
            except SystemError:  # "returned NULL without setting an exception"
                error, _pending.error = _pending.error, None
                if error is None:
                    raise
        raise error

    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward
