"""Llama and Mixtral in plain torch: the model, and its training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pods.sizes import Sizes


class Linear(nn.Linear):
    """Computes in its input's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight, self.eps).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = Linear(sizes.dim, sizes.hidden, bias=False)
        self.w3 = Linear(sizes.dim, sizes.hidden, bias=False)
        self.w2 = Linear(sizes.hidden, sizes.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """Mixtral's, which take so many tokens of a sequence and no more.

    So do GShard's (Lepikhin et al. 2020). Dims: B batch, S sequence, D model, E experts, C
    capacity, F hidden, K experts of a token.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        D, E, F = sizes.dim, sizes.experts, sizes.hidden
        self.taken, self.capacity = sizes.taken, sizes.capacity
        self.router = nn.Linear(D, E, bias=False)
        self.w1_EDF = nn.Parameter(torch.empty(E, D, F))
        self.w3_EDF = nn.Parameter(torch.empty(E, D, F))
        self.w2_EFD = nn.Parameter(torch.empty(E, F, D))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        E, C, dtype = len(self.w1_EDF), self.capacity, x_BSD.dtype
        weight_BSK, expert_BSK = self.router(x_BSD.float()).topk(self.taken)
        # The first choices of all tokens stand in the queues of experts before the second ones.
        chosen_BKSE = F.one_hot(expert_BSK, E).transpose(1, 2)
        place_BKSE = chosen_BKSE.flatten(1, 2).cumsum(1).view_as(chosen_BKSE) - 1
        place_BKS = (place_BKSE * chosen_BKSE).sum(-1)
        kept_BKS = (place_BKS < C).to(dtype)
        slot_BKSC = F.one_hot(place_BKS.clamp(max=C - 1), C).to(dtype)
        gate_BKS = F.softmax(weight_BSK, -1).transpose(1, 2).to(dtype) * kept_BKS
        chosen_BKSE = chosen_BKSE.to(dtype)
        dispatch = torch.einsum("bkse,bksc->bsec", chosen_BKSE * kept_BKS[..., None], slot_BKSC)
        combine = torch.einsum("bkse,bksc->bsec", chosen_BKSE * gate_BKS[..., None], slot_BKSC)
        taken_EBCD = torch.einsum("bsec,bsd->ebcd", dispatch, x_BSD)
        gate_EBCF = torch.einsum("ebcd,edf->ebcf", taken_EBCD, self.w1_EDF.to(dtype))
        up_EBCF = torch.einsum("ebcd,edf->ebcf", taken_EBCD, self.w3_EDF.to(dtype))
        hidden_EBCF = F.silu(gate_EBCF) * up_EBCF
        given_EBCD = torch.einsum("ebcf,efd->ebcd", hidden_EBCF, self.w2_EFD.to(dtype))
        return torch.einsum("bsec,ebcd->bsd", combine, given_EBCD)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        linear = lambda i, o: Linear(i, o, bias=False)
        self.head, kv = sizes.head, sizes.kv_heads * sizes.head
        self.stream: Any = None  # the mesh and placements of the residual stream, once more
        self.attention_norm = RMSNorm(sizes.dim, eps=1e-5)
        self.wq, self.wo = linear(sizes.dim, sizes.dim), linear(sizes.dim, sizes.dim)
        self.wk, self.wv = linear(sizes.dim, kv), linear(sizes.dim, kv)
        self.ffn_norm = RMSNorm(sizes.dim, eps=1e-5)
        self.feed_forward = Experts(sizes) if sizes.experts else FeedForward(sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = self.laid_out(x + self.wo(out.transpose(1, 2).flatten(2)))
        return self.laid_out(x + self.feed_forward(self.ffn_norm(x)))

    def laid_out(self, x: Any) -> Any:
        return x if self.stream is None else x.redistribute(*self.stream)


def model_of(sizes: Sizes) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(sizes.vocab, sizes.dim),
            "layers": nn.ModuleList(Block(sizes) for _ in range(sizes.layers)),
            "norm": RMSNorm(sizes.dim, eps=1e-5),
            "output": Linear(sizes.dim, sizes.vocab, bias=False),
        }
    )


def in_turn(layers: nn.ModuleList, keep: bool) -> Callable[..., Any]:
    """One layer after the other; without ``keep`` each is computed again in backward."""

    def run(x: Any, cos: Any, sin: Any) -> Any:
        for layer in layers:
            if keep:
                x = layer(x, cos, sin)
            else:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
        return x

    return run


def step_of(
    model: Any, cos: Any, sin: Any, layers: Callable[..., Any], first: Callable[[Any], Any]
) -> Callable[..., Any]:
    """The training step.

    Args:
        model: `model_of`'s.
        cos, sin: of the positions' angles.
        layers: runs the model's layers.
        first: lays out what comes of the embedding.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(tokens: Any, targets: Any) -> Any:
        x = first(F.embedding(tokens, model["embedding"].weight.bfloat16()))
        logits = model["output"](model["norm"](layers(x, cos, sin))).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
