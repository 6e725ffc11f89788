"""Operations that are more than a matter of each row: gathers, scatters, parts, factories."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_dtensor.base.numbers import row_counts
from xla_dtensor.base.numbers.row_counts import CountNode, is_count
from xla_dtensor.mesh.group import resolve_group
from xla_dtensor.plans.ops import info_of
from xla_dtensor.ragged import by_rule, in_steps
from xla_dtensor.ragged.by_rule import (
    WAY,
    bound_of,
    leaves_of,
    mapped,
    masked,
    ragged,
    resized,
    same_rows,
)
from xla_dtensor.ragged.exchange import exchange
from xla_dtensor.ragged.on_host import CountsOnHost, stays
from xla_dtensor.ragged.tensor import RaggedTensor, filled, let_run, refuse
from xla_dtensor.ragged.values import (
    check,
    check_most,
    node_of,
    number_of,
    scalar,
    shown,
    vector,
)

__all__ = ["check_most", "install", "on_host", "run", "shown", "stays"]

on_host = CountsOnHost

_HANDLERS: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {}


def _takes(*names: str) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        _HANDLERS.update({f"aten::{n}" if "::" not in n else n: function for n in names})
        return function

    return register


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Execute an overload that is given tensors of so many rows, or numbers of rows."""
    info = info_of(func)
    handler = _HANDLERS.get(info.name) or _HANDLERS.get(info.name.partition(".")[0])
    if handler is not None:
        found = handler(func, args, kwargs)
        if found is not NotImplemented:
            return found
    if info.composition is not None:
        return info.composition(*args, **kwargs)
    return by_rule.run(func, args, kwargs)


def install() -> None:
    """Let them be executed."""
    row_counts.let(sys.modules[__name__])
    let_run(run)
    in_steps.install()


# --- collectives -----------------------------------------------------------------------------------


@_takes("_c10d_functional::all_to_all_single")
def _all_to_all(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, outputs, inputs, group = args
    found = resolve_group(group)
    if found is None:
        return NotImplemented
    return exchange(tensor, outputs, inputs, found)


@_takes("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "detach")
def _same(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    (tensor,) = args
    if tensor.buffer is None:
        refuse(tensor, "reading it", WAY)
    return RaggedTensor(tensor.buffer, tensor.along, tensor.rows, tensor.copied)


# --- factories -------------------------------------------------------------------------------------


@_takes("new_empty", "new_zeros", "new_ones", "new_full", "empty", "zeros", "ones", "full")
def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    of_tensor = info_of(func).name.startswith("aten::new_")
    sizes = list(args[1] if of_tensor else args[0])
    first = [_plain(args[0])] if of_tensor else []
    rest = args[len(first) + 1 :]
    known = [number_of(n.node) if is_count(n) else n for n in sizes]
    places = [i for i, n in enumerate(known) if is_count(n)]
    if not places:
        return func(*first, known, *rest, **kwargs)
    if len(places) > 1:
        refuse(args[0], "a tensor of two dims of so many places", WAY)
    (dim,) = places
    rows = known[dim].node
    most = rows.most()
    if most is None and "empty" in info_of(func).name:
        like = func(*first, [1 if i == dim else n for i, n in enumerate(known)], *rest, **kwargs)
        return RaggedTensor(None, dim, rows, like=like)
    known[dim] = bound_of(known[dim])
    return RaggedTensor(func(*first, known, *rest, **kwargs), dim, rows)


@_takes("arange.default", "arange.start", "arange.start_step")
def _arange(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    start, end, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    if step != 1 or is_count(start):
        return NotImplemented
    rows = node_of(end).sub(node_of(start))
    most = bound_of(torch.SymInt(rows))
    return ragged(torch.arange(start, start + most, **kwargs), 0, rows)


@_takes("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
def _like(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    made = func(filled(tensor), *args[1:], **kwargs)
    return RaggedTensor(made, tensor.along, tensor.rows)


def _plain(tensor: Any) -> Any:
    if not isinstance(tensor, RaggedTensor):
        return tensor
    if tensor.buffer is None:
        return torch.empty((), dtype=tensor.dtype, device="xla")
    return tensor.buffer


# --- views -----------------------------------------------------------------------------------------


@_takes("expand")
def _expand(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, sizes = args[0], list(args[1])
    more = len(sizes) - tensor.ndim
    own = tensor.along + more if isinstance(tensor, RaggedTensor) else None
    rows = None if own is None else tensor.rows
    dim = own
    for i, size in enumerate(sizes):
        if not is_count(size):
            continue
        if i == own:
            sizes[i] = -1
        elif number_of(size.node).__class__ is int:
            sizes[i] = number_of(size.node)
        elif dim is not None:
            refuse(tensor, "expand to a second dim of so many places", WAY)
        else:
            dim, rows, sizes[i] = i, size.node, bound_of(size)
    buffer = func(_plain(tensor), sizes, **kwargs)
    if dim is None:
        return buffer
    assert rows is not None
    return RaggedTensor(buffer, dim, rows)


@_takes("view", "_unsafe_view", "reshape")
def _view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """With a number of rows among the sizes: it has to be that of the result."""
    tensor, sizes = args[0], list(args[1])
    places = [i for i, n in enumerate(sizes) if is_count(n)]
    if not places:
        return NotImplemented
    if not isinstance(tensor, RaggedTensor):
        return func(tensor, [number_of(n.node) if is_count(n) else n for n in sizes])
    (dim,) = places
    wanted = sizes[dim]
    sizes[dim] = -1
    others = [n for n in sizes if n != -1]
    if len(others) != len(sizes) - 1:
        refuse(tensor, "a view", WAY)
    found = by_rule.run(torch.ops.aten.view.default, (tensor, sizes), {})
    given = found.shape[dim]
    if node_of(given).same(node_of(wanted)) is not True:
        raise RuntimeError(f"shape {sizes} with {wanted} places is invalid for a {tensor!r}")
    return found


# --- parts and wholes ------------------------------------------------------------------------------


def _part(tensor: Any, dim: int, start: CountNode, rows: CountNode) -> Any:
    """``rows`` places of ``dim`` from ``start`` on: a copy."""
    buffer = _plain(tensor)
    room = buffer.shape[dim]
    most = rows.most()
    most = room if most is None else min(most, room)
    rows.learn(room, exactly=False)
    places = torch.arange(most, device="xla") + scalar(torch.SymInt(start))
    found = buffer.index_select(dim, places.clamp(max=max(room - 1, 0)))
    return ragged(found, dim, rows, copied=True)


@_takes("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes")
def _split(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, sizes = args[:2]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % tensor.ndim
    if not any(map(is_count, sizes)):
        if isinstance(tensor, RaggedTensor) and dim == tensor.along:
            refuse(tensor, "split into parts of known sizes", WAY)
        return NotImplemented
    start = CountNode({}, 0)
    parts = []
    for size in sizes:
        parts.append((start, node_of(size)))
        start = start.add(node_of(size))
    _check_rows(tensor, dim, start, "split_with_sizes: the sizes don't add up to the rows")
    return [_part(tensor, dim, begin, rows) for begin, rows in parts]


def _check_rows(tensor: Any, dim: int, total: CountNode, message: str) -> None:
    own = isinstance(tensor, RaggedTensor) and tensor.along == dim
    rows = tensor.rows if own else CountNode({}, tensor.shape[dim])
    same = rows.same(total)
    if same is False:
        raise RuntimeError(message)
    if same is None:
        check(scalar(number_of(total)) == scalar(number_of(rows)), message)
        total.is_the_same_as(rows)


@_takes("narrow")
def _narrow(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, dim, start, length = args
    return _cut(tensor, dim % tensor.ndim, node_of(start), node_of(length))


@_takes("slice.Tensor")
def _slice(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("self", "dim", "start", "end", "step"), args, strict=False)), **kwargs}
    tensor = given["self"]
    dim = given.get("dim", 0) % tensor.ndim
    start, end, step = given.get("start"), given.get("end"), given.get("step", 1)
    start = 0 if start is None else start
    own = isinstance(tensor, RaggedTensor) and tensor.along == dim
    if not own and not is_count(start) and not is_count(end):
        return NotImplemented
    rows = tensor.rows if own else CountNode({}, tensor.shape[dim])
    whole = end is None or (not is_count(end) and end >= 2**62)
    last = rows if whole else node_of(end)
    if step == 1 and node_of(start).exact() == 0 and last.same(rows):
        return func(tensor, dim, 0, 2**63 - 1) if not own else _same(func, (tensor,), {})
    if step != 1 or any(not is_count(n) and n < 0 for n in (start, 0 if whole else end)):
        refuse(tensor, f"[{start}:{end}:{step}]", WAY)
    return _cut(tensor, dim, node_of(start), last.sub(node_of(start)))


def _cut(tensor: Any, dim: int, start: CountNode, rows: CountNode) -> Any:
    own = isinstance(tensor, RaggedTensor) and tensor.along == dim
    total = tensor.rows if own else CountNode({}, tensor.shape[dim])
    end = start.add(rows)
    if end.same(total) is not True:
        fits = scalar(number_of(end)) <= scalar(number_of(total))
        fits = fits & (scalar(number_of(rows)) >= 0)
        check(fits, "a slice ends behind the last row")
    return _part(tensor, dim, start, rows)


@_takes("cat")
def _cat(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = list(args[0])
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % tensors[0].ndim
    own = [t for t in tensors if isinstance(t, RaggedTensor)]
    if not any(t.along == dim for t in own):
        return NotImplemented
    if any(t.along != dim for t in own):
        refuse(own[0], "cat with one that has so many places in another dim", WAY)
    rows = [
        t.rows if isinstance(t, RaggedTensor) else CountNode({}, t.shape[dim]) for t in tensors
    ]
    buffers = [filled(t) if isinstance(t, RaggedTensor) else t for t in tensors]
    room = [b.shape[dim] for b in buffers]
    total = CountNode({}, 0)
    for each in rows:
        total = total.add(each)
    most = total.most()
    most = sum(room) if most is None else min(most, sum(room))
    total.learn(most, exactly=False)
    ends = vector([number_of(each) for each in rows]).cumsum(0)
    begins = torch.tensor([sum(room[:i]) for i in range(len(room))], device="xla")
    place = torch.arange(most, device="xla")
    piece = (place.unsqueeze(1) >= ends).sum(1).clamp(max=len(room) - 1)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64, device="xla"), ends[:-1]])
    source = place - starts[piece] + begins[piece]
    found = torch.cat(buffers, dim).index_select(dim, source.clamp(max=max(sum(room) - 1, 0)))
    return ragged(found, dim, total)


@_takes("repeat_interleave.Tensor")
def _repeat_interleave(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    (repeats,) = args
    size = kwargs.get("output_size")
    if isinstance(repeats, RaggedTensor) or not is_count(size):
        tensor = repeats if isinstance(repeats, RaggedTensor) else None
        if tensor is None:
            return NotImplemented
        refuse(tensor, "repeat_interleave by so many counts", WAY)
    rows = size.node
    check(
        repeats.sum() == scalar(size), "repeat_interleave: output_size isn't the sum of the counts"
    )
    place = torch.arange(bound_of(size), device="xla")
    found = (place.unsqueeze(1) >= repeats.cumsum(0)).sum(1).clamp(max=len(repeats) - 1)
    return ragged(found, 0, rows)


# --- gathers and scatters --------------------------------------------------------------------------


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
    found = gather(_plain(tensor), _places(index, tensor, dim))
    if not isinstance(index, RaggedTensor):
        return found
    return RaggedTensor(found, dim + index.along, index.rows)


@_takes("index_select")
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


@_takes("index.Tensor")
def _index(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, indices = args
    dim, index = _one_index(tensor, indices)
    at = [*[None] * dim]
    return _gathered(tensor, dim, index, lambda t, i: func(t, [*at, i]))


@_takes("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
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
    return _plain(tensor), values


def _result(func: Any, tensor: Any, buffer: Any, found: Any) -> Any:
    """A new tensor, or the one that is written to."""
    ragged_tensor = isinstance(tensor, RaggedTensor)
    if info_of(func).mutated:
        if ragged_tensor and tensor.copied:
            refuse(tensor, "a write to a part", "a part of so many rows is a copy: clone() it")
        buffer.copy_(found)
        return tensor
    return RaggedTensor(found, tensor.along, tensor.rows) if ragged_tensor else found


@_takes("index_add", "index_add_")
def _index_add(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, dim, index, source = args[:4]
    dim %= tensor.ndim
    if isinstance(tensor, RaggedTensor) and tensor.along != dim:
        return NotImplemented
    buffer, source = _written(tensor, dim, index, source)
    add = torch.ops.aten.index_add.default
    found = add(buffer, dim, _places(index, tensor, dim), source, **kwargs)
    return _result(func, tensor, buffer, found)


@_takes("scatter_add", "scatter_add_")
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


@_takes("gather")
def _gather(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, dim, index = args[:3]
    dim %= tensor.ndim
    if not isinstance(index, RaggedTensor) or index.along != dim:
        return NotImplemented
    if isinstance(tensor, RaggedTensor) and tensor.along != dim:
        return NotImplemented
    found = func(_plain(tensor), dim, _places(index, tensor, dim), *args[3:], **kwargs)
    return RaggedTensor(found, index.along, index.rows)


# --- products by groups, running sums --------------------------------------------------------------


@_takes("_grouped_mm")
def _grouped_mm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Rows behind the last offset are in no group."""
    left, right = args[:2]
    own = [t for t in leaves_of((args, kwargs)) if isinstance(t, RaggedTensor)]
    rows = same_rows(own, "_grouped_mm")
    bound = min(filled(t).shape[t.along] for t in own)
    given = mapped(
        (list(args), kwargs),
        lambda t: resized(masked(t), t.along, bound) if isinstance(t, RaggedTensor) else t,
    )
    found = func(*given[0], **given[1])
    by_rows = left.ndim == 2 and right.ndim == 3 and left.along == 0
    summed = left.ndim == 2 and right.ndim == 2 and len(own) == 2
    summed = summed and (left.along, right.along) == (1, 0)
    if not by_rows and not summed:
        refuse(own[0], "_grouped_mm with so many places of another dim", WAY)
    return RaggedTensor(found, 0, rows) if by_rows else found


@_takes("mean")
def _mean(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A sum, divided by how many there are."""
    given = {**dict(zip(("self", "dim", "keepdim"), args, strict=False)), **kwargs}
    tensor, dims = given.pop("self"), given.pop("dim", None)
    dims = sorted(dim % tensor.ndim for dim in (dims or range(tensor.ndim)))
    if tensor.along not in dims:
        return NotImplemented
    total = by_rule.run(torch.ops.aten.sum.dim_IntList, (tensor, dims), given)
    count = CountNode({}, 1)
    for dim in dims:
        count = count.mul(tensor.rows if dim == tensor.along else CountNode({}, tensor.shape[dim]))
    return total / scalar(torch.SymInt(count)).to(total.dtype)


@_takes("cumsum", "cumprod")
def _running(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What comes behind a row is no part of it."""
    tensor = args[0]
    return RaggedTensor(func(filled(tensor), *args[1:], **kwargs), tensor.along, tensor.rows)
