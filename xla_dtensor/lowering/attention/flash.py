"""Attention that keeps no scores: blocks anywhere, and the platform's kernel where it has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.lowering import context
from xla_dtensor.lowering.attention import cudnn, splash
from xla_dtensor.lowering.attention.blocked import Blocks
from xla_dtensor.lowering.attention.grouped_heads import BACKWARD_QUERY, FORWARD_QUERY, GroupedHeads
from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers


def _keep(
    seed: jax.Array, p: Any, at: context.Target, index: int, query: jax.Array, heads: int
) -> Callable[[Any, Any], jax.Array]:
    """Makes the function that gives a block's dropout factors.

    A factor depends on the seed and on its query's and key's position in the whole tensor, not in
    the shard, so that every mesh drops the same elements.
    """
    key = jax.random.wrap_key_data(
        jnp.stack([seed >> 32, seed & 0xFFFFFFFF]).astype(np.uint32), impl="threefry2x32"
    )
    fold = jnp.vectorize(jax.random.fold_in)
    keys = key
    shape, wide = query.shape, math_dtype(query.dtype)
    for dim, size in enumerate(shape[:-2]):
        position = at.start(index, dim, size) + jnp.arange(size, dtype=np.uint32)
        keys = fold(keys[..., None], position.astype(np.uint32))
    lead = math.prod(shape[:-3])
    keys = keys.reshape(lead, heads, shape[-3] // heads)

    def keep(rows: int, columns: int) -> Callable[[Any, Any], jax.Array]:
        def block(first_row: Any, column: Any) -> jax.Array:
            row = first_row + jnp.arange(rows, dtype=np.int32)
            own = fold(keys[..., None], row.astype(np.uint32))
            own = fold(own, jnp.asarray(column).astype(np.uint32))
            draw = lambda k: jax.random.bits(k, (columns,), np.uint32)
            for _ in range(own.ndim):
                draw = jax.vmap(draw)
            # 24 bits, which float32 has exactly, so that none is rounded up to 1.
            uniform = (draw(own) >> 8).astype(np.float32) * np.float32(2**-24)
            return jnp.where(uniform >= p, 1 / (1 - jnp.asarray(p, wide)), 0)

        return block

    return keep


def _blocks(
    tensors: tuple[jax.Array, jax.Array, jax.Array],
    mask: jax.Array | None,
    seed: jax.Array | None,
    p: Any,
    is_causal: bool,
    scale: Any,
    index: int,
) -> Blocks:
    at, query = context.here(), tensors[0]
    first = at.start(index, -2, query.shape[-2])
    blocks = Blocks(*tensors, mask, is_causal, scale, first)
    if seed is not None:
        keep = _keep(seed, p, at, index, query, blocks.groups[0])
        blocks.keep = keep(blocks.rows, blocks.columns)
    return blocks


class _Kernel(NamedTuple):
    """A platform's own attention. ``parts``: also of queries that are a device's part of those that
    a causal mask is for."""

    takes: Callable[..., bool]
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, ...]]
    parts: bool


_KERNELS = {
    "tpu": _Kernel(splash.takes, splash.splash, splash.splash_backward, parts=True),
    "gpu": _Kernel(cudnn.takes, cudnn.cudnn, cudnn.cudnn_backward, parts=False),
}


def _kernel(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, is_causal: bool, index: int
) -> _Kernel | None:
    """The platform's kernel, if it has one for this attention."""
    at = context.here()
    kernel = _KERNELS.get(at.platform)
    if kernel is None or not kernel.takes(query, key, value, mask, is_causal):
        return None
    whole = kernel.parts or not is_causal or at.part(index, -2) == context.WHOLE
    return kernel if whole else None


@lowers("xla_dtensor::flash_attention", symbolic_floats=True)
def flash_attention(query, key, value, attn_mask, is_causal, scale):
    """The output, and the logs of the rows' sums."""
    own = GroupedHeads(query, key, FORWARD_QUERY)
    key, value = own.take(key), own.take(value)
    kernel = _kernel(query, key, value, attn_mask, is_causal, FORWARD_QUERY)
    if kernel is not None:
        return kernel.forward(query, key, value, is_causal, scale)
    tensors = (query, key, value)
    return _blocks(tensors, attn_mask, None, 0, is_causal, scale, FORWARD_QUERY).forward()


@lowers("xla_dtensor::flash_attention_dropout", random=True, symbolic_floats=True)
def flash_attention_dropout(key_, query, key, value, attn_mask, dropout_p, is_causal, scale):
    """As `flash_attention`, and the seed of what was dropped."""
    words = jax.random.key_data(key_).astype(np.int64)
    seed = (words[0] << 32) | words[1]
    own = GroupedHeads(query, key, FORWARD_QUERY)
    tensors = (query, own.take(key), own.take(value))
    blocks = _blocks(tensors, attn_mask, seed, dropout_p, is_causal, scale, FORWARD_QUERY)
    return *blocks.forward(), seed


@lowers("xla_dtensor::flash_attention_backward", symbolic_floats=True)
def flash_attention_backward(
    grad_out,
    query,
    key,
    value,
    attn_mask,
    out,
    log_sums,
    seed,
    dropout_p,
    is_causal,
    scale,
    of_mask,
):
    """The gradients of query, key, value and, where asked for, of the mask."""
    own = GroupedHeads(query, key, BACKWARD_QUERY)
    tensors = (query, own.take(key), own.take(value))
    kernel = _kernel(*tensors, attn_mask, is_causal, BACKWARD_QUERY)
    grads: Sequence[jax.Array]
    grad_mask = None
    if seed is None and kernel is not None:
        grads = kernel.backward(grad_out, *tensors, out, log_sums, is_causal, scale)
    else:
        blocks = _blocks(tensors, attn_mask, seed, dropout_p, is_causal, scale, BACKWARD_QUERY)
        *grads, grad_mask = blocks.backward(grad_out, out, log_sums, of_mask)
    of_query, *of_keys = grads
    none = jnp.zeros((), query.dtype)
    return of_query, *map(own.put, of_keys), none if grad_mask is None else grad_mask


are(
    Kind.PRODUCT,
    "xla_dtensor::flash_attention",
    "xla_dtensor::flash_attention_dropout",
    "xla_dtensor::flash_attention_backward",
)
are(
    Kind.CUT,
    "xla_dtensor::flash_attention",
    "xla_dtensor::flash_attention_dropout",
    "xla_dtensor::flash_attention_backward",
)
