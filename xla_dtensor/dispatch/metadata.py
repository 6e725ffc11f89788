"""Overloads that change a tensor's shape or memory: ``t_``, ``resize_``, ``set_``, ``out=``.

A tensor is a view (form and steps) of a storage, so it changes by becoming another view, or a view
of another storage. torch's own part (sizes, strides) follows through the ``data`` setter, as when
a user assigns ``x.data``.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private import suggest_memory_format
from xla_dtensor.base.torch_private.attributes import schema_of
from xla_dtensor.dispatch.execute import dispatch
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.execution.set_data import refuse_shared, set_data
from xla_dtensor.forms.form import contiguous_stride
from xla_dtensor.forms.views import CrossingStep
from xla_dtensor.plans.ops import handles
from xla_dtensor.tensors.base import refuse_other_kind
from xla_dtensor.tensors.of_form import is_ours

aten = torch.ops.aten

_IN_PLACE_VIEWS = {
    "aten::as_strided_.default": aten.as_strided.default,
    "aten::squeeze_.default": aten.squeeze.default,
    "aten::squeeze_.dim": aten.squeeze.dim,
    "aten::squeeze_.dims": aten.squeeze.dims,
    "aten::t_.default": aten.t.default,
    "aten::transpose_.default": aten.transpose.int,
    "aten::unsqueeze_.default": aten.unsqueeze.default,
}


@handles("aten::_has_compatible_shallow_copy_type.default")
def _can_become(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Asked by the ``data`` setter below autograd."""
    return is_ours(args[0]) and is_ours(args[1])


@handles(*_IN_PLACE_VIEWS)
def _view_in_place(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    schema = schema_of(func)
    name = f"{schema.name}.{schema.overload_name or 'default'}"
    set_data(args[0], dispatch(_IN_PLACE_VIEWS[name], args, kwargs), name)
    return args[0]


_OF_VALUES = (aten._conj.default, aten._neg_view.default)  # that show others than the memory's


@handles("aten::as_strided.default")
def _as_strided(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Of a view: the same of its base, since both are about the memory behind them."""
    tensor = args[0]
    base = _base(tensor)
    if base is tensor:
        return NotImplemented
    if base.dtype != tensor.dtype or any(
        getattr(step, "op", None) in _OF_VALUES for step in tensor._steps
    ):
        raise UnsupportedOpError(
            f"as_strided of a view of shape {list(tensor.shape)} and {tensor.dtype} of memory that "
            f"holds {base.dtype} (view_as_complex, view_as_real, .real, .imag, view(dtype), conj): "
            "its positions are not those of the memory; clone() it first"
        )
    executor.current().touched(tensor)
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    offset = tensor._form.offset if offset is None else offset
    return dispatch(func, (base, args[1], args[2], offset), {})


@handles("aten::as_strided_copy.default", "aten::as_strided_copy.out")
def _as_strided_copy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """By the view, which is about memory and not, as a lowering is, about values in order."""
    others = dict(kwargs)
    out = others.pop("out", None)
    view = dispatch(aten.as_strided.default, args, others)
    how = {"memory_format": torch.contiguous_format}
    if out is None:
        return dispatch(aten.clone.default, (view,), how)
    return dispatch(aten.clone.out, (view,), {**how, "out": out})


def _base(tensor: Any) -> Any:
    """The tensor whose elements are the memory that ``tensor`` shows: the one that its storage was
    made for, or, between sharded tensors and what devices hold, the whole of what it is a view of
    on its own side."""
    steps = tensor._steps
    last = max((i for i, step in enumerate(steps) if isinstance(step, CrossingStep)), default=-1)
    if last + 1 == len(steps):
        return tensor
    tensor._storage_.introduce(tensor)
    if last < 0:
        return type(tensor)(tensor._storage_, tensor._storage_.form)
    target = steps[last].target
    return type(tensor)(tensor._storage_, target, steps[: last + 1])


@handles("aten::resize_.default")
def _resize(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, size = args[0], tuple(args[1])
    memory_format = kwargs.get("memory_format")
    stride = contiguous_stride(size)
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        like = torch.empty(size, device="meta", memory_format=memory_format)
        stride = tuple(like.stride())
    resize(tensor, size, stride, "aten::resize_.default")
    return tensor


@handles("aten::resize_as_.default")
def _resize_as(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, like = args[0], args[1]
    memory_format = kwargs.get("memory_format")
    if memory_format is torch.preserve_format:
        kwargs = {"memory_format": suggest_memory_format(like)}
    return _resize(func, (tensor, tuple(like.shape)), kwargs)


def resize(tensor: Any, size: tuple[int, ...], stride: tuple[int, ...], name: str) -> None:
    """Give a tensor another size over its own memory, which grows if it must (new elements are 0).

    Raises:
        UnsupportedOpError: the memory must grow and other tensors share it.
    """
    if tuple(tensor.shape) == size:
        return
    form = tensor._form
    memory = math.prod(_base(tensor).shape)
    needed = form.offset + (
        math.prod(size) and 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    )
    if needed <= memory:
        view = dispatch(aten.as_strided.default, (tensor, size, stride, form.offset), {})
        set_data(tensor, view, name)
        return
    if not memory:
        set_data(tensor, dispatch(aten.new_empty_strided.default, (tensor, size, stride), {}), name)
        return
    refuse_shared(tensor, name, size)
    flat = dispatch(aten.as_strided.default, (tensor, (memory,), (1,), 0), {})
    grown = dispatch(aten.constant_pad_nd.default, (flat, [0, needed - memory]), {})
    set_data(
        tensor, dispatch(aten.as_strided.default, (grown, size, stride, form.offset), {}), name
    )


@handles("aten::set_.source_Tensor")
def _set(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    refuse_other_kind(args[0], args[1], "set_")
    set_data(args[0], args[1], "aten::set_.source_Tensor")
    return args[0]


@handles("aten::set_.source_Tensor_storage_offset")
def _set_strided(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, source, offset, size = args[:4]
    refuse_other_kind(tensor, source, "set_")
    stride = args[4] if len(args) > 4 and args[4] else contiguous_stride(tuple(size))
    view = dispatch(aten.as_strided.default, (source, size, stride, offset), {})
    set_data(tensor, view, "aten::set_.source_Tensor_storage_offset")
    return tensor


@handles("aten::set_.default")
def _set_empty(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    set_data(args[0], dispatch(aten.new_empty.default, (args[0], [0]), {}), "aten::set_.default")
    return args[0]


@handles("aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset")
def _refuse_storage(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    raise UnsupportedOpError(
        "set_ with a torch storage: the memory of an xla tensor is a jax.Array, which torch's "
        "storages don't show; use x.set_(other_tensor) or x.set_(other_tensor, offset, size, "
        "stride)"
    )
