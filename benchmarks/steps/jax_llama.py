"""The model of examples/train_llama, written by hand in JAX: the baseline.

Nothing here uses torch or xla_dtensor, but weights are [out, in] and keyed as in the torch model's
state_dict, so that both sides start from the same numbers and are sharded alike. Shape suffixes
as in examples/train_llama/model.py.
"""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from steps.jax_training import Params


class Config(Protocol):
    """What is read of the torch model's ModelConfig."""

    dim: int
    layers: int
    max_seq: int
    head_dim: int
    norm_eps: float
    rope_theta: float


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope_angles(config: Config) -> tuple[Array, Array]:
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    positions = np.arange(config.max_seq, dtype=np.float32)
    angles = np.outer(positions, config.rope_theta**-exponents).astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_BSNH: Array, cos: Array, sin: Array) -> Array:
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = jnp.split(x_BSNH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def linear(params: Params, name: str, x: Array) -> Array:
    return jnp.einsum("...i,oi->...o", x, params[f"{name}.weight"])


def attention(
    params: Params, name: str, x_BSD: Array, head_dim: int, rope: tuple[Array, Array]
) -> Array:
    B, S, _ = x_BSD.shape
    q_BSNH = linear(params, f"{name}.wq", x_BSD).reshape(B, S, -1, head_dim)
    k_BSKH = linear(params, f"{name}.wk", x_BSD).reshape(B, S, -1, head_dim)
    v_BSKH = linear(params, f"{name}.wv", x_BSD).reshape(B, S, -1, head_dim)
    q_BSNH, k_BSKH = apply_rope(q_BSNH, *rope), apply_rope(k_BSKH, *rope)
    out_BSNH = jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, is_causal=True)
    return linear(params, f"{name}.wo", out_BSNH.reshape(B, S, -1))


def feed_forward(params: Params, name: str, x_BSD: Array) -> Array:
    gate_BSF = jax.nn.silu(linear(params, f"{name}.w1", x_BSD))
    return linear(params, f"{name}.w2", gate_BSF * linear(params, f"{name}.w3", x_BSD))


FeedForward = Callable[[Params, str, Array], Array]


def logits(
    params: Params, tokens_BS: Array, config: Config, feed_forward: FeedForward = feed_forward
) -> Array:
    cos, sin = rope_angles(config)
    rope = cos[: tokens_BS.shape[1]], sin[: tokens_BS.shape[1]]
    norm = lambda name, x: rms_norm(x, params[f"{name}.weight"], config.norm_eps)
    x_BSD = params["tok_embeddings.weight"][tokens_BS]
    for i in range(config.layers):
        layer = f"layers.{i}"
        normed_BSD = norm(f"{layer}.attention_norm", x_BSD)
        x_BSD += attention(params, f"{layer}.attention", normed_BSD, config.head_dim, rope)
        x_BSD += feed_forward(params, f"{layer}.feed_forward", norm(f"{layer}.ffn_norm", x_BSD))
    return linear(params, "output", norm("norm", x_BSD))


def next_token_loss(logits_BSV: Array, targets_BS: Array) -> Array:
    log_probs_BSV = jax.nn.log_softmax(logits_BSV)
    return -jnp.mean(jnp.take_along_axis(log_probs_BSV, targets_BS[..., None], axis=-1))
