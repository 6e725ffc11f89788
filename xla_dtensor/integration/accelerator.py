"""``torch.accelerator`` for "xla": C++ has no way to ask a device that is written in Python for its
memory, its streams, or to wait for it. ``torch.xla`` has the answers."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

# torch.accelerator's name: torch.xla's.
_ASKED = {
    "synchronize": "synchronize",
    "empty_cache": "empty_cache",
    "empty_host_cache": "empty_cache",
    "memory_stats": "memory_stats",
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "memory_reserved": "memory_reserved",
    "max_memory_reserved": "max_memory_reserved",
    "reset_accumulated_memory_stats": "reset_accumulated_memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "get_memory_info": "mem_get_info",
    "current_stream": "current_stream",
    "set_stream": "set_stream",
}


def install() -> None:
    """Ask ``torch.xla`` where the accelerator is "xla"; which of the functions there are depends on
    the version of torch."""
    modules = [torch.accelerator, getattr(torch.accelerator, "memory", None)]
    for name, ours in _ASKED.items():
        original = getattr(torch.accelerator, name, None)
        if original is None:
            continue
        hooked = _hooked(original, ours)
        for module in modules:
            if isinstance(module, types.ModuleType) and hasattr(module, name):
                setattr(module, name, hooked)


def _hooked(original: Callable[..., Any], ours: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if is_xla():
            return getattr(torch.xla, ours)(*args, *kwargs.values())
        return original(*args, **kwargs)

    return asked


def is_xla() -> bool:
    """Whether "xla" is the process's accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == "xla"
