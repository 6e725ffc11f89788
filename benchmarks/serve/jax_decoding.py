"""The same decoding as an expert writes it in JAX: the cache donated, the sampling in the program.

Weights are [out, in] and keyed as in the torch model's state_dict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from steps.jax_llama import apply_rope, feed_forward, linear, rms_norm, rope_angles

from serve.torch_decoding import COLUMNS, ROWS

Params = dict[str, Array]
State = dict[str, Any]


def attend(
    params: Params, state: State, layer: int, x_BSD: Array, rope: Any, head_dim: int
) -> tuple[Array, Array, Array]:
    visible_ST, cos, sin = rope
    B, S, _ = x_BSD.shape
    name = f"layers.{layer}.attention"
    heads = lambda kind: linear(params, f"{name}.{kind}", x_BSD).reshape(B, S, -1, head_dim)
    q_BSNH, k_BSKH = apply_rope(heads("wq"), cos, sin), apply_rope(heads("wk"), cos, sin)
    at = (0, 0, state["position"], 0)
    keys = lax.dynamic_update_slice(state["keys"][layer], k_BSKH.transpose(0, 2, 1, 3), at)
    values = lax.dynamic_update_slice(state["values"][layer], heads("wv").transpose(0, 2, 1, 3), at)
    # Queries that share a key head are rows of one product, so that nothing of the cache's length
    # is transposed: as einsums of [B, S, K, G, H] the step takes 1.2 times as long.
    q_BKGSH = q_BSNH.reshape(B, S, keys.shape[1], -1, head_dim).transpose(0, 2, 3, 1, 4)
    scores_BKGST = jnp.einsum("bkgsh,bkth->bkgst", q_BKGSH, keys) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(visible_ST, scores_BKGST, -jnp.inf), axis=-1)
    out_BKGSH = jnp.einsum("bkgst,bkth->bkgsh", weights, values)
    out_BSD = out_BKGSH.transpose(0, 3, 1, 2, 4).reshape(B, S, -1)
    return linear(params, f"{name}.wo", out_BSD), keys, values


def step(
    params: Params, state: State, tokens_BS: Array, *, config: Any, temperature: float
) -> tuple[State, Array]:
    position, length = state["position"], tokens_BS.shape[1]
    cos, sin = (lax.dynamic_slice_in_dim(t, position, length) for t in rope_angles(config))
    places_S = position + jnp.arange(length)
    visible_ST = jnp.arange(config.max_seq) <= places_S[:, None]
    norm = lambda name, x: rms_norm(x, params[f"{name}.weight"], config.norm_eps)
    x_BSD = params["tok_embeddings.weight"][tokens_BS]
    kept: tuple[list[Array], list[Array]] = [], []
    for i in range(config.layers):
        name = f"layers.{i}"
        normed = norm(f"{name}.attention_norm", x_BSD)
        out, keys, values = attend(
            params, state, i, normed, (visible_ST, cos, sin), config.head_dim
        )
        kept[0].append(keys)
        kept[1].append(values)
        x_BSD = x_BSD + out
        x_BSD = x_BSD + feed_forward(
            params, f"{name}.feed_forward", norm(f"{name}.ffn_norm", x_BSD)
        )
    logits_BV = linear(params, "output", norm("norm", x_BSD[:, -1]))
    key = state["key"]
    if temperature:
        key, drawn = jax.random.split(key)
        next_B = jax.random.categorical(drawn, logits_BV / temperature)
    else:
        next_B = jnp.argmax(logits_BV, -1)
    next_B1 = next_B[:, None].astype(jnp.int32)
    position = position + length
    tokens_BT = lax.dynamic_update_slice(state["tokens"], next_B1, (0, position))
    state = {"keys": kept[0], "values": kept[1], "tokens": tokens_BT}
    return {**state, "position": position, "key": key}, next_B1


class JaxDecoder:
    """Weights and state on the devices, and the compiled step; ``many`` tokens a call if asked."""

    def __init__(
        self,
        weights: dict[str, np.ndarray],
        config: Any,
        batch: int,
        temperature: float,
        devices: int,
    ) -> None:
        self.config, self.batch = config, batch
        self.mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
        spec = lambda name: (
            P("tp")
            if name.split(".")[-2] in COLUMNS
            else P(None, "tp")
            if name.split(".")[-2] in ROWS
            else P()
        )
        put = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec))
        self.params = {name: put(w, spec(name)) for name, w in weights.items()}
        self.put = put
        self.function: Callable[..., Any] = functools.partial(
            step, config=config, temperature=temperature
        )
        # The state goes out as it came in, so that it is donated.
        shardings = jax.tree.map(lambda x: x.sharding, self.start())
        self.step = jax.jit(
            self.function,
            donate_argnums=1,
            out_shardings=(shardings, NamedSharding(self.mesh, P())),
        )

        def many(params: Params, state: State, tokens: Array, count: int) -> tuple[State, Array]:
            one = lambda _, carried: self.function(params, *carried)
            return lax.fori_loop(0, count, one, (state, tokens))

        self.many = jax.jit(
            many,
            donate_argnums=1,
            static_argnums=3,
            out_shardings=(shardings, NamedSharding(self.mesh, P())),
        )

    def start(self) -> State:
        c = self.config
        shape = self.batch, c.kv_heads, c.max_seq, c.head_dim
        cache = lambda: [
            self.put(np.zeros(shape, np.float32), P(None, "tp")) for _ in range(c.layers)
        ]
        return {
            "keys": cache(),
            "values": cache(),
            "tokens": self.put(np.zeros((self.batch, c.max_seq), np.int32), P()),
            "position": self.put(np.int32(0), P()),
            "key": self.put(jax.random.key(0), P()),
        }
