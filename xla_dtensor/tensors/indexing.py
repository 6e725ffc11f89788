"""``x[i]`` and ``x[i] = v`` with an index ``i`` whose value Python can't know.

torch takes a 0-d integer tensor in an index for a number (``.item()``) and selects. Of a tensor
that differs per device there is no such number, and inside a compiled step none yet; so it gathers
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.base.numbers.python_numbers import Int
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.read import constant_recipe

_NOT_NUMBERS = (torch.bool, torch.uint8)  # masks
# No part of another kind needs us; in a trace numbers may be inputs, whose class is equal to `int`.
_NUMBERS = frozenset([int, slice, type(None), type(Ellipsis)])


def of_lists(index: Any) -> Any:
    """In a trace an index with CPU tensors of the step's own for lists of numbers and truth values:
    torch's C++ makes tensors on the devices of them where no mode sees it, and their values
    wouldn't be known."""
    if executor.current().has_values:
        return index
    if index.__class__ is tuple:
        return tuple(map(_of_list, index))
    return _of_list(index)


def _of_list(part: Any) -> Any:
    same = part.__class__ is list and part and part[0].__class__ in (bool, int)
    if not same or any(x.__class__ is not part[0].__class__ for x in part):
        return part
    return torch.tensor(part, device="cpu")


def select(tensor: Any, index: Any) -> Any:
    """``tensor[index]``, or `NotImplemented` if torch's way will do."""
    parts = _parts(index)
    if parts is None:
        selected = _at_numbers(tensor, index)
        return NotImplemented if selected is None else selected[0][selected[1] or ...]
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
    if is_of_numbers(index):
        return False
    parts = _parts(index)
    if parts is None:
        selected = _at_numbers(tensor, index)
        if selected is not None:
            view, rest = selected
            view[rest or ...] = value
            return True
        return _assign_by_mask(tensor, index, value)
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


def _at_numbers(tensor: Any, index: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """The view that the numbers of a trace in the index select, which torch would ask for their
    values, and the rest of the index; None if there are none, or they aren't inputs."""
    if executor.current().positions is None:
        return None
    parts = index if index.__class__ is tuple else (index,)
    chosen = [part for part in parts if isinstance(part, Int)]
    if not chosen or any(isinstance(part, bool) for part in parts):
        return None
    for dim, part in reversed(_dims(parts, tensor)):
        if isinstance(part, Int):
            tensor = tensor.select(dim, part)
    return tensor, tuple(part for part in parts if not isinstance(part, Int))


def _assign_by_mask(tensor: Any, index: Any, value: Any) -> bool:
    """``x[mask] = value`` of a value that gets a gradient and is the same at every masked position.
    torch's formula takes the gradient at those positions, whose number isn't known; of a
    ``torch.where`` it has a shape that is."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return False
    parts = index if index.__class__ is tuple else (index,)
    masks = [part for part in parts if is_mask(part)]
    others = [part for part in parts if not is_mask(part)]
    if len(masks) != 1 or any(isinstance(part, torch.Tensor | list | bool) for part in others):
        return False
    (mask,) = masks
    if not mask.ndim:
        return False
    whole: list[Any] = []
    for part in parts:
        whole += [slice(None)] * mask.ndim if part is mask else [part]
    view = tensor[tuple(whole)]
    (start,) = [dim for dim, part in _dims(parts, tensor, of_result=True) if part is mask]
    if value.dtype != view.dtype or not is_masked_fill(view, [None] * start + [mask], value):
        return False
    after = view.ndim - start - mask.ndim
    at = value.ndim - after - 1  # the dim of the value that stands for the masked positions
    if at >= 0:
        value = value.reshape(*value.shape[:at], *[1] * mask.ndim, *value.shape[at + 1 :])
    mask = mask.bool().reshape(*mask.shape, *[1] * after)
    view.copy_(torch.where(mask, value, view))
    return True


def is_mask(index: Any) -> bool:
    """Whether an index is a mask."""
    return isinstance(index, torch.Tensor) and index.dtype in _NOT_NUMBERS


def check_masks(x: torch.Tensor, indices: Sequence[Any]) -> None:
    """Raise unless each mask has the shape of what it indexes, as torch does: of others there are
    positions, too.

    Raises:
        IndexError: see there.
    """
    dim = 0
    for index in indices:
        if is_mask(index):
            check_mask(x, index, dim)
        dim += index.ndim if is_mask(index) else 1


def check_mask(x: torch.Tensor, mask: torch.Tensor, start: int) -> None:
    """The same of a mask of the dims from ``start`` on."""
    for dim, size in enumerate(mask.shape):
        if size != x.size(start + dim):
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {dim} does not match the shape "
                f"of the indexed tensor {list(x.shape)} at index {start + dim}"
            )


def is_masked_fill(x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor) -> bool:
    """Whether ``index_put`` has one mask, and the same values for each of its positions: then
    nothing has a size that depends on how many there are.

    Raises:
        IndexError: the mask doesn't have the shape of what it indexes, as in torch.
    """
    found = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(found) != 1 or not is_mask(found[0][1]):
        return False
    ((start, mask),) = found
    if start + mask.ndim > x.ndim or not mask.ndim:
        return False
    check_mask(x, mask, start)
    result = (*x.shape[:start], 1, *x.shape[start + mask.ndim :])
    if len(values.shape) > len(result):
        return False
    return all(n in (1, m) for n, m in zip(reversed(values.shape), reversed(result), strict=False))


def is_of_numbers(index: Any) -> bool:
    """Whether an index outside of any step or batch has numbers and slices alone: torch's way."""
    parts = index if index.__class__ is tuple else (index,)
    return _NUMBERS.issuperset(map(type, parts)) and executor.enclosing() is None


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
    return not executor.current().has_values and constant_recipe(part) is None


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
