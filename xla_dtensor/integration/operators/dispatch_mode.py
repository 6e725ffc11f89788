"""A dispatch mode for torch versions that don't call ``XLAShardedTensor.__torch_dispatch__``."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base import interrupts
from xla_dtensor.base.torch_private import (
    OUT_FORGOTTEN,
    SUBCLASSES_DISPATCH,
    TorchDispatchMode,
)
from xla_dtensor.tensors.backend import backend


class _DispatchToClasses(TorchDispatchMode):
    """Gives operations on xla tensors to the tensor classes.

    A dispatch mode comes before DTensor's C++ fast path, see `SUBCLASSES_DISPATCH`.
    """

    @interrupts.atomic
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

        if not any(issubclass(t, XLAShardedTensor) for t in types):
            return func(*args, **(kwargs or {}))
        with self:  # for the operations that the handling of this one calls
            return backend().dispatch(func, args, kwargs or {})


_mode: _DispatchToClasses | None = None
_library: torch.library.Library | None = None


def _written(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    result = torch.linalg.matrix_rank(*args, **kwargs)
    return out.resize_(result.shape).copy_(result)


def let_subclasses_dispatch() -> None:
    """Make ``XLAShardedTensor.__torch_dispatch__`` take effect, where torch needs help with it."""
    global _mode, _library
    if not SUBCLASSES_DISPATCH and _mode is None:
        _library = torch.library.Library("aten", "IMPL")
        for name in OUT_FORGOTTEN:
            for key in ("CPU", "CUDA"):
                _library.impl(name, _written, key)
        _mode = _DispatchToClasses()
        _mode.__enter__()
