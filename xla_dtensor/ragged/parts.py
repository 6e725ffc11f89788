"""Parts of tensors by numbers of rows, and wholes of such parts."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base.numbers.row_counts import CountNode, is_count
from xla_dtensor.plans.ops import info_of
from xla_dtensor.ragged.by_rule import WAY, bound_of, ragged
from xla_dtensor.ragged.handlers import plain, takes
from xla_dtensor.ragged.tensor import RaggedTensor, filled, refuse
from xla_dtensor.ragged.values import check, check_lengths, node_of, number_of, scalar, vector


def _part(tensor: Any, dim: int, start: CountNode, rows: CountNode) -> Any:
    """``rows`` places of ``dim`` from ``start`` on: a copy."""
    buffer = plain(tensor)
    room = buffer.shape[dim]
    most = rows.most()
    most = room if most is None else min(most, room)
    rows.learn(room, exactly=False)
    places = torch.arange(most, device="xla") + scalar(torch.SymInt(start))
    found = buffer.index_select(dim, places.clamp(max=max(room - 1, 0)))
    return ragged(found, dim, rows, copied=True)


@takes("split_with_sizes", "split_with_sizes_copy", "unsafe_split_with_sizes")
def _split(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, sizes = args[:2]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % tensor.ndim
    if not any(map(is_count, sizes)):
        if isinstance(tensor, RaggedTensor) and dim == tensor.along:
            refuse(tensor, "split into parts of known sizes", WAY)
        return NotImplemented
    check_lengths(sizes, "split_with_sizes")
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


@takes("narrow")
def _narrow(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, dim, start, length = args
    return _cut(tensor, dim % tensor.ndim, node_of(start), node_of(length))


@takes("slice.Tensor")
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
        if not own:
            return func(tensor, dim, 0, 2**63 - 1)
        return RaggedTensor(filled(tensor), tensor.along, tensor.rows, tensor.copied)
    if step != 1 or any(not is_count(n) and n < 0 for n in (start, 0 if end is None else end)):
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


@takes("slice_backward", "select_backward")
def _put_back(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The gradient of a part, in zeros of the whole."""
    grad, sizes, dim, *where = args
    dim %= len(sizes)
    taken = info_of(func).name.startswith("aten::select")
    along = grad.along + (taken and dim <= grad.along) if isinstance(grad, RaggedTensor) else dim
    if along != dim:
        rows, buffer = grad.rows, filled(grad)
        sizes = [buffer.shape[grad.along] if i == along else n for i, n in enumerate(sizes)]
        return RaggedTensor(func(buffer, sizes, dim, *where), along, rows)
    if taken or where[2] != 1:
        return NotImplemented
    whole = grad.new_zeros(sizes)
    rows = grad.shape[dim]
    place = torch.arange(rows, device="xla") + (
        scalar(where[0]) if is_count(where[0]) else where[0]
    )
    return whole.index_add(dim, place, grad)


@takes("cat")
def _cat(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = list(args[0])
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % tensors[0].ndim
    own = [t for t in tensors if isinstance(t, RaggedTensor)]
    if not any(t.along == dim for t in own):
        return NotImplemented
    if any(t.along != dim for t in own):
        refuse(own[0], "cat with one that has so many places in another dim", WAY)
    rows = [t.rows if isinstance(t, RaggedTensor) else CountNode({}, t.shape[dim]) for t in tensors]
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


@takes("repeat_interleave.Tensor")
def _repeat_interleave(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    (repeats,) = args
    size = kwargs.get("output_size")
    if isinstance(repeats, RaggedTensor) or not is_count(size):
        tensor = repeats if isinstance(repeats, RaggedTensor) else None
        if tensor is None:
            return NotImplemented
        refuse(tensor, "repeat_interleave by so many counts", WAY)
    rows = node_of(size)
    check(repeats >= 0, "repeat_interleave: a count is negative")
    check(
        repeats.sum() == scalar(size), "repeat_interleave: output_size isn't the sum of the counts"
    )
    place = torch.arange(bound_of(size), device="xla")
    found = (place.unsqueeze(1) >= repeats.cumsum(0)).sum(1).clamp(max=len(repeats) - 1)
    return ragged(found, 0, rows)
