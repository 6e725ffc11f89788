"""``torch.accelerator`` and ``torch.Event`` for "xla", whose answers ``torch.xla`` has.

C++ has no way to ask a device that is written in Python for its memory or its streams, or to wait
for it.
"""

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
    _hook_events()


def _hook_events() -> None:
    """``torch.Event("xla")`` is a ``torch.xla.Event``; of what C++ makes nobody could wait."""
    original = torch.Event

    class OfAnyDevice(type):
        def __call__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
            if cls is not torch.Event:  # a class of the user's
                return super().__call__(device, *args, **kwargs)
            of_xla = is_xla() if device is None else torch.device(device).type == "xla"
            if of_xla:
                return torch.xla.Event(*args, **kwargs)
            return original(*(() if device is None else (device,)), *args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, original)

    namespace = {"__doc__": original.__doc__, "__module__": "torch"}
    torch.Event = OfAnyDevice("Event", (original,), namespace)


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
