"""`XLATensor`: the per-device view, a tensor that each device of the process holds."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor import _context
from xla_dtensor._common import TensorMethods


class XLATensor(TensorMethods, torch.Tensor):
    """A tensor on the "xla" device that has the same value on every device.

    ``full_tensor()`` and ``torch.zeros(..., device="xla")`` make one. It computes with sharded
    tensors as if it were replicated, and ``.cpu()`` brings its value to the host.
    """

    def _copy(self) -> Any:
        return self.detach().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        if _context.current() is not None:
            values = f"shape={list(self.shape)}, dtype={self.dtype}"
        else:
            text = repr(self.detach().cpu())
            values = text.removeprefix("tensor(").removesuffix(")")
        return f"XLATensor({values}, device='{self.device}'{grad})"
