"""Views at positions that are inputs of a compiled step's program: ``x[n]``, ``x[:, n : n + 4]``.

The view is made as for the position of this trace, and its last step then takes the number in
place of it. What must hold for that is decided by the number as Python decides: that it is in range
(torch's own checks decide that, too), that it counts from the same end, that a range is as long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from xla_dtensor.base.numbers.python_numbers import is_number, like_a_number
from xla_dtensor.forms.views import PositionStep, TracedStart, is_at_traced, refuse_offset
from xla_dtensor.lowering import find_view
from xla_dtensor.plans.call import TracedPosition
from xla_dtensor.plans.ops import OpInfo
from xla_dtensor.tensors.of_form import is_ours

_SELECT, _SLICE = "aten::select.int", "aten::slice.Tensor"
_STRIDED = "aten::as_strided.default"


class Positions:
    """Views of one trace at positions that are its inputs.

    Attributes:
        used: whether there has been one. Then a trace that fails may not do so without.
    """

    def __init__(self) -> None:
        self.used = False

    def view(
        self, info: OpInfo, args: Any, kwargs: dict[str, Any], dispatch: Callable[..., Any]
    ) -> Any:
        """The view at a symbolic position; NotImplemented of any other one."""
        if info.name == _SELECT:
            if not is_number(args[-1]) and not is_number(kwargs.get("index")):
                return NotImplemented
        elif info.name != _SLICE:
            if info.name == _STRIDED and is_at_traced(getattr(args[0], "_steps", ())):
                refuse_offset()
            return NotImplemented
        elif not any(map(is_number, (*args[2:4], *kwargs.values()))):
            return NotImplemented
        bound = dict(zip(info.argument_names, args, strict=False)) | kwargs
        base, dim = bound["self"], bound.get("dim", 0)
        if not is_ours(base) or is_number(dim) or is_number(bound.get("step", 1)):
            return NotImplemented
        form = base._form
        if not form.shape or form.varying or form.unreduced:
            return NotImplemented
        dim %= len(form.shape)
        size = form.shape[dim]
        length = None
        if info.name == _SELECT:
            start = _from_front(bound["index"], size)
            # A comparison of a number of the trace: its outcome becomes a guard of the program. So
            # do those below.
            if not 0 <= start < size:
                return NotImplemented
            view = dispatch(info.func, (base, dim, start.node.value), {})
        else:
            start, end = bound.get("start"), bound.get("end")
            if not (is_number(start) and is_number(end)) or bound.get("step", 1) != 1:
                return NotImplemented
            start, end = _from_front(start, size), _from_front(end, size)
            if not (start >= 0 and start < end and end <= size):
                return NotImplemented
            length = end.node.value - start.node.value
            if end - start != length:
                return NotImplemented
            view = dispatch(info.func, (base, dim, start.node.value, end.node.value), {})
        self.used = True
        lowering = find_view(info.name)
        assert lowering is not None
        shape = view._form.shape
        left_open = PositionStep(lowering, (), (), None, shape, None, dim, length)
        step = dataclasses.replace(
            left_open, start=TracedStart(start.node.traced), left_open=left_open
        )
        return type(view)(base._storage_, view._form, (*base._steps, step))

    def in_backward(self, args: Any) -> Any:
        """The arguments of ``select_backward`` or ``slice_backward``, whose position autograd has
        kept."""
        sizes, dim, start = args[1:4]
        if not self.used or not is_number(start):
            return args
        start = TracedPosition(_from_front(start, sizes[dim]))
        if len(args) == 4:
            return (*args[:3], start)
        end = args[4]
        if not is_number(end) or args[5] != 1:
            return args
        return (*args[:3], start, TracedPosition(_from_front(end, sizes[dim])), 1)


def _from_front(position: Any, size: int) -> Any:
    """A position, counted from the front."""
    if is_number(position):
        position = like_a_number(position)
    return position + size if position < 0 else position
