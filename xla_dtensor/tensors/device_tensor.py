"""`XLATensor`: the per-device view, a tensor that each device of the process holds."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base import thread_state
from xla_dtensor.tensors.backend import backend
from xla_dtensor.tensors.base import TensorMethods


class XLATensor(TensorMethods, torch.Tensor):
    """A tensor on the "xla" device: what each device holds.

    Its value is the same on every device (``full_tensor()``, ``torch.zeros(..., device="xla")``),
    or *varies* along mesh axes (``to_local()``): ``shape`` is then that of one device's value, and
    operations run on each device's value by itself. One that doesn't vary computes with sharded
    tensors as if it were replicated, and ``.cpu()`` brings its value to the host.
    """

    @property
    def varying(self) -> tuple[str, ...]:
        """The names of the mesh axes along which the devices' values differ (may differ)."""
        return self._form.varying

    def local_values(self) -> list[torch.Tensor]:
        """Every device's value as CPU tensors, in the order of the root mesh's devices."""
        return backend().local_values(self)

    def _copy(self) -> Any:
        return self.detach().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        if self.varying:
            values = (
                f"shape={list(self.shape)}, dtype={self.dtype}, "
                f"varying along {', '.join(self.varying)}"
            )
        elif self.is_meta or thread_state.current() is not None:
            values = f"shape={list(self.shape)}, dtype={self.dtype}"
        else:
            text = repr(self.detach().cpu())
            values = text.removeprefix("tensor(").removesuffix(")")
        return f"XLATensor({values}, device='{self.device}'{grad})"
