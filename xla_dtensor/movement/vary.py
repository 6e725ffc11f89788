"""`vary` and `sum_over`: JAX's ``pvary`` and ``psum`` for per-device tensors.

Each is the other's gradient.

`vary` says that each device has a value of its own (the same one, to begin with); its transpose,
`sum_over`, adds the devices' values up. They are what makes the gradients of per-device code
complete: a value that all devices share gets the sum of what each of them contributes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.forms.form import Form, device_form
from xla_dtensor.forms.per_device import Axes, expand, logical, union
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh import Frame
from xla_dtensor.movement.collective_kernels import summed
from xla_dtensor.movement.relayout import relayout
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.of_form import new_tensor


def vary(tensor: XLATensor, axes: Axes, frame: Frame) -> XLATensor:
    """``tensor`` as one that varies along ``axes`` of ``frame`` too; differentiable."""
    missing = tuple(axis for axis in axes if axis not in tensor.varying)
    return _Vary.apply(tensor, missing, frame) if missing else tensor


def sum_over(tensor: XLATensor, axes: Axes, frame: Frame) -> XLATensor:
    """The sum of the devices' values along ``axes`` of ``frame``, the same on all of them;
    differentiable. Axes along which ``tensor`` doesn't vary are left alone."""
    found = tuple(axis for axis in axes if axis in tensor.varying)
    return _SumOver.apply(tensor, found, frame) if found else tensor


def forget_variation(tensor: XLATensor, varying: Axes) -> None:
    """Let ``tensor`` vary along no more than ``varying``, in place: whoever calls this knows that
    the devices have one value along its other axes. Of a view of something larger nobody knows, so
    nothing happens."""
    storage = tensor._storage_
    source = storage.form
    if source.varying == varying or math.prod(source.shape) != tensor.numel():
        return
    whole = tensor if tensor._form is source else XLATensor(storage, source)
    assert source.frame is not None
    same = _relaid(whole, varying, source.frame, _first)
    storage.write(same._storage_.array, same._form)


def let_vary(storage: Storage, form: Form) -> None:
    """Let each device have the value of ``storage`` for its own, as in ``form``."""
    assert form.frame is not None
    executor.current().place(storage, form.frame)
    source = storage.form
    target = source.reduced().with_varying(form.varying)
    with torch.no_grad():
        own = relayout(new_tensor(storage.array, source), source, target, _each_its_own)
    storage.write(own._storage_.array, target)


def _each_its_own(array: Any, source: Form, target: Form) -> Any:
    return target.physical(_spread(logical(array, source), source, target))


class _Vary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: XLATensor, axes: Axes, frame: Frame) -> XLATensor:
        ctx.along = axes, frame
        return _relaid(tensor, union(frame, [tensor.varying, axes]), frame, _spread)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return sum_over(grad, *ctx.along), None, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: XLATensor, axes: Axes, frame: Frame) -> XLATensor:
        ctx.along = axes, frame
        kept = tuple(axis for axis in tensor.varying if axis not in axes)
        return _relaid(tensor, kept, frame, summed(axes))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return vary(grad, *ctx.along), None, None


def _relaid(tensor: XLATensor, varying: Axes, frame: Frame, convert: Any) -> XLATensor:
    """``tensor`` as one that varies along ``varying``, computed by ``convert``."""
    if not tensor.is_meta:
        executor.current().place(tensor._storage_, frame)
    source = tensor._form.placed(frame)
    about = source.shape, source.stride, 0, source.dtype
    target = device_form(frame, *about, varying, source.meta)
    if target.meta:
        return XLATensor(Storage(None, target), target)
    return relayout(tensor, source, target, convert)


def _first(array: Any, source: Form, target: Form) -> Any:
    return array[tuple(slice(None) if axis in target.varying else 0 for axis in source.varying)]


def _spread(array: Any, source: Form, target: Form) -> Any:
    assert target.frame is not None
    return expand(array, source.varying, target.varying, target.frame)
