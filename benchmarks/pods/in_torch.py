"""The training step in torch, planned for devices that aren't here."""

from __future__ import annotations

import collections
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from pods.sizes import Sizes, rope_angles


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


COLUMNS = ("wq", "wk", "wv", "w1", "w3")
# The dims of a weight that (dp, tp) shard. The table by vocabulary over tp.
DIMS = {
    **dict.fromkeys((*COLUMNS, "output"), (1, 0)),
    **dict.fromkeys(("wo", "w2"), (0, 1)),
    "embedding": (1, 0),
}
# Of a model with experts: those over the second dim of the mesh, all else as FSDP has it.
EXPERT_DIMS = {"w1_EDF": (1, 0), "w3_EDF": (1, 0), "w2_EFD": (2, 0)}


def planned(
    sizes: Sizes, topology: str, mesh_sizes: dict[str, int], save: str | None
) -> dict[str, Any]:
    with xd.abstract(topology):
        names = tuple(mesh_sizes)
        mesh = xd.init_device_mesh("xla", tuple(mesh_sizes.values()), mesh_dim_names=names)
        model = nn.ModuleDict(
            {
                "embedding": nn.Embedding(sizes.vocab, sizes.dim),
                "layers": nn.ModuleList(Block(sizes) for _ in range(sizes.layers)),
                "norm": RMSNorm(sizes.dim, eps=1e-5),
                "output": Linear(sizes.dim, sizes.vocab, bias=False),
            }
        )

        def shard(name: str, module: nn.Module, mesh: Any) -> None:
            name = name.rpartition(".")[2]
            for key, p in list(module.named_parameters(recurse=False)):
                dims = DIMS.get(name)
                if sizes.experts:
                    dims = EXPERT_DIMS.get(key, (0, 0) if p.ndim > 1 else None)
                where = [xd.Replicate()] * 2 if dims is None else [xd.Shard(d) for d in dims]
                if sizes.fully_shard and name in COLUMNS:  # each tp device's part over dp
                    where = [_StridedShard(0, split_factor=mesh.size(1)), xd.Shard(0)]
                laid_out = xd.distribute_tensor(p.data, mesh, where)
                module.register_parameter(key, nn.Parameter(laid_out))

        xd.distribute_module(model, mesh, shard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        replicated, rows = [xd.Replicate()] * 2, [xd.Shard(0), xd.Replicate()]
        if sizes.experts:
            rows = [xd.Shard(0)] * 2
        stream = rows
        if sizes.sequence_parallel:
            stream = [xd.Shard(0), xd.Shard(1)]
        if sizes.sequence_parallel or sizes.loop:
            for layer in model["layers"]:
                layer.stream = mesh, stream
        cos, sin = (xd.distribute_tensor(t, mesh, replicated) for t in rope_angles(sizes))

        def step(tokens: Any, targets: Any) -> Any:
            x = F.embedding(tokens, model["embedding"].weight.bfloat16())
            x = x.redistribute(mesh, stream)
            if sizes.loop:
                for layer in model["layers"]:
                    x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = xd.scan_layers(model["layers"], recompute=not sizes.keep)(x, cos, sin)
            logits = model["output"](model["norm"](x)).float()
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        batch = torch.zeros(sizes.rows(mesh_sizes), sizes.seq, dtype=torch.int32)
        tokens = xd.distribute_tensor(batch, mesh, rows)
        targets = xd.distribute_tensor(batch.long(), mesh, rows)
        report = xd.plan(step, tokens, targets, compiler_options=dict(sizes.options))
    if save:
        report.save(save)
    print(report)
    moved, counts = collections.Counter(), collections.Counter()
    for row in report.collectives:
        moved[row.kind] += row.bytes
        counts[row.kind] += row.count
    return {
        "memory": report.memory.needed,
        "temporaries": report.memory.temporaries,
        "flops": report.flops,
        "bytes": dict(moved),
        "counts": dict(counts),
    }
