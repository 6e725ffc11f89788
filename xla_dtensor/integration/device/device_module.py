"""``torch.xla``: the functions that torch calls of a device's module.

The process's devices are one to torch, ``xla:0``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from xla_dtensor.base import executor, forked
from xla_dtensor.base.random import rng
from xla_dtensor.runtime import memory
from xla_dtensor.runtime.streams import Event, Stream, StreamContext, current_stream, set_stream


class _DeviceContext:
    """``torch.xla.device(index)``: there is one device, so entering it changes nothing."""

    def __init__(self, device: Any) -> None:
        _set_device(device)
        self.index = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


def make() -> types.ModuleType:
    """The module."""
    module = types.ModuleType("torch.xla")
    members: dict[str, Any] = {
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "init": lambda: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": _set_device,
        "get_device_name": _of_device(memory.device_name),
        "get_device_properties": _of_device(memory.device_properties),
        "_is_in_bad_fork": forked.is_child,
        "synchronize": _of_device(memory.synchronize),
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "seed": _seed,
        "seed_all": _seed,
        "initial_seed": rng.initial_seed,
        "get_rng_state": _of_device(rng.get_state),
        "get_rng_state_all": lambda: [rng.get_state()],
        "set_rng_state": lambda state, device="xla": rng.set_state(state),
        "set_rng_state_all": _set_rng_states,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "memory_stats": _of_device(memory.stats),
        "memory_allocated": _of_device(memory.allocated),
        "max_memory_allocated": _of_device(memory.peak),
        "memory_reserved": _of_device(memory.reserved),
        "max_memory_reserved": _of_device(memory.peak_reserved),
        "mem_get_info": _of_device(memory.free_and_total),
        "reset_peak_memory_stats": _of_device(memory.reset_peak),
        "reset_accumulated_memory_stats": _of_device(lambda: None),
        "empty_cache": lambda: None,  # XLA's allocators keep no freed blocks from each other
        "device": _DeviceContext,
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": _of_device(current_stream),
        "default_stream": _of_device(Stream.default),
        "set_stream": set_stream,
        "_initialized": True,
        "__xla_dtensor__": True,
        "__doc__": "The xla device of xla_dtensor.",
        "__getattr__": _class_of_tensors,
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


def _class_of_tensors(name: str) -> Any:
    """The classes say that they are from here, and pickles of them look here."""
    if name == "XLATensor":
        from xla_dtensor.tensors.device_tensor import XLATensor

        return XLATensor
    if name == "XLAShardedTensor":
        from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

        return XLAShardedTensor
    raise AttributeError(f"module 'torch.xla' has no attribute {name!r}")


def _of_device(function: Callable[[], Any]) -> Callable[..., Any]:
    """``function`` with the argument ``device`` that torch's modules give all of these."""

    def of_device(device: Any = None) -> Any:
        _set_device(device)
        return function()

    of_device.__name__, of_device.__doc__ = function.__name__, function.__doc__
    return of_device


def _set_device(device: Any) -> None:
    if isinstance(device, int):
        device = f"xla:{device}" if device > 0 else "xla"  # a negative one: as it is
    # `torch.compile` asks, of code for other devices: nothing is imported for it.
    if device is not None and torch.device(device).index:
        from xla_dtensor.dispatch import refuse_other_device

        refuse_other_device("torch.xla", torch.device(device))


def _manual_seed(seed: int) -> None:
    executor.current().refuse(
        "torch.manual_seed (seed outside of the step, or every step is the same), which"
    )
    rng.manual_seed(seed)


def _set_rng_states(states: Iterable[torch.Tensor]) -> None:
    for state in states:
        rng.set_state(state)


def _seed() -> None:
    """A seed that nobody knows yet."""
    _manual_seed(rng.fresh_seed())
