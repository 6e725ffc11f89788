"""Decoding in plain torch: a cache of fixed size, and a step that samples and writes the token.

The model is examples/train_llama's; nothing here knows of devices or meshes but `place`, which lays
weights and cache out. Shape suffixes as in its model.py, and T the cache's length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from model import Attention, Llama, ModelConfig, apply_rope
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

COLUMNS = ("wq", "wk", "wv", "w1", "w3", "output")  # cut along the dim that they give
ROWS = ("wo", "w2")  # cut along the one that they take


class Decoder(nn.Module):
    """A model with its cache, and where each sequence is: all that a step reads and writes."""

    def __init__(self, config: ModelConfig, batch: int, temperature: float = 0.0) -> None:
        super().__init__()
        self.model = Llama(config)
        self.temperature = temperature
        shape = batch, config.kv_heads, config.max_seq, config.head_dim
        zeros = lambda *shape, dtype=None: torch.zeros(shape, dtype=dtype)
        for i in range(config.layers):
            self.register_buffer(f"keys{i}", zeros(*shape))
            self.register_buffer(f"values{i}", zeros(*shape))
        self.register_buffer("tokens_BT", zeros(batch, config.max_seq, dtype=torch.long))
        self.register_buffer("position", zeros(1, dtype=torch.long))

    def attend(self, attention: Attention, layer: int, x_BSD: Tensor, rope: Any) -> Tensor:
        places_S, visible_ST, cos, sin = rope
        heads = lambda linear: linear(x_BSD).unflatten(-1, (-1, attention.head_dim))
        q_BSNH = apply_rope(heads(attention.wq), cos, sin)
        k_BSKH = apply_rope(heads(attention.wk), cos, sin)
        keys, values = getattr(self, f"keys{layer}"), getattr(self, f"values{layer}")
        keys.index_copy_(2, places_S, k_BSKH.transpose(1, 2))
        values.index_copy_(2, places_S, heads(attention.wv).transpose(1, 2))
        out_BNSH = F.scaled_dot_product_attention(
            q_BSNH.transpose(1, 2), keys, values, attn_mask=visible_ST, enable_gqa=True
        )
        return attention.wo(out_BNSH.transpose(1, 2).flatten(2))

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Of the last token, [B, V]; keys and values go into the cache."""
        model = self.model
        places_S = self.position + torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        visible_ST = (
            torch.arange(self.tokens_BT.shape[1], device=places_S.device) <= places_S[:, None]
        )
        rope = places_S, visible_ST, model.cos[places_S], model.sin[places_S]
        x_BSD = model.tok_embeddings(tokens_BS)
        for i, block in enumerate(model.layers):
            x_BSD = x_BSD + self.attend(block.attention, i, block.attention_norm(x_BSD), rope)
            x_BSD = x_BSD + block.feed_forward(block.ffn_norm(x_BSD))
        return model.output(model.norm(x_BSD[:, -1]))

    @torch.no_grad()
    def step(self, tokens_BS: Tensor) -> Tensor:
        """Take tokens in, and give the next one, [B, 1]: a prompt's first, and then one after the
        other."""
        logits_BV = self.logits(tokens_BS)
        if self.temperature:
            probabilities = torch.softmax(logits_BV / self.temperature, -1)
            next_B1 = torch.multinomial(probabilities, 1)
        else:
            next_B1 = logits_BV.argmax(-1, keepdim=True)
        self.position.add_(tokens_BS.shape[1])
        self.tokens_BT.index_copy_(1, self.position, next_B1)
        return next_B1


def place(decoder: Decoder, mesh: Any) -> Decoder:
    """Megatron's columns and rows over the only dim of the mesh; each device has its heads'
    cache."""

    def layout(name: str) -> list[Any]:
        kind = name.split(".")[-2] if name.endswith("weight") else name
        dim = 0 if kind in COLUMNS else 1 if kind in ROWS or kind[:4] in ("keys", "valu") else None
        return [Replicate() if dim is None else Shard(dim)]

    for module in decoder.modules():
        path = next(n for n, m in decoder.named_modules() if m is module)
        for name, p in list(module.named_parameters(path, recurse=False)):
            new = nn.Parameter(distribute_tensor(p.detach(), mesh, layout(name)))
            setattr(module, name.rpartition(".")[2], new)
        for name, b in list(module.named_buffers(path, recurse=False)):
            setattr(module, name.rpartition(".")[2], distribute_tensor(b, mesh, layout(name)))
    return decoder
