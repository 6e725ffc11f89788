"""Operations on tensors of so many rows, by their layout rules.

What a rule says of a dim that is cut over devices, it says of rows: where a shard comes in and a
shard goes out, and nothing moves, each row of the result is computed of the same row, whatever lies
behind. So the buffers are computed with, and the result has as many rows. Where rows are added up
(a shard comes in, a pending sum goes out), those behind are made zeros first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from xla_dtensor.base.numbers.row_counts import CountNode, is_count
from xla_dtensor.base.source_line import user_line
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.base.torch_private.attributes import schema_of
from xla_dtensor.errors import DataDependentError
from xla_dtensor.plans.ops import info_of
from xla_dtensor.ragged.tensor import RaggedTensor, filled, refuse
from xla_dtensor.ragged.values import node_of, scalar, valid
from xla_dtensor.rules import TensorInfo, infer

# Operations whose sums over rows get nothing of rows of zeros.
_SUMS = frozenset(
    {
        *("sum", "nansum", "mm", "bmm", "mv", "dot", "vdot", "matmul", "linear"),
        *("native_layer_norm_backward", "_fused_rms_norm_backward", "embedding_dense_backward"),
    }
)
_DIVIDING = ("div", "remainder", "fmod")
WAY = (
    "What works are operations on each row, sums over rows, products, gathers and scatters by "
    "rows, split and cat; else compute in buffers of one size, with a mask (xd.row_exchange)"
)


def bound_of(number: Any) -> int:
    """What a number of rows is at most.

    Raises:
        DataDependentError: nothing says so.
    """
    most = node_of(number).most()
    if most is None:
        raise DataDependentError(
            f"a tensor of {node_of(number).str()} places, a number that is a value on the devices "
            f"(of tolist()), of which nothing says how large it is at most{user_line()}\nA program "
            "has room for a number of rows that is known: say torch._check(n <= most) of the "
            "number before. Of what all_to_all_single and split have been given it is known"
        )
    return most


def resized(buffer: Any, dim: int, bound: int) -> Any:
    """A buffer with another room for rows."""
    missing = bound - buffer.shape[dim]
    if missing <= 0:
        return buffer if missing == 0 else buffer.narrow(dim, 0, bound)
    shape = [missing if i == dim else n for i, n in enumerate(buffer.shape)]
    return torch.cat([buffer, buffer.new_zeros(shape)], dim)


def masked(tensor: RaggedTensor, value: float = 0) -> Any:
    """The buffer with ``value`` behind the rows."""
    buffer = filled(tensor)
    mask = valid(torch.SymInt(tensor.rows), buffer.shape[tensor.along], buffer.ndim, tensor.along)
    return torch.where(mask, buffer, torch.full((), value, dtype=buffer.dtype, device="xla"))


def ragged(buffer: Any, dim: int, rows: CountNode, copied: bool = False) -> Any:
    """A tensor of so many rows, or a plain one where it is known how many these are."""
    exact = rows.exact()
    if exact is not None:
        return resized(buffer, dim, exact)
    return RaggedTensor(buffer, dim, rows, copied)


def same_rows(tensors: list[RaggedTensor], name: str) -> CountNode:
    """How many rows all of them have.

    Raises:
        DataDependentError: it isn't known that these are as many.
    """
    first = tensors[0]
    for other in tensors[1:]:
        if first.rows.same(other.rows) is not True:
            refuse(
                first,
                f"{name} with another of {other.rows.str()} rows",
                "that these are as many is only known of numbers that are the same sum of entries "
                "of one tolist(): take both from that",
            )
    return first.rows


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Execute ``func`` by its rule.

    Raises:
        DataDependentError: the rule says that it isn't a matter of each row.
    """
    name = info_of(func).name
    numbers = [a.name for a in schema_of(func).arguments if str(a.type) == "number"]
    by_name = dict(zip((a.name for a in schema_of(func).arguments), args, strict=False))
    as_scalar = any(is_count({**by_name, **kwargs}.get(number)) for number in numbers)
    args, kwargs = _with_tensors(func, args, kwargs)
    if as_scalar:  # the overload that takes a tensor there
        return func.overloadpacket(*args, **kwargs)
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    own = [t for t in tensors if isinstance(t, RaggedTensor)]
    if not own:
        if any(map(is_count, pytree.tree_leaves((args, kwargs)))):
            raise DataDependentError(
                f"{name} with a number of rows that is a value on the devices (of tolist())"
                f"{user_line()}\n{WAY}"
            )
        return func(*args, **kwargs)  # the number is a tensor now
    if schema_of(func).is_mutable and any(t.copied for t in own):
        refuse(own[0], f"{name}, a write to a part", "a part of so many rows is a copy: clone() it")
    rows = same_rows(own, name)
    bound = min(filled(t).shape[t.along] for t in own)

    def buffer(t: Any, value: float | None = None) -> Any:
        if is_count(t):
            return bound if node_of(t).same(rows) else bound_of(t)
        if not isinstance(t, RaggedTensor):
            return t
        return resized(filled(t) if value is None else masked(t, value), t.along, bound)

    out_shapes, dims = _asked(func, args, kwargs, own, buffer, name)
    fill = 0 if any(isinstance(p, Partial) for p in dims) else None
    pointwise = torch.Tag.pointwise in func.tags

    mutable, divides = schema_of(func).is_mutable, any(word in name for word in _DIVIDING)

    def given(t: Any) -> Any:
        if not isinstance(t, RaggedTensor) or t.dtype.is_floating_point or mutable:
            return buffer(t, fill)
        # Where integers are looked at: indices, and what is divided by.
        return buffer(t, 1 if divides else fill if pointwise else 0)

    buffers, options = pytree.tree_map(given, (args, kwargs))
    results = func(*buffers, **options)
    flat = iter(zip(out_shapes, dims, strict=True))
    by_buffer = {id(filled(t)): t for t in own}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape, placement = next(flat)
        if id(value) in by_buffer:  # written in place
            return by_buffer[id(value)]
        if not isinstance(placement, Shard):
            return value
        dim, size = placement.dim, shape[placement.dim]
        return ragged(value, dim, _scaled(own[0], rows, size, bound, name))

    return pytree.tree_map(wrapped, results)


def _scaled(tensor: Any, rows: CountNode, size: int, bound: int, name: str) -> CountNode:
    """How many places of a result's dim are meant, where a view has taken others together."""
    if size == bound:
        return rows
    if not bound or size * _common(rows) % bound:
        refuse(tensor, f"{name}, which takes rows together", WAY)
    terms = {entry: n * size // bound for entry, n in rows.terms_of.items()}
    return CountNode(terms, rows.constant * size // bound)


def _common(rows: CountNode) -> int:
    """What divides the number whatever its entries are."""

    return math.gcd(*rows.terms_of.values(), rows.constant)


def _with_tensors(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments with each number of rows that is computed with (and is no size) as a tensor."""
    arguments = schema_of(func).arguments
    types = {a.name: str(a.type) for a in arguments}

    def taken(name: str, value: Any) -> Any:
        computed = types[name] in ("Tensor", "Optional[Tensor]", "number")
        return scalar(value) if computed and is_count(value) else value

    names = [a.name for a in arguments]
    args = [taken(name, value) for name, value in zip(names, args, strict=False)]
    return args, {name: taken(name, value) for name, value in kwargs.items()}


def _asked(
    func: Any, args: Any, kwargs: Any, own: list[RaggedTensor], buffer: Any, name: str
) -> tuple[list[Any], list[Any]]:
    """The results' shapes, and what the rule says of each: a `Shard` of rows, or a sum of them."""

    def shape_of(t: Any) -> Any:
        t = buffer(t)
        return torch.empty_like(t, device="meta") if isinstance(t, torch.Tensor) else t

    def info_of_tensor(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return buffer(t)
        placement = Shard(t.along) if isinstance(t, RaggedTensor) else Replicate()
        return TensorInfo(tuple(buffer(t).shape), (placement,), t.dtype)

    on_meta = {k: torch.device("meta") if k == "device" else v for k, v in kwargs.items()}
    try:
        metas = pytree.tree_leaves(
            func(*pytree.tree_map(shape_of, args), **pytree.tree_map(shape_of, on_meta))
        )
    except RuntimeError as error:  # also where torch has no formula of shapes
        return refuse(own[0], f"{name} ({error})", WAY)
    shapes = [tuple(t.shape) if isinstance(t, torch.Tensor) else None for t in metas]
    given = pytree.tree_map(info_of_tensor, (args, kwargs))
    said = infer(func, tuple(given[0]), given[1], shapes, (1,))
    if said is None or said.exchanges:
        return refuse(own[0], name, WAY)
    infos = [t for t in pytree.tree_leaves(given) if isinstance(t, TensorInfo)]
    if [t.placements for t in infos] != [tuple(p) for p in said.inputs]:
        refuse(own[0], name, WAY)
    outputs = [p for (p,) in said.outputs]
    for placement in outputs:
        if isinstance(placement, Shard):
            continue
        is_sum = isinstance(placement, Partial) and placement.reduce_op == "sum"
        if not is_sum or name.split("::")[1].split(".")[0].rstrip("_") not in _SUMS:
            refuse(own[0], name, WAY)
    return shapes, outputs


def unwrapped(tensor: Any) -> Any:
    """The buffer of a tensor of so many rows, zeros behind them; others as they are."""
    return masked(tensor) if isinstance(tensor, RaggedTensor) else tensor
