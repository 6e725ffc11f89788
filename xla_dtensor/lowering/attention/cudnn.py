"""cuDNN's attention, for NVIDIA's GPUs, by JAX's own binding of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_dtensor.base import jax_private
from xla_dtensor.runtime import abstract

_DTYPES = (np.dtype(np.float16), np.dtype(jnp.bfloat16))
_AMPERE, _HOPPER = (8, 0), (9, 0)
_NONE = (0, 0)


def takes(query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, is_causal: bool) -> bool:
    """Whether cuDNN is there and computes this attention: in 16 bits, and without a mask that is a
    tensor.

    Args:
        query: ``[..., heads, L, E]``.
        key, value: ``[..., key heads, S, E]`` and ``[..., key heads, S, F]``.
        mask: of the scores, or None.
        is_causal: whether a query sees the keys up to its own position.
    """
    if mask is not None or query.dtype not in _DTYPES:
        return False
    # Of a rectangle cuDNN's versions don't agree on which keys are later ones.
    if is_causal and query.shape[-2] != key.shape[-2]:
        return False
    return takes_widths(query.shape[-1], value.shape[-1])


def takes_widths(keys: int, values: int) -> bool:
    """Whether cuDNN is there, and has attention of keys and values of these widths."""
    found = generation()
    # JAX's binding asks the process's own GPUs for these, whatever a program is for.
    wide = found >= _HOPPER and jax_private.fused_attention.check_compute_capability("9.0")
    widest = 256 if wide else 128
    return found >= _AMPERE and keys == values and keys % 8 == 0 and keys <= widest


def operations(equation: Any) -> int | None:
    """The floating-point operations of an equation that calls it, of those pairs of queries and
    keys that a causal mask leaves; None of others. Forward it is two products, backward five: the
    scores once more, and the gradients of these, of query, key and value."""
    products = _PRODUCTS.get(equation.primitive.name)
    if products is None:
        return None
    query, key = (variable.aval.shape for variable in equation.invars[:2])
    rows = -2 if equation.params["layout"] == _HEADS_FIRST else -3
    length, keys = query[rows], key[rows]
    pairs = length * keys
    if equation.params["mask_type"] == jax_private.fused_attention.MaskType.CAUSAL:
        pairs = length * (length + 1) // 2
    return products * 2 * math.prod(query) // length * pairs


def found_again(jaxpr: Any) -> set[int]:
    """The equations, by ``id``, that are there for `cudnn_backward` alone: XLA sees that they are
    those of the forward pass."""
    calls = [e for e in jaxpr.eqns if e.primitive.name in _PRODUCTS]
    backward = [e for e in calls if _PRODUCTS[e.primitive.name] == _BACKWARD]
    used = Counter(id(v) for e in jaxpr.eqns for v in e.invars)
    used.update(map(id, jaxpr.outvars))
    given = Counter(id(v) for e in backward for v in e.invars)
    return {id(e) for e in calls if (out := id(e.outvars[0])) in given and given[out] == used[out]}


_FORWARD, _BACKWARD = 2, 5
_PRODUCTS = {
    "dot_product_attention_fwd_wrapper": _FORWARD,
    "dot_product_attention_bwd_wrapper": _BACKWARD,
}
_HEADS_FIRST = 1
"""JAX's number of the layout ``[batch, heads, positions, width]``; the other one has heads behind
positions."""


def generation() -> tuple[int, int]:
    """The compute capability of the GPUs that programs are for, the process's own or those of
    ``xd.abstract``; (0, 0) where they aren't NVIDIA's, or cuDNN isn't there."""
    topology = abstract.current()
    try:
        jax_private.fused_attention.check_cudnn_version()
        devices = jax.devices("gpu") if topology is None else topology.devices
        major, _, minor = str(devices[0].compute_capability).partition(".")
    except RuntimeError:  # JAX's, of both
        return _NONE
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else _NONE


def cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, is_causal: bool, scale: Any
) -> tuple[jax.Array, jax.Array]:
    """The output ``[..., heads, L, F]``, and the logs of the rows' sums ``[..., heads, L]``.

    Args:
        query: ``[..., heads, L, E]``; key, value: with the same leading dims.
        is_causal: whether a query sees the keys up to its own position.
        scale: of the scores.
    """
    binding = jax_private.fused_attention
    if not isinstance(scale, float):  # traced; the kernel's is a constant
        query, scale = (query.astype(np.float32) * scale).astype(query.dtype), 1.0
    kind = binding.MaskType.CAUSAL if is_causal else binding.MaskType.NO_MASK
    tensors = [_even(x.reshape(-1, *x.shape[-3:])) for x in (query, key, value)]
    lengths = {}
    if not is_causal and tensors[1].shape[-2] != key.shape[-2]:
        kind = binding.MaskType.PADDING  # a causal mask hides the last key already
        lengths = {
            name: jnp.full(len(tensors[0]), x.shape[-2], np.int32)
            for name, x in (("q_seqlen", query), ("kv_seqlen", key))
        }
    out, log_sums = binding.dot_product_attention(
        *tensors, scale=scale, mask_type=kind, qkv_layout="BNTH", return_residual=True, **lengths
    )
    rows = slice(query.shape[-2])
    out, log_sums = out[..., rows, :], log_sums[..., rows]
    return out.reshape(query.shape), log_sums.reshape(query.shape[:-1])


def _even(x: jax.Array) -> jax.Array:
    """With one more position if they are odd: JAX's binding refuses odd lengths in backward, as it
    takes its own stand-in for a missing bias for one (``check_is_flash_attention``, JAX 0.9 to
    0.12)."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, x.shape[-2] % 2), (0, 0)))


def cudnn_backward(
    grad: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    log_sums: jax.Array,
    is_causal: bool,
    scale: Any,
) -> tuple[jax.Array, ...]:
    """The gradients of query, key and value. ``out`` and ``log_sums`` are computed once more, by a
    call that XLA sees to be the one of forward where both are in one computation."""
    pullback = jax.vjp(lambda q, k, v: cudnn(q, k, v, is_causal, scale), query, key, value)[1]
    found: tuple[jax.Array, ...] = pullback((grad.astype(out.dtype), jnp.zeros_like(log_sums)))
    return found
