"""Transformers in plain torch, each with its twin in JAX: q, k and v apart or from one matrix, as
Llama is, with experts.

In torch nothing is said about layouts. The twin says of an activation what `Say` is given for; a
twin that is left alone has one that says nothing. Shape suffixes: B batch, S sequence, D model dim,
N query heads, K key heads, H head dim, F hidden dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import Array
from steps import moe
from steps.case import Batch
from steps.jax_llama import apply_rope, next_token_loss, rms_norm
from steps.jax_training import Params
from torch import Tensor, nn

from sweep.model import DENSE, Model, Residual, Say

EPS = 1e-5
BATCH, SEQ, VOCAB = 16, 128, 512


@dataclass(frozen=True)
class Config:
    """What kind of transformer it is.

    Args:
        kv_heads: heads of keys and values.
        fused: whether one matrix gives q, k and v.
        rotary: whether positions are rotary.
        learned: whether positions are learned.
        gated: SwiGLU instead of GELU.
        layer_norm: layer norms instead of RMS norms.
        experts: whether the MLPs are `steps.moe.Experts`.
        causal: whether a token sees the earlier ones alone.
        bias: whether the products of blocks have biases.
    """

    kv_heads: int = 8
    fused: bool = False
    rotary: bool = False
    learned: bool = False
    gated: bool = False
    layer_norm: bool = False
    experts: bool = False
    causal: bool = True
    bias: bool = False
    dim: int = 256
    heads: int = 8
    hidden: int = 1024
    layers: int = 2

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def norm(self) -> nn.Module:
        kind = nn.LayerNorm if self.layer_norm else nn.RMSNorm
        return kind(self.dim, eps=EPS)


def rotations(config: Config, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the rotary positions, each [seq, head_dim / 2]."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    angles = np.outer(np.arange(seq, dtype=np.float32), 10_000.0**-exponents).astype(np.float32)
    return np.cos(angles), np.sin(angles)


def rotated(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = x_BSNH.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        d, kv = config.dim, config.kv_heads * config.head_dim
        if config.fused:
            self.wqkv = nn.Linear(d, 3 * d, bias=config.bias)
        else:
            self.wq = nn.Linear(d, d, bias=config.bias)
            self.wk = nn.Linear(d, kv, bias=config.bias)
            self.wv = nn.Linear(d, kv, bias=config.bias)
        self.wo = nn.Linear(d, d, bias=config.bias)
        if config.rotary:
            cos, sin = rotations(config, SEQ)
            self.register_buffer("cos", torch.from_numpy(cos), persistent=False)
            self.register_buffer("sin", torch.from_numpy(sin), persistent=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        config = self.config
        if config.fused:
            q, k, v = self.wqkv(x_BSD).chunk(3, -1)
        else:
            q, k, v = self.wq(x_BSD), self.wk(x_BSD), self.wv(x_BSD)
        q_BSNH, k_BSKH, v_BSKH = (t.unflatten(-1, (-1, config.head_dim)) for t in (q, k, v))
        if config.rotary:
            q_BSNH = rotated(q_BSNH, self.cos, self.sin)
            k_BSKH = rotated(k_BSKH, self.cos, self.sin)
        out_BNSH = F.scaled_dot_product_attention(
            q_BSNH.transpose(1, 2),
            k_BSKH.transpose(1, 2),
            v_BSKH.transpose(1, 2),
            is_causal=config.causal,
            enable_gqa=config.kv_heads != config.heads,
        )
        return self.wo(out_BNSH.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=config.bias)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=config.bias)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=config.bias) if config.gated else None

    def forward(self, x: Tensor) -> Tensor:
        if self.w3 is not None:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.attention = config.norm(), Attention(config)
        self.mlp_norm = config.norm()
        self.mlp = moe.Experts() if config.experts else MLP(config)
        self.residual = Residual()

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual(x + self.attention(self.attention_norm(x)))
        return self.residual(x + self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    """Tokens [B, S] to logits [B, S, V]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, config.dim)
        self.position = nn.Embedding(SEQ, config.dim) if config.learned else None
        self.residual = Residual()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = config.norm()
        self.head = nn.Linear(config.dim, VOCAB, bias=False)
        initialize(self)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embedding(tokens_BS)
        if self.position is not None:
            x_BSD = x_BSD + self.position.weight
        x_BSD = self.residual(x_BSD)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(self.norm(x_BSD))


def initialize(model: nn.Module) -> None:
    """GPT-2's: standard deviation 0.02."""
    for param in model.parameters():
        if param.ndim == 2:
            nn.init.normal_(param, std=0.02)


ROLES = {
    **dict.fromkeys(("wqkv", "wq", "wk", "wv", "w1", "w3", "head"), "column"),
    **dict.fromkeys(("wo", "w2"), "row"),
    **dict.fromkeys(("embedding", "position"), "embedding"),
    "router": "matrix",
}
"""By the name of the module that a matrix belongs to."""


def role(name: str) -> str:
    """Of a parameter's name, one of `sweep.layouts.PARAMETERS`."""
    *_, module, kind = name.split(".")
    if kind in ("w1", "w2"):
        return "expert"
    found = ROLES.get(module, "vector")
    if kind == "bias":
        return "column bias" if found == "column" else "vector"
    return found


# --- the same in JAX --------------------------------------------------------------------------


def linear(params: Params, name: str, x: Array) -> Array:
    y = jnp.einsum("...i,oi->...o", x, params[f"{name}.weight"])
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def norm(params: Params, name: str, x: Array, config: Config) -> Array:
    if not config.layer_norm:
        return rms_norm(x, params[f"{name}.weight"], EPS)
    centred = x - jnp.mean(x, -1, keepdims=True)
    scaled = centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + EPS)
    return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]


def attention(params: Params, name: str, x_BSD: Array, config: Config, say: Say) -> Array:
    B, S, _ = x_BSD.shape
    if config.fused:
        q, k, v = jnp.split(linear(params, f"{name}.wqkv", x_BSD), 3, -1)
    else:
        q, k, v = (linear(params, f"{name}.{w}", x_BSD) for w in ("wq", "wk", "wv"))
    heads = (t.reshape(B, S, -1, config.head_dim) for t in (q, k, v))
    q_BSNH, k_BSKH, v_BSKH = (say("heads", t) for t in heads)
    if config.rotary:
        rope = rotations(config, S)
        q_BSNH, k_BSKH = apply_rope(q_BSNH, *rope), apply_rope(k_BSKH, *rope)
    out_BSNH = jax.nn.dot_product_attention(q_BSNH, k_BSKH, v_BSKH, is_causal=config.causal)
    out_BSNH = say("heads", out_BSNH)
    return linear(params, f"{name}.wo", out_BSNH.reshape(B, S, -1))


def mlp(params: Params, name: str, x: Array, config: Config, say: Say) -> Array:
    if config.experts:
        to_experts = lambda x_EBCD: say("expert's tokens", x_EBCD)
        # Said twice, because the gradient turns the other way round and is asked for the same.
        to_tokens = lambda x_EBCD: say("token's experts", to_experts(x_EBCD))
        return moe.jax_experts(params, name, say("router's input", x), to_experts, to_tokens)
    hidden = say("hidden", linear(params, f"{name}.w1", x))
    if config.gated:
        gated = say("hidden", linear(params, f"{name}.w3", x))
        return linear(params, f"{name}.w2", jax.nn.silu(hidden) * gated)
    return linear(params, f"{name}.w2", jax.nn.gelu(hidden, approximate=False))


def block(params: Params, name: str, x: Array, config: Config, say: Say) -> Array:
    normed = norm(params, f"{name}.attention_norm", x, config)
    x = say("stream", x + attention(params, f"{name}.attention", normed, config, say))
    normed = norm(params, f"{name}.mlp_norm", x, config)
    return say("stream", x + mlp(params, f"{name}.mlp", normed, config, say))


def model(config: Config) -> Model:
    """A transformer over tokens, which learns the next one."""
    layouts = (*DENSE, "ep") if config.experts else DENSE

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Transformer(config)

    def make_batches(count: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(0)
        draw = lambda: torch.randint(VOCAB, (BATCH, SEQ), generator=generator)
        return [(draw(), draw()) for _ in range(count)]

    def loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())

    def jax_loss(say: Say) -> Callable[..., tuple[Array, Params]]:
        def of(
            params: Params, buffers: Params, tokens_BS: Array, targets_BS: Array
        ) -> tuple[Array, Params]:
            x_BSD = params["embedding.weight"][tokens_BS]
            if config.learned:
                x_BSD = x_BSD + params["position.weight"]
            x_BSD = say("stream", x_BSD)
            for i in range(config.layers):
                x_BSD = block(params, f"layers.{i}", x_BSD, config, say)
            logits_BSV = linear(params, "head", norm(params, "norm", x_BSD, config))
            return next_token_loss(logits_BSV, targets_BS), {}

        return of

    return Model(make, make_batches, loss, role, jax_loss, layouts)
