"""Scaled dot product attention as one composition, differentiated as a whole."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_dtensor.lowering import context
from xla_dtensor.lowering.attention.grouped_heads import BACKWARD_QUERY, FORWARD_QUERY, GroupedHeads
from xla_dtensor.lowering.kinds import Kind, are
from xla_dtensor.lowering.linalg.matmul import _precision
from xla_dtensor.lowering.promotion import math_dtype
from xla_dtensor.lowering.registry import lowers


def _contract(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum of two operands, accumulated and returned in the wider computation dtype."""
    wide = math_dtype(x.dtype)
    precision = _precision() if wide == x.dtype else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=wide)


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """The heads of ``x`` as [key/value head, query head of its group], groups of ``groups``."""
    *batch, heads, rows, cols = x.shape
    if heads == 1:  # a mask for all heads
        return x[..., None, :, :]
    return x.reshape(*batch, heads // groups, groups, rows, cols)


def _masked(scores: jax.Array, mask: jax.Array | None, is_causal: bool, first: Any) -> jax.Array:
    """``first``: the position of the first query."""
    if mask is not None and mask.dtype.kind == "b":
        scores = jnp.where(mask, scores, -jnp.inf)
    elif mask is not None:
        scores = scores + mask.astype(scores.dtype)
    if is_causal:  # aligned at the top left, as in torch, where lengths differ
        row, column = (lax.broadcasted_iota("int32", scores.shape[-2:], dim) for dim in (0, 1))
        visible = first + row >= column
        scores = jnp.where(visible, scores, -jnp.inf)
    return scores


def _softmax(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Probabilities and the log of their normaliser. A row that is masked throughout attends to
    nothing: zeros (and zero gradients), as in torch's ``_safe_softmax``."""
    # The maximum cancels out of the result, so no gradient has to go through it.
    highest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    highest = jnp.where(highest == -jnp.inf, 0, highest)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    log_total = lax.stop_gradient(jnp.log(total) + highest)
    return weights / jnp.where(total == 0, 1, total), log_total[..., 0]


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    keep: jax.Array | None = None,
    index: int = FORWARD_QUERY,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output, probabilities, and log-normalisers. ``keep`` scales probabilities (dropout);
    ``index`` is which of the tensor arguments the query is."""
    first = context.here().start(index, -2, q.shape[-2])
    own = GroupedHeads(q, k, index)
    k, v = own.take(k), own.take(v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    heads = q.shape[-3] if q.ndim > 2 else 1
    groups = 1
    if enable_gqa or own.own is not None:
        if k.shape[-3] != v.shape[-3] or heads % k.shape[-3]:
            raise ValueError(
                f"grouped query attention needs as many key as value heads, dividing the query "
                f"heads; got {heads} query, {k.shape[-3]} key and {v.shape[-3]} value heads"
            )
        groups = heads // k.shape[-3]
    if groups > 1:
        # A dim for the group, instead of copies of each key and value head.
        q, k, v = _grouped(q, groups), k[..., None, :, :], v[..., None, :, :]
        per_head = lambda x: x if x is None or x.ndim < 3 else _grouped(x, groups)
        mask, keep = per_head(mask), per_head(keep)
    scores = _contract("...le,...se->...ls", q, k) * jnp.asarray(scale, math_dtype(q.dtype))
    probabilities, log_total = _softmax(_masked(scores, mask, is_causal, first))
    weights = probabilities if keep is None else probabilities * keep
    out = _contract("...ls,...se->...le", weights.astype(v.dtype), v)
    if groups > 1:
        ungroup = lambda x, trailing: x.reshape(
            *x.shape[: -trailing - 2], heads, *x.shape[-trailing:]
        )
        out, probabilities = ungroup(out, 2), ungroup(probabilities, 2)
        log_total = ungroup(log_total, 1)
    return out, probabilities, log_total


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p > 0:
        raise NotImplementedError(
            "scaled_dot_product_attention with dropout_p > 0 has no fused lowering, which would "
            "need a random key; its decomposition (torch's math path) drops out"
        )


@lowers("scaled_dot_product_attention", symbolic_floats=True)
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Attention with a softmax in single precision at least; grouped key/value heads are not
    repeated."""
    _refuse_dropout(dropout_p)
    out = _attend(query, key, value, attn_mask, is_causal, scale, enable_gqa)[0]
    return out.astype(query.dtype)


def attention_backward(
    grad: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[jax.Array | None, ...]:
    """Gradients of `attention` for query, key, value and mask (None where the mask is boolean or
    absent). The forward is computed again, so nothing of size L x S is kept in between."""
    differentiable = attn_mask is not None and attn_mask.dtype.kind != "b"

    def forward(query: Any, key: Any, value: Any, mask: Any) -> jax.Array:
        mask = mask if differentiable else attn_mask
        tensors = (query, key, value)
        out = _attend(*tensors, mask, is_causal, scale, enable_gqa, index=BACKWARD_QUERY)[0]
        return out.astype(query.dtype)

    inputs = (query, key, value, attn_mask if differentiable else None)
    out, pullback = jax.vjp(forward, *inputs)
    return pullback(grad.astype(out.dtype))


# Overloads that torch's own dispatch chooses ---------------------------------------------------


@lowers("_scaled_dot_product_attention_math")
def attention_math(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[jax.Array, jax.Array]:
    keep = None
    if dropout_mask is not None:  # set where an element stays
        keep = dropout_mask.astype(math_dtype(query.dtype)) / (1 - dropout_p)
    else:
        _refuse_dropout(dropout_p)
    out, probabilities, _ = _attend(
        query, key, value, attn_mask, is_causal, scale, enable_gqa, keep
    )
    if dropout_mask is not None:
        probabilities = jnp.where(dropout_mask, probabilities, 0)
    return out, probabilities


@lowers("_scaled_dot_product_flash_attention_for_cpu")
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    _refuse_dropout(dropout_p)
    gqa = query.shape[-3] != key.shape[-3]
    out, _, log_total = _attend(query, key, value, attn_mask, is_causal, scale, gqa)
    return out, log_total


@lowers("_scaled_dot_product_flash_attention_for_cpu_backward")
def flash_attention_backward(
    grad_out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array | None, ...]:
    _refuse_dropout(dropout_p)
    gqa = query.shape[-3] != key.shape[-3]
    return attention_backward(grad_out, query, key, value, attn_mask, is_causal, scale, gqa)[:3]


@lowers("xla_dtensor::attention_backward", symbolic_floats=True)
def attention_backward_op(
    grad_out: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[jax.Array | None, ...]:
    """The gradients of query, key and value."""
    return attention_backward(grad_out, query, key, value, attn_mask, is_causal, scale, enable_gqa)[
        :3
    ]


_OVERLOADS = (
    "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "xla_dtensor::attention_backward",
)
are(Kind.PRODUCT, *_OVERLOADS)
# Its products are in batches, and their results nobody can pin.
are(Kind.CUT, *_OVERLOADS)
