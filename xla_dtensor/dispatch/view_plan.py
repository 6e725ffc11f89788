"""Views: no computation, another way to look at the same storage."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base.keys import freeze
from xla_dtensor.dispatch.call import Call
from xla_dtensor.dispatch.meta import meta_results
from xla_dtensor.dispatch.ops import info_of
from xla_dtensor.dispatch.result_forms import output_forms, place_of
from xla_dtensor.dispatch.result_placements import Answer
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form, contiguous_stride
from xla_dtensor.forms.storage import ONE_VIEWER
from xla_dtensor.forms.views import ViewStep
from xla_dtensor.tensors.of_form import tensor_class


class ViewPlan:
    """A view call: no computation, a step to append and the form of each result.

    ``as_strided`` looks at the memory behind a tensor, not at the tensor: its base is no view (but
    for what devices hold of a sharded tensor, or the other way round), and its step follows the
    one that puts the base in the order of its memory.
    """

    __slots__ = ("forms", "identity", "of_memory", "returns_list", "steps")

    def __init__(self, call: Call) -> None:
        info = call.info
        base_form = call.forms[0]
        self.identity = info.is_identity
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
            # The offset counts from the start of the memory; by default it is the base's own.
            bound = dict(zip(info.argument_names[1:], args, strict=False)) | dict(kwargs)
            if bound.get("storage_offset") is None:
                bound["storage_offset"] = base_form.offset
            args, kwargs = (), tuple(sorted(bound.items()))
        for index, meta in enumerate(metas):
            assert meta is not None
            which = index if self.returns_list else None
            op = None if self.of_memory else info.func
            self.steps.append(ViewStep(info.view, args, kwargs, which, meta.shape, op))

    def make(self, base: Any) -> Any:
        """The view or views of ``base``."""
        if torch.is_inference_mode_enabled() and not base.is_inference():
            # As in torch, such a view is an ordinary tensor, which shares its base's version.
            with torch.inference_mode(False):
                return self._make(base)
        return self._make(base)

    def _make(self, base: Any) -> Any:
        storage, steps = base._storage_, base._steps
        if storage.viewers is ONE_VIEWER:
            storage.introduce(base)
        if self.identity:
            return type(base)(storage, base._form if steps else storage.form, steps)
        if self.of_memory:
            steps = (*steps, *_memory_order(base._form))
        results = [
            tensor_class(form)(storage, form, (*steps, step))
            for form, step in zip(self.forms, self.steps, strict=True)
        ]
        return results if self.returns_list else results[0]


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
