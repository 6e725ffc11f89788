"""Advanced indexing, an index along a dim, masks, rows of embeddings.

Indices out of range are an error in torch (`bounds.py` says which). A compiled program cannot
raise, so here they read the nearest element, and their writes are dropped: XLA's own gather and
scatter semantics (`promise_in_bounds` adds no code, and XLA stays memory-safe). Gathers have batch
dims, which XLA partitions without communication; scatters must not (`partitioned/scatter.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering import context
from xla_dtensor.lowering.dims import along, wrap_dim
from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.ops.scatter import reduced, widened
from xla_dtensor.lowering.partitioned.gather import read_at
from xla_dtensor.lowering.partitioned.scatter import narrow, write
from xla_dtensor.lowering.registry import lowers

SHAPE_DEPENDS = (
    "the result's shape depends on the {0}'s values, and XLA programs have static shapes; "
    "{1}, or move the tensor to the CPU first"
)


def _wrapped(index: jax.Array, size: int) -> jax.Array:
    index = narrow(index, size)
    return jnp.where(index < 0, index + size, index)


def _method(dtype: Any, accumulate: bool) -> str:
    """The method of ``x.at[...]`` that sets, or accumulates, values of ``dtype``."""
    if not accumulate:
        return "set"
    return "max" if dtype.kind == "b" else "add"


# Advanced indexing ---------------------------------------------------------------------------


def _is_mask(index: jax.Array | None) -> bool:
    return index is not None and index.dtype in (bool, np.uint8)


def _index_tuple(x: jax.Array, indices: Sequence[jax.Array | None]) -> tuple[Any, ...]:
    return tuple(
        slice(None) if index is None else _wrapped(index, x.shape[dim])
        for dim, index in enumerate(indices)
    )


@lowers("index.Tensor", "_unsafe_index.Tensor")
def index(x: jax.Array, indices: Sequence[jax.Array | None]) -> jax.Array:
    if any(map(_is_mask, indices)):
        raise TypeError(
            "indexing with a boolean mask: "
            + SHAPE_DEPENDS.format("mask", "use torch.where, masked_fill or nonzero_static")
        )
    if all(i is None for i in indices):
        return x
    if x.size == 0 and 0 in [s for s, i in zip(x.shape, indices, strict=False) if i is not None]:
        shape = jax.eval_shape(lambda a: a[_index_tuple(a, indices)], x).shape
        return jnp.zeros(shape, x.dtype)
    at = [dim for dim, i in enumerate(indices) if i is not None]
    positions = _index_tuple(x, indices)
    if len(at) > 1 and at == [*range(at[0], at[0] + len(at))]:
        return read_at(x, at[0], [positions[dim] for dim in at])
    return x.at[positions].get(mode="promise_in_bounds", wrap_negative_indices=False)


@lowers("index_put", "_unsafe_index_put", "_index_put_impl")
def index_put(
    x: jax.Array,
    indices: Sequence[jax.Array | None],
    values: jax.Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> jax.Array:
    if values.dtype != x.dtype:
        raise RuntimeError(
            "Index put requires the source and destination dtypes match, got "
            f"{x.dtype} for the destination and {values.dtype} for the source."
        )
    if any(map(_is_mask, indices)):
        return _index_put_mask(x, indices, values, accumulate)
    if all(i is None for i in indices):
        values = jnp.broadcast_to(values, x.shape)
        return x + values if accumulate else values
    if x.size == 0:
        return x
    wide = widened(x.dtype) if accumulate else x.dtype
    method = _method(x.dtype, accumulate)
    return write(x.astype(wide), _index_tuple(x, indices), method, values.astype(wide))


def _index_put_mask(
    x: jax.Array, indices: Sequence[jax.Array | None], values: jax.Array, accumulate: bool
) -> jax.Array:
    """``x[:, mask] = values``: the mask decides where values go, not the result's shape."""
    masks = [(dim, i) for dim, i in enumerate(indices) if i is not None]
    if len(masks) > 1:
        raise TypeError(
            "index_put with a boolean mask beside other indices: "
            + SHAPE_DEPENDS.format("mask", "combine them into one mask")
        )
    ((start, mask),) = masks
    mask = mask.astype(bool)
    after = x.ndim - start - mask.ndim
    # The masked positions are one dim of the values, before the `after` last ones.
    at = values.ndim - after - 1
    if at >= 0 and values.shape[at] != 1:
        if values.shape[at] == 0:
            return x
        order = jnp.cumsum(mask.reshape(-1), dtype=np.int32).reshape(mask.shape) - 1
        values = jnp.take(values, jnp.clip(order, 0, values.shape[at] - 1), axis=at, mode="clip")
    elif at >= 0:
        values = values.reshape(*values.shape[:at], *[1] * mask.ndim, *values.shape[at + 1 :])
    mask = mask.reshape(*mask.shape, *[1] * after)
    written = x + values if accumulate else values
    return jnp.where(mask, written, x)


@lowers("_unsafe_masked_index")
def unsafe_masked_index(
    x: jax.Array, mask: jax.Array, indices: Sequence[jax.Array | None], fill: Any
) -> jax.Array:
    """Reads where ``mask`` holds; elsewhere the indices may be out of range."""
    return jnp.where(mask, index(x, _clamped(x, indices)), jnp.asarray(fill).astype(x.dtype))


@lowers("_unsafe_masked_index_put_accumulate")
def unsafe_masked_index_put_accumulate(
    x: jax.Array, mask: jax.Array, indices: Sequence[jax.Array | None], values: jax.Array
) -> jax.Array:
    values = jnp.where(mask, values, jnp.zeros((), values.dtype))
    return index_put(x, _clamped(x, indices), values, accumulate=True)


def _clamped(x: jax.Array, indices: Sequence[jax.Array | None]) -> list[jax.Array | None]:
    return [
        None if i is None else jnp.clip(i, 0, max(x.shape[dim] - 1, 0))
        for dim, i in enumerate(indices)
    ]


# One index tensor along one dim --------------------------------------------------------------


def _along_dim(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Lets ``function(x, dim, index, ...)`` assume 1 dim at least, a 1-d index, and dim >= 0."""

    def wrapper(x: jax.Array, dim: int, index: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        whole = x.reshape(1) if x.ndim == 0 else x
        index = narrow(jnp.atleast_1d(index), max(whole.shape))
        out = function(whole, wrap_dim(dim, x.ndim), index, *args, **kwargs)
        return out.reshape(x.shape) if x.ndim == 0 else out

    return wrapper


def _at(dim: int, index: jax.Array) -> tuple[Any, ...]:
    return (slice(None),) * dim + (index,)


@lowers("index_select")
@_along_dim
def index_select(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    if x.shape[dim] == 0:
        return jnp.zeros((*x.shape[:dim], index.size, *x.shape[dim + 1 :]), x.dtype)
    selected = x.at[_at(dim, index)]
    return selected.get(mode="promise_in_bounds", wrap_negative_indices=False)


@lowers("index_add")
@_along_dim
def index_add(
    x: jax.Array, dim: int, index: jax.Array, source: jax.Array, *, alpha: Any = 1
) -> jax.Array:
    source = source.reshape(_source_shape(x, dim, index))
    wide = widened(x.dtype)
    addend = source.astype(wide) * jnp.asarray(alpha).astype(wide)
    if x.dtype.kind == "b":
        return write(x, _at(dim, index), "max", addend.astype(bool))
    return write(x.astype(wide), _at(dim, index), "add", addend)


def _source_shape(x: jax.Array, dim: int, index: jax.Array) -> tuple[int, ...]:
    return (*x.shape[:dim], index.size, *x.shape[dim + 1 :])


@lowers("index_copy")
@_along_dim
def index_copy(x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    source = source.reshape(_source_shape(x, dim, index)).astype(x.dtype)
    return write(x, _at(dim, index), "set", source)


@lowers("index_fill.int_Scalar", "index_fill.int_Tensor")
@_along_dim
def index_fill(x: jax.Array, dim: int, index: jax.Array, value: Any) -> jax.Array:
    if x.shape[dim] == 0:
        return x
    # A mask along the dim is cheaper than a scatter, and partitions like a pointwise op.
    position = _wrapped(index, x.shape[dim])
    filled = write(jnp.zeros(x.shape[dim], bool), (position,), "set", jnp.asarray(True))
    filled = along(filled, dim, x.ndim)
    return jnp.where(filled, jnp.asarray(value).astype(x.dtype), x)


@lowers("index_reduce")
@_along_dim
def index_reduce(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    source = source.reshape(_source_shape(x, dim, index))
    update = lambda base, method, value: write(base, _at(dim, index), method, value)
    return reduced(x, source, reduce, include_self, update)


@lowers("take")
def take(x: jax.Array, index: jax.Array) -> jax.Array:
    if x.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    flat = x.reshape(-1).at[_wrapped(index, x.size)]
    return flat.get(mode="promise_in_bounds", wrap_negative_indices=False)


@lowers("put")
def put(x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    if index.size == 0:
        return x
    wide = widened(x.dtype) if accumulate else x.dtype
    source = source.reshape(index.shape).astype(wide)
    flat, position = x.reshape(-1).astype(wide), _wrapped(index, x.size)
    return write(flat, (position,), _method(x.dtype, accumulate), source).reshape(x.shape)


# Masks ---------------------------------------------------------------------------------------


def _order_in_mask(mask: jax.Array) -> jax.Array:
    """For each set element of ``mask``, how many are set before it (flat)."""
    return jnp.cumsum(mask.reshape(-1), dtype=np.int64) - 1


@lowers("masked_scatter")
def masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    mask, x = jnp.broadcast_arrays(mask, x)
    if source.size == 0:
        return x
    order = jnp.clip(_order_in_mask(mask), 0, source.size - 1)
    taken = source.reshape(-1).at[order].get(mode="promise_in_bounds").reshape(x.shape)
    return jnp.where(mask, taken.astype(x.dtype), x)


@lowers("masked_scatter_backward")
def masked_scatter_backward(grad: jax.Array, mask: jax.Array, sizes: Sequence[int]) -> jax.Array:
    mask = jnp.broadcast_to(mask, grad.shape)
    size = int(np.prod(sizes))
    target = jnp.where(mask.reshape(-1), _order_in_mask(mask), size)
    out = write(jnp.zeros(size, grad.dtype), (target,), "set", grad.reshape(-1))
    return out.reshape(tuple(sizes))


@lowers("nonzero_static")
def nonzero_static(x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    if x.ndim == 0:
        return jnp.zeros((size, 0), np.int64)
    if x.size == 0:
        return jnp.full((size, x.ndim), fill_value, np.int64)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=-1)


# Embedding -----------------------------------------------------------------------------------


@lowers("embedding")
def embedding(
    weight: jax.Array,
    indices: jax.Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    rows = weight.at[narrow(indices, weight.shape[0])]
    return rows.get(mode="promise_in_bounds", wrap_negative_indices=False)


@lowers("embedding_dense_backward")
def embedding_dense_backward(
    grad: jax.Array,
    indices: jax.Array,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> jax.Array:
    indices = narrow(indices, num_weights)
    # What devices exchange has the dtype in which it is added up. On TPUs that is the parameter's,
    # as it is in torch on the CPU, and in JAX: single precision moves twice the bytes.
    on_tpu = context.here().platform == "tpu"
    wide = grad if on_tpu else grad.astype(widened(grad.dtype))
    if scale_grad_by_freq:
        count = write(
            jnp.zeros(num_weights, wide.dtype),
            (indices,),
            "add",
            jnp.ones_like(indices, wide.dtype),
        )
        wide = wide / count[indices][..., None]
    if padding_idx >= 0:  # out of range, so its updates are dropped
        indices = jnp.where(indices == padding_idx, num_weights, indices)
    zeros = jnp.zeros((num_weights, grad.shape[-1]), wide.dtype)
    return write(zeros, (indices,), "add", wide)


are(
    Kind.GATHER,
    *("_unsafe_index.*", "embedding.*", "gather.*", "index.*", "index_select.*", "take.*"),
)
