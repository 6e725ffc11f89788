"""`XLATensor`: the per-device view, a tensor that each device of the process holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xla_dtensor import _context
from xla_dtensor._common import TensorMethods

if TYPE_CHECKING:
    from xla_dtensor.form import Form
    from xla_dtensor.storage import Storage, ViewStep


class XLATensor(TensorMethods, torch.Tensor):
    """A tensor on the "xla" device that has the same value on every device.

    ``full_tensor()`` and ``torch.zeros(..., device="xla")`` make one. It computes with sharded
    tensors as if it were replicated, and ``.cpu()`` brings its value to the host.
    """

    _storage_: Storage
    _steps: tuple[ViewStep, ...]
    _own_form: Form
    _cache: Any

    @staticmethod
    def __new__(
        cls,
        storage: Storage,
        form: Form,
        steps: tuple[ViewStep, ...] = (),
        requires_grad: bool = False,
    ) -> XLATensor:
        r = torch.Tensor._make_wrapper_subclass(
            cls,
            form.shape,
            strides=form.stride,
            storage_offset=form.offset,
            dtype=form.dtype,
            device="xla:0",
            requires_grad=requires_grad,
        )
        r._storage_ = storage
        r._own_form = form
        r._steps = steps
        r._cache = None
        return r

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from xla_dtensor.dispatch import dispatch

        return dispatch(func, args, kwargs or {})

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
