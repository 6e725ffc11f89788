"""Operations that are more than a matter of each row: gathers, scatters, parts, factories."""

from __future__ import annotations

import sys
from typing import Any

import torch

from xla_dtensor.base.numbers import row_comparisons
from xla_dtensor.base.numbers.row_counts import CountNode, is_count
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.errors import XlaDTensorError
from xla_dtensor.mesh.group import resolve_group
from xla_dtensor.plans.ops import info_of
from xla_dtensor.ragged import (
    by_index,  # noqa: F401  (registers handlers)
    by_rule,
    in_steps,
    parts,  # noqa: F401  (likewise)
)
from xla_dtensor.ragged.by_rule import (
    WAY,
    bound_of,
    masked,
    ragged,
    resized,
    same_rows,
)
from xla_dtensor.ragged.exchange import exchange
from xla_dtensor.ragged.handlers import HANDLERS, plain, takes
from xla_dtensor.ragged.on_host import CountsOnHost, stays
from xla_dtensor.ragged.tensor import RaggedTensor, filled, let_run, refuse
from xla_dtensor.ragged.values import (
    check_lengths,
    check_most,
    node_of,
    number_of,
    scalar,
    shown,
)

__all__ = ["check_most", "install", "on_host", "run", "shown", "stays"]

on_host = CountsOnHost


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Execute an overload that is given tensors of so many rows, or numbers of rows."""
    info = info_of(func)
    handler = HANDLERS.get(info.name) or HANDLERS.get(info.name.partition(".")[0])
    if handler is not None:
        found = handler(func, args, kwargs)
        if found is not NotImplemented:
            return found
    if info.composition is not None:
        try:
            return info.composition(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, XlaDTensorError):
                raise
            own = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, RaggedTensor)]
            if not own:
                raise
            refuse(own[0], f"{info.name} ({error})", WAY)
    return by_rule.run(func, args, kwargs)


def install() -> None:
    """Let them be executed."""
    row_comparisons.let(sys.modules[__name__])
    let_run(run)
    in_steps.install()


# --- collectives


@takes("_c10d_functional::all_to_all_single")
def _all_to_all(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor, outputs, inputs, group = args
    found = resolve_group(group)
    if found is None:
        return NotImplemented
    return exchange(tensor, outputs, inputs, found)


@takes("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "detach")
def _same(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    (tensor,) = args
    if tensor.buffer is None:
        refuse(tensor, "reading it", WAY)
    return RaggedTensor(tensor.buffer, tensor.along, tensor.rows, tensor.copied)


# --- factories


@takes("new_empty", "new_zeros", "new_ones", "new_full", "empty", "zeros", "ones", "full")
def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    of_tensor = info_of(func).name.startswith("aten::new_")
    sizes = list(args[1] if of_tensor else args[0])
    first = [plain(args[0])] if of_tensor else []
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
    check_lengths(known[dim : dim + 1], info_of(func).name)
    known[dim] = bound_of(known[dim])
    return RaggedTensor(func(*first, known, *rest, **kwargs), dim, rows)


@takes("arange.default", "arange.start", "arange.start_step")
def _arange(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    start, end, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    if step != 1 or is_count(start):
        return NotImplemented
    rows = node_of(end).sub(node_of(start))
    check_lengths([torch.SymInt(rows)], "arange")
    most = bound_of(torch.SymInt(rows))
    return ragged(torch.arange(start, start + most, **kwargs), 0, rows)


@takes("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
def _like(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    made = func(filled(tensor), *args[1:], **kwargs)
    return RaggedTensor(made, tensor.along, tensor.rows)


# --- views


@takes("expand")
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
    buffer = func(plain(tensor), sizes, **kwargs)
    if dim is None:
        return buffer
    assert rows is not None
    return RaggedTensor(buffer, dim, rows)


@takes("view", "_unsafe_view", "reshape")
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


# --- products by groups, running sums


@takes("_grouped_mm")
def _grouped_mm(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Rows behind the last offset are in no group."""
    left, right = args[:2]
    own = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, RaggedTensor)]
    rows = same_rows(own, "_grouped_mm")
    bound = min(filled(t).shape[t.along] for t in own)
    given = pytree.tree_map(
        lambda t: resized(masked(t), t.along, bound) if isinstance(t, RaggedTensor) else t,
        (args, kwargs),
    )
    found = func(*given[0], **given[1])
    by_rows = left.ndim == 2 and right.ndim == 3 and left.along == 0
    summed = left.ndim == 2 and right.ndim == 2 and len(own) == 2
    summed = summed and (left.along, right.along) == (1, 0)
    if not by_rows and not summed:
        refuse(own[0], "_grouped_mm with so many places of another dim", WAY)
    return RaggedTensor(found, 0, rows) if by_rows else found


@takes("mean")
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


@takes("cumsum", "cumprod")
def _running(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What comes behind a row is no part of it."""
    tensor = args[0]
    return RaggedTensor(func(filled(tensor), *args[1:], **kwargs), tensor.along, tensor.rows)
