"""`dispatched`: an operation called by our autograd functions, which torch's modes see, too."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _python_dispatch

from xla_dtensor.tensors.backend import backend


def dispatched(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation below autograd, where modes (``DebugMode``, ``FlopCounterMode``) come first."""
    if torch._C._len_torch_dispatch_stack():
        types = tuple({type(x) for x in args if isinstance(x, torch.Tensor)})
        with _python_dispatch._pop_mode_temporarily() as mode:
            result = mode.__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
    return backend().dispatch(func, args, kwargs)
