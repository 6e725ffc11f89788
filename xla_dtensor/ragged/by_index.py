"""Gathers and scatters by rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_dtensor.plans.ops import info_of
from xla_dtensor.ragged import by_rule
from xla_dtensor.ragged.by_rule import WAY, masked, ragged, resized, same_rows
from xla_dtensor.ragged.handlers import plain, takes
from xla_dtensor.ragged.tensor import RaggedTensor, filled, refuse
from xla_dtensor.ragged.values import scalar


def _places(index: Any, of: Any, dim: int) -> Any:
    """Indices into a dim, those behind the rows made 0, those from the end counted from there."""
    places = masked(index) if isinstance(index, RaggedTensor) else index
    if isinstance(of, RaggedTensor) and of.along == dim:
        places = torch.where(places < 0, places + scalar(torch.SymInt(of.rows)), places)
    return places


def _gathered(tensor: Any, dim: int, index: Any, gather: Callable[[Any, Any], Any]) -> Any:
    if isinstance(tensor, RaggedTensor) and tensor.along != dim:
        if isinstance(index, RaggedTensor):
            refuse(tensor, "a gather by so many indices along another dim", WAY)
        return ragged(gather(filled(tensor), index), tensor.along, tensor.rows)
    found = gather(plain(tensor), _places(index, tensor, dim))
    if not isinstance(index, RaggedTensor):
        return found
    return RaggedTensor(found, dim + index.along, index.rows)


@takes("index_select")
def _index_select(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, dim, index = args
    dim %= tensor.ndim
    return _gathered(tensor, dim, index, lambda t, i: t.index_select(dim, i))


def _one_index(tensor: Any, indices: Sequence[Any]) -> tuple[int, Any]:
    """The one index, and its dim."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dtype in (torch.bool, torch.uint8):
        own = [t for t in (tensor, *indices) if isinstance(t, RaggedTensor)]
        refuse(own[0], "indexing by several tensors, or by a mask", WAY)
    return given[0]


@takes("index.Tensor")
def _index(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, indices = args
    dim, index = _one_index(tensor, indices)
    at = [*[None] * dim]
    return _gathered(tensor, dim, index, lambda t, i: func(t, [*at, i]))


@takes("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index_put(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    dim, index = _one_index(tensor, indices)
    if isinstance(tensor, RaggedTensor) and tensor.along != dim:
        refuse(tensor, "writing to indices of another dim", WAY)
    buffer, values = _written(tensor, dim, index, values)
    places = _places(index, tensor, dim)
    at = [*[None] * dim]
    put = torch.ops.aten.index_put.default
    if accumulate or not isinstance(index, RaggedTensor):
        found = put(buffer, [*at, places], values, accumulate)
    else:
        # What is behind the rows is written to one place more.
        room = buffer.shape[dim]
        own = by_rule.valid(torch.SymInt(index.rows), places.shape[0])
        shape = [1 if i == dim else n for i, n in enumerate(buffer.shape)]
        longer = torch.cat([buffer, buffer.new_zeros(shape)], dim)
        found = put(longer, [*at, torch.where(own, places, room)], values, False)
        found = found.narrow(dim, 0, room)
    return _result(func, tensor, buffer, found)


def _written(tensor: Any, dim: int, index: Any, values: Any) -> tuple[Any, Any]:
    """The buffer that is written to, and the values for places of an index, zeros where it has
    none."""
    if isinstance(values, RaggedTensor):
        if not isinstance(index, RaggedTensor):
            refuse(values, "writing it to a known number of indices", WAY)
        same_rows([index, values], "writing by indices")
        values = resized(masked(values), values.along, filled(index).shape[0])
    return plain(tensor), values


def _result(func: Any, tensor: Any, buffer: Any, found: Any) -> Any:
    """A new tensor, or the one that is written to."""
    ragged_tensor = isinstance(tensor, RaggedTensor)
    if info_of(func).mutated:
        if ragged_tensor and tensor.copied:
            refuse(tensor, "a write to a part", "a part of so many rows is a copy: clone() it")
        buffer.copy_(found)
        return tensor
    return RaggedTensor(found, tensor.along, tensor.rows) if ragged_tensor else found


@takes("index_add", "index_add_")
def _index_add(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, dim, index, source = args[:4]
    dim %= tensor.ndim
    if isinstance(tensor, RaggedTensor) and tensor.along != dim:
        return NotImplemented
    buffer, source = _written(tensor, dim, index, source)
    add = torch.ops.aten.index_add.default
    found = add(buffer, dim, _places(index, tensor, dim), source, **kwargs)
    return _result(func, tensor, buffer, found)


@takes("scatter_add", "scatter_add_")
def _scatter_add(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, dim, index, source = args
    dim %= tensor.ndim
    if not isinstance(index, RaggedTensor) or index.along != dim:
        return NotImplemented
    buffer, source = _written(tensor, dim, index, source)
    room = source.shape[index.along]
    places = resized(_places(index, tensor, dim), index.along, room)
    found = torch.ops.aten.scatter_add.default(buffer, dim, places, source)
    return _result(func, tensor, buffer, found)


@takes("gather")
def _gather(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, dim, index = args[:3]
    dim %= tensor.ndim
    if not isinstance(index, RaggedTensor) or index.along != dim:
        return NotImplemented
    if isinstance(tensor, RaggedTensor) and tensor.along != dim:
        return NotImplemented
    found = func(plain(tensor), dim, _places(index, tensor, dim), *args[3:], **kwargs)
    return RaggedTensor(found, index.along, index.rows)
