"""`CountsOnHost`: integers on their way to the host that Python may only pass on.

``counts.to("cpu").tolist()``, with which split sizes are made, needs no value as long as what
becomes of the numbers is sizes. So a copy to the CPU of integers that differ from device to device,
or that a compiled step computes, stays on the devices, and gives `row_counts` for numbers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from xla_dtensor.base import executor, interrupts
from xla_dtensor.base.numbers.counts import Counts, asked_before
from xla_dtensor.base.numbers.row_counts import numbers_of
from xla_dtensor.base.ours import SaysCpu, is_ours
from xla_dtensor.base.torch_private import disabled_torch_function, make_wrapper_subclass, pytree
from xla_dtensor.forms.read import constant_recipe
from xla_dtensor.plans.ops import info_of

_MOST_DIMS = 2
# What torch computes from lengths on the host: sizes of its results depend on each of them.
_BY_VALUES = frozenset({"aten::_pack_padded_sequence.default"})


def stays(tensor: Any) -> bool:
    """Whether the copy of an xla tensor is one of these."""
    form = tensor._form
    if tensor.dtype not in (torch.int64, torch.int32) or not 0 < tensor.ndim <= _MOST_DIMS:
        return False
    if form.meta or form.has_own_value:
        return False
    now = executor.current()
    if now.has_values:
        return bool(form.varying)
    return constant_recipe(tensor) is None and not now.can_fetch(tensor)


class CountsOnHost(SaysCpu, torch.Tensor):
    """Integers that Python has asked for on the host, on the devices.

    Attributes:
        there: the xla tensor.
    """

    there: Any

    @staticmethod
    def __new__(cls: Any, there: Any) -> Any:
        made = make_wrapper_subclass(cls, there.shape, dtype=there.dtype, device="cpu")
        made.there = there
        return made

    def __init__(self, *args: Any) -> None:
        """All is done in ``__new__``."""

    __torch_function__ = disabled_torch_function

    @classmethod
    @interrupts.atomic
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = info_of(func).name
        if name == "aten::_local_scalar_dense.default":
            return args[0].tolist()
        if name == "aten::is_pinned.default":
            return False
        device = kwargs.get("device")
        elsewhere = device is not None and torch.device(device).type != "cpu"
        if not elsewhere:
            kwargs.pop("device", None)
        leaves = pytree.tree_leaves((args, kwargs))
        by_values = name in _BY_VALUES or any(map(_has_values, leaves))
        take = cls.value if by_values else operator.attrgetter("there")
        given = pytree.tree_map_only(cls, take, (args, kwargs))
        found = func(*given[0], **given[1])
        return found if by_values or elsewhere else pytree.tree_map(_on_host, found)

    def value(self) -> torch.Tensor:
        """The value, which raises where there is none."""
        return executor.current().on_host(self.there)

    def tolist(self) -> Any:
        """Numbers of rows, in lists."""
        if self.dtype.is_floating_point or self.dtype is torch.bool:
            return self.value().tolist()
        numbers = numbers_of(asked(self.there))
        if not self.ndim:
            return numbers[0]
        for size in reversed(self.shape[1:]):
            numbers = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        return numbers

    def item(self) -> Any:
        """A number of rows."""
        return self.reshape(()).tolist()

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def numpy(self, *, force: bool = False) -> Any:
        return self.value().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.value().__array__(dtype)

    def __repr__(self, **kwargs: Any) -> str:
        return repr(self.value())

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec)

    def __bool__(self) -> bool:
        return bool(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __index__(self) -> int:
        return int(self.value())

    def __float__(self) -> float:
        return float(self.value())


def asked(tensor: Any) -> Counts:
    """The counts that Python asks for, as they are now: somebody may write to the tensor."""
    again = asked_before(tensor.numel())
    if again is not None:
        return again
    with torch.no_grad():
        return Counts(tensor.detach().to(torch.int64).reshape(-1).clone())


def _has_values(x: Any) -> bool:
    """Whether it is another tensor on the CPU, with which these are to be computed there; one
    without dims counts as a number."""
    others = isinstance(x, torch.Tensor) and not isinstance(x, CountsOnHost) and not is_ours(x)
    return others and x.device.type == "cpu" and x.ndim > 0


def _on_host(value: Any) -> Any:
    whole = isinstance(value, torch.Tensor) and not isinstance(value, CountsOnHost)
    return CountsOnHost(value) if whole else value
