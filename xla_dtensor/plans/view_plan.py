"""`ViewPlan`: how calls of a view overload make views of the same storage, without computing."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from xla_dtensor.base.tables.keys import freeze
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form, contiguous_stride
from xla_dtensor.forms.storage import ONE_VIEWER
from xla_dtensor.forms.views import PositionStep, ViewStep
from xla_dtensor.lowering import find_view
from xla_dtensor.lowering.views.ranges import slice_bounds
from xla_dtensor.plans.call import Call
from xla_dtensor.plans.meta import meta_results
from xla_dtensor.plans.ops import info_of
from xla_dtensor.plans.result_forms import output_forms, place_of
from xla_dtensor.plans.result_placements import Answer
from xla_dtensor.tensors.of_form import new_view


class ViewPlan:
    """A view call: no computation, a step to append and the form of each result.

    ``as_strided`` looks at the memory behind a tensor, not at the tensor: its base is no view (but
    for what devices hold of a sharded tensor, or the other way round), and its step follows the
    one that puts the base in the order of its memory.
    """

    __slots__ = ("forms", "identity", "is_detached", "of_memory", "returns_list", "steps")

    def __init__(self, call: Call) -> None:
        info = call.info
        base_form = call.forms[0]
        self.identity = info.is_identity
        self.is_detached = info.name == "aten::detach.default"
        self.returns_list = info.returns_lists[0]
        metas = meta_results(call)
        place = place_of(call)
        answer = None if place.mesh is None else Answer(call, place.mesh, metas)
        self.forms = [f for f in output_forms(place, metas, answer) if f is not None]
        self.steps: list[ViewStep] = []
        self.of_memory = False
        if self.identity:
            self.forms = [base_form]
            return
        assert info.view is not None
        args = tuple(freeze(a) for a in call.args[1:])
        kwargs = tuple(sorted((k, freeze(v)) for k, v in call.kwargs.items()))
        self.of_memory = info.name == "aten::as_strided.default"
        if self.of_memory:
            # as_strided's offset counts from the storage's start; its default is the base's offset.
            bound = dict(zip(info.argument_names[1:], args, strict=False)) | dict(kwargs)
            if bound.get("storage_offset") is None:
                bound["storage_offset"] = base_form.offset
            args, kwargs = (), tuple(sorted(bound.items()))
        for index, meta in enumerate(metas):
            assert meta is not None
            which = index if self.returns_list else None
            op = None if self.of_memory else info.func
            step = ViewStep(info.view, args, kwargs, which, meta.shape, op)
            self.steps.append(_position_step(step, call, index, meta.shape) or step)

    def make(self, base: Any) -> Any:
        """The view or views of ``base``."""
        is_inference = base.is_inference()
        if torch.is_inference_mode_enabled() != is_inference and not (
            is_inference and self.is_detached
        ):
            # As in torch: a view is an inference tensor if its base is one, whatever mode is on;
            # else it shares the base's version counter. Only a detached one may be written to.
            with torch.inference_mode(is_inference):
                return self.make(base)
        storage, steps = base._storage_, base._steps
        if storage.viewers is ONE_VIEWER:
            storage.introduce(base)
        if self.identity:
            cls = type(base)
            return cls.__new__(cls, storage, base._form if steps else storage.form, steps)
        if self.of_memory:
            steps = (*steps, *_memory_order(base._form))
        if not self.returns_list:
            return new_view(storage, self.forms[0], (*steps, self.steps[0]))
        pairs = zip(self.forms, self.steps, strict=True)
        return [new_view(storage, form, (*steps, step)) for form, step in pairs]


def _position_step(
    step: ViewStep, call: Call, index: int, shape: tuple[int, ...]
) -> PositionStep | None:
    """The same step by its position, of a view that loops make anew in each round: ``x[t]``,
    ``x[t : t + n]``, one of ``x.unbind()``. A slice that begins or ends where the dim does is known
    by its length. A dim that devices share stays a slice that XLA knows.
    """
    name, base = call.info.name, call.forms[0]
    if name not in _POSITIONS or not base.shape:
        return None
    bound = dict(zip(call.info.argument_names, call.args, strict=False)) | call.kwargs
    dim = bound.get("dim", 0) % len(base.shape)
    size = base.shape[dim]
    length = None
    if name == "aten::select.int":
        start = bound["index"]
        if start < 0:
            return None  # counted from the end: the same in each round of a loop
    elif name == "aten::unbind.int":
        start = index
    else:
        start, end = slice_bounds(size, bound.get("start"), bound.get("end"))
        length = end - start
        if bound.get("step", 1) != 1 or not start or end == size or not length:
            return None
    if base.dim_axes[dim]:
        return None
    lowering = find_view("aten::select.int" if length is None else "aten::slice.Tensor")
    assert lowering is not None
    left_open = PositionStep(lowering, (), (), None, shape, None, dim, length)
    return PositionStep(
        lowering,
        step.args,
        step.kwargs,
        step.index,
        shape,
        step.op,
        dim,
        length,
        int(start),
        dataclasses.replace(left_open, left_open=left_open),
    )


_POSITIONS = frozenset({"aten::select.int", "aten::slice.Tensor", "aten::unbind.int"})


def _memory_order(form: Form) -> tuple[ViewStep, ...]:
    """The view of a tensor whose row-major order is the order of its memory.

    Raises:
        UnsupportedOpError: the tensor's strides have gaps, so its memory isn't its elements.
    """
    if form.stride == contiguous_stride(form.shape):
        return ()
    order = tuple(sorted(range(len(form.shape)), key=lambda d: -form.stride[d]))
    shape = tuple(form.shape[d] for d in order)
    expected = contiguous_stride(shape)
    if any(
        form.shape[d] > 1 and form.stride[d] != step
        for d, step in zip(order, expected, strict=True)
    ):
        raise UnsupportedOpError(
            f"as_strided of a tensor of shape {list(form.shape)} and strides {list(form.stride)}: "
            "its memory has gaps or overlaps; call .contiguous() first"
        )
    permute = info_of(torch.ops.aten.permute.default).view
    assert permute is not None
    return (ViewStep(permute, (order,), (), None, shape),)
