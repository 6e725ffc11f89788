"""The model and training step of examples/train_llama, written by hand in JAX: the baseline.

Nothing here uses torch or xla_dtensor, but weights are [out, in] and keyed as in the torch model's
state_dict, so that both sides start from the same numbers and are sharded alike. Shape suffixes
as in examples/train_llama/model.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Params = dict[str, Array]
TrainState = dict[str, Any]  # "params", AdamW's "mean" and "square" (as params), "step"


class Config(Protocol):
    """What is read of the torch model's ModelConfig."""

    dim: int
    layers: int
    max_seq: int
    head_dim: int
    norm_eps: float
    rope_theta: float


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW's defaults and formulas; the learning rate is an input of the step."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2


# --- model ------------------------------------------------------------------------------------


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


def logits(params: Params, tokens_BS: Array, config: Config) -> Array:
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


def loss_fn(params: Params, tokens_BS: Array, targets_BS: Array, config: Config) -> Array:
    log_probs_BSV = jax.nn.log_softmax(logits(params, tokens_BS, config))
    return -jnp.mean(jnp.take_along_axis(log_probs_BSV, targets_BS[..., None], axis=-1))


# --- optimizer --------------------------------------------------------------------------------


def clip_by_global_norm(grads: Params, max_norm: float) -> Params:
    """torch.nn.utils.clip_grad_norm_."""
    # Not vdot: it flattens, and XLA gathers each sharded gradient for that.
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return {name: grad * factor for name, grad in grads.items()}


def adamw_update(state: TrainState, grads: Params, lr: Array, adamw: AdamW) -> TrainState:
    step = state["step"] + 1
    correction1 = 1 - adamw.beta1**step
    correction2_sqrt = jnp.sqrt(1 - adamw.beta2**step)

    def update(param: Array, mean: Array, square: Array, grad: Array) -> tuple[Array, ...]:
        mean = adamw.beta1 * mean + (1 - adamw.beta1) * grad
        square = adamw.beta2 * square + (1 - adamw.beta2) * grad * grad
        scale = jnp.sqrt(square) / correction2_sqrt + adamw.eps
        param = param * (1 - lr * adamw.weight_decay) - lr / correction1 * mean / scale
        return param, mean, square

    new: TrainState = {"params": {}, "mean": {}, "square": {}, "step": step}
    for name, grad in grads.items():
        new["params"][name], new["mean"][name], new["square"][name] = update(
            state["params"][name], state["mean"][name], state["square"][name], grad
        )
    return new


def train_step(
    state: TrainState,
    tokens_BS: Array,
    targets_BS: Array,
    lr: Array,
    *,
    config: Config,
    adamw: AdamW,
    max_norm: float,
) -> tuple[TrainState, Array]:
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens_BS, targets_BS, config)
    return adamw_update(state, clip_by_global_norm(grads, max_norm), lr, adamw), loss


# --- sharding ---------------------------------------------------------------------------------


def state_shardings(specs: Mapping[str, P], mesh: Mesh) -> TrainState:
    params = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    scalar = NamedSharding(mesh, P())
    return {"params": params, "mean": params, "square": params, "step": scalar}


def init_state(params: Mapping[str, np.ndarray], shardings: TrainState) -> TrainState:
    """The given parameters and empty AdamW moments, on the devices."""

    def zeros() -> dict[str, np.ndarray]:
        return {name: np.zeros_like(param) for name, param in params.items()}

    step = np.zeros((), np.float32)
    state = {"params": dict(params), "mean": zeros(), "square": zeros(), "step": step}
    return jax.device_put(state, shardings)


def make_train_step(
    config: Config,
    shardings: TrainState,
    batch_sharding: NamedSharding,
    max_norm: float,
    adamw: AdamW | None = None,
) -> Callable[..., tuple[TrainState, Array]]:
    """The jitted step: (state, tokens, targets, lr) -> (state, loss), the state donated."""
    scalar = shardings["step"]
    return jax.jit(
        partial(train_step, config=config, adamw=adamw or AdamW(), max_norm=max_norm),
        in_shardings=(shardings, batch_sharding, batch_sharding, scalar),
        out_shardings=(shardings, scalar),
        donate_argnums=0,
    )
