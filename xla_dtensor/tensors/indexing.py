"""``x[i]`` and ``x[i] = v`` with an index ``i`` that has no one value in Python.

torch takes a 0-d integer tensor in an index for a number (``.item()``) and selects. Of a tensor
that differs per device there is no such number, and inside a compiled step none yet; so it gathers
there.
"""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base import thread_state
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.read import constant_recipe

_NOT_NUMBERS = (torch.bool, torch.uint8)  # masks


def select(tensor: Any, index: Any) -> Any:
    """``tensor[index]``, or `NotImplemented` if torch's way will do."""
    parts = _parts(index)
    if parts is None:
        return NotImplemented
    found: list[Any] = [None] * tensor.ndim
    for dim, part in _dims(parts, tensor):
        if _has_no_number(part):
            found[dim] = part
    result = torch.ops.aten.index.Tensor(tensor, found)
    # torch has a view, to which a program may write; a copy must not take such a write silently.
    result._storage_.refuses_writes = (
        "a write to x[i], where i differs from device to device or is known in the compiled step "
        f"only: torch has a view there, xla_dtensor a copy (of shape {list(result.shape)}). Write "
        "to x itself (x[i] = value; for x[i] += value: x[i] = x[i] + value), or take a .clone()"
    )
    rest = tuple(part for part in parts if not _has_no_number(part))
    return result[rest] if rest else result


def assign(tensor: Any, index: Any, value: Any) -> bool:
    """``tensor[index] = value``; False if torch's way will do.

    Raises:
        UnsupportedOpError: other tensors are in the index, too.
    """
    parts = _parts(index)
    if parts is None:
        return False
    whole = tuple(slice(None) if _has_no_number(part) else part for part in parts)
    if any(isinstance(part, torch.Tensor | list) for part in whole):
        raise UnsupportedOpError(
            "x[...] = value with an index that differs from device to device (or is known in the "
            "compiled step only) and other tensors in it; use x.index_put_"
        )
    view = tensor[whole]
    dims, indices = [], []
    for dim, part in _dims(parts, tensor, of_result=True):
        if _has_no_number(part):
            dims.append(dim)
            indices.append(part)
    view = view.movedim(dims, list(range(len(dims))))
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    view.index_put_(tuple(indices), value.to(tensor.dtype))
    return True


def _parts(index: Any) -> tuple[Any, ...] | None:
    """The parts of the index, if one of them needs us."""
    if index.__class__ is tuple:
        return index if any(map(_has_no_number, index)) else None
    return (index,) if _has_no_number(index) else None


def _has_no_number(part: Any) -> bool:
    form = getattr(part, "_form", None)
    if form is None or form.shape or form.dtype.is_floating_point or form.dtype in _NOT_NUMBERS:
        return False
    if form.varying:
        return True
    if thread_state.current() is None:
        return False
    return constant_recipe(part) is None


def _dims(
    parts: tuple[Any, ...], tensor: torch.Tensor, of_result: bool = False
) -> list[tuple[int, Any]]:
    """The first dim of the tensor, or of what a basic index of it gives, that each part takes."""
    taken = [_takes(part) for part in parts]
    dim, found = 0, []
    for part, takes in zip(parts, taken, strict=True):
        if part is Ellipsis:
            takes = tensor.ndim - sum(taken)
        found.append((dim, part))
        if of_result:
            takes = 1 if part is None else 0 if isinstance(part, int) else takes
        dim += takes
    return found


def _takes(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    if isinstance(part, torch.Tensor) and part.dtype in _NOT_NUMBERS:
        return part.ndim
    return 1
