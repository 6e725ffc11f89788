"""A byte-level Llama in plain torch: nothing here knows about devices or meshes.

Shape suffixes name the dims of an activation, in order: B batch, S sequence, D model dim,
N query heads, K key/value heads, H head dim, F feed-forward dim, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    dim: int = 128
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    max_seq: int = 128
    vocab: int = 256  # one token per byte value
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        """Feed-forward width: Llama's 8/3 of the model dim, rounded up to a multiple of 32."""
        return math.ceil(8 * self.dim / 3 / 32) * 32


def rope_angles(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """The cosine and sine tables of the rotary embedding, each [max_seq, head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.arange(config.max_seq, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_theta**-exponents)
    return angles.cos(), angles.sin()


def apply_rope(x_BSNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + H/2]) by their position's angle."""
    cos, sin = cos[:, None, :], sin[:, None, :]  # [S, 1, H/2]: the same for every head
    first, second = x_BSNH.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Causal attention; groups of query heads share a key/value head (GQA)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_BSNH = self.wq(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKH = self.wk(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKH = self.wv(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSNH = apply_rope(q_BSNH, cos, sin)
        k_BSKH = apply_rope(k_BSKH, cos, sin)
        out_BNSH = F.scaled_dot_product_attention(
            q_BSNH.transpose(1, 2),
            k_BSKH.transpose(1, 2),
            v_BSKH.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self.wo(out_BNSH.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        return x_BSD + self.feed_forward(self.ffn_norm(x_BSD))


class Llama(nn.Module):
    """Token ids [B, S] to next-token logits [B, S, V]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        cos, sin = rope_angles(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2's: std 0.02, less for the two projections that write to the residual stream."""
        residual_std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                into_residual = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(param, std=residual_std if into_residual else 0.02)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        seq = tokens_BS.shape[1]
        cos, sin = self.cos[:seq], self.sin[:seq]
        x_BSD = self.tok_embeddings(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, cos, sin)
        return self.output(self.norm(x_BSD))


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
