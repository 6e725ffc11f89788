"""Calls operations from our autograd functions, and tells where torch decomposes composites."""

from __future__ import annotations

import functools
from typing import Any

import torch

from xla_dtensor.base.torch_private import (
    count_of_dispatch_modes,
    functorch_interpreter,
    is_in_forward_ad,
    pop_dispatch_mode,
)
from xla_dtensor.tensors.backend import backend


def dispatched(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation below autograd, where modes (``DebugMode``, ``FlopCounterMode``) come first."""
    if count_of_dispatch_modes():
        types = tuple({type(x) for x in args if isinstance(x, torch.Tensor)})
        with pop_dispatch_mode() as mode:
            result = mode.__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
    return backend().dispatch(func, args, kwargs)


def is_transformed() -> bool:
    """Whether ``torch.func`` or forward-mode AD is at work, which take composites apart and know no
    autograd functions like ours."""
    return functorch_interpreter() is not None or is_in_forward_ad()


def are_others(*tensors: Any) -> bool:
    """Whether one is a user's wrapper on our device, which gets what torch takes composites apart
    to."""
    return _is_one_other(tuple(map(type, tensors)))


# Asked in each call of a composite.
@functools.lru_cache(maxsize=1024)
def _is_one_other(classes: tuple[type, ...]) -> bool:
    from xla_dtensor.tensors.base import computes_itself

    return any(map(computes_itself, classes))
