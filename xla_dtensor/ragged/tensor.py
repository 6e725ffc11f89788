"""`RaggedTensor`: on each device the first so many rows of a buffer of one size.

To torch its size is a symbolic number, so that torch's formulas (what ``expand`` undoes, what a
mean divides by) are given the true one. What is behind the rows has no meaning: `by_rule` sees to
it that nothing which is computed depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base import interrupts
from xla_dtensor.base.numbers.row_counts import CountNode
from xla_dtensor.base.source_line import user_line
from xla_dtensor.base.torch_private import disabled_torch_function, make_wrapper_subclass
from xla_dtensor.errors import DataDependentError
from xla_dtensor.ragged.values import number_of, vector

_run: list[Callable[..., Any]] = []


def let_run(function: Callable[..., Any]) -> None:
    """``function(func, args, kwargs)`` executes operations on such tensors."""
    _run[:] = [function]


class RaggedTensor(torch.Tensor):
    """A tensor one of whose dims has as many places as a value on the devices says.

    Attributes:
        buffer: an xla tensor, with room for all there may be; None before anything is known of
            how many that are (``new_empty``), which is to be written as a whole.
        along: the dim.
        rows: how many places of it are meant.
        copied: whether torch takes it for a view and it is a copy, which mustn't be written to.
    """

    buffer: Any
    along: int
    rows: CountNode
    copied: bool

    @staticmethod
    def __new__(
        cls: Any, buffer: Any, dim: int, rows: CountNode, copied: bool = False, like: Any = None
    ) -> Any:
        model = buffer if like is None else like
        sizes = list(model.shape)
        sizes[dim] = number_of(rows)
        strides: list[Any] = [0] * len(sizes)
        step: Any = 1
        order = sorted(range(len(sizes)), key=lambda i: (model.stride(i), -i))
        for i in order:
            if model.stride(i) == 0 and model.shape[i] != 1 and like is None:
                continue  # expanded
            strides[i] = step
            step = step * sizes[i]
        made = make_wrapper_subclass(
            cls, sizes, strides=strides, dtype=model.dtype, device=torch.device("xla:0")
        )
        made.buffer, made.along, made.rows, made.copied = buffer, dim, rows, copied
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """All is done in ``__new__``."""

    __torch_function__ = disabled_torch_function

    @classmethod
    @interrupts.atomic
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run[0](func, args, kwargs or {})

    def local_values(self) -> list[torch.Tensor]:
        """What each device has, on the host.

        Returns:
            a CPU tensor for each device, of as many rows as it has.
        """
        counts = vector([torch.SymInt(self.rows)]).local_values()
        buffer = filled(self).detach()
        varies = bool(buffer._form.varying)
        values = buffer.local_values() if varies else [buffer.cpu()] * len(counts)
        return [
            value.narrow(self.along, 0, int(count))
            for value, count in zip(values, counts, strict=True)
        ]

    def __repr__(self) -> str:
        size = [n if isinstance(n, int) else "rows" for n in self.shape]
        return f"{type(self).__name__}(shape={size}, dtype={self.dtype})"

    def tolist(self) -> Any:
        refuse(self, "tolist()", "local_values() has each device's rows (outside of a step)")

    def numpy(self, *, force: bool = False) -> Any:
        refuse(self, "numpy()", "local_values() has each device's rows (outside of a step)")


def filled(tensor: RaggedTensor) -> Any:
    """The buffer.

    Raises:
        DataDependentError: there is none yet.
    """
    if tensor.buffer is None:
        refuse(
            tensor,
            "reading it",
            "nothing says how many that are at most: write it by all_to_all_single first, or say "
            "torch._check(n <= most) of its number of rows",
        )
    return tensor.buffer


def refuse(tensor: RaggedTensor, what: str, way: str) -> Any:
    """Raise: ``what`` can't be done with a tensor of so many rows; ``way`` is the way out."""
    raise DataDependentError(
        f"{what} of a {tensor!r}, whose number of rows is a value on the devices"
        f"{user_line()}\n{way}"
    )
