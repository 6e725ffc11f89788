"""torch's fused attention and encoder layer operations, taken apart into plain ones.

In evaluation without gradients ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call
them on every out-of-tree device, and expect its backend to have a kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xla_dtensor.plans.ops import handles

# torch's `mask_type` of a mask that says which keys are padding; others are of the scores' shape.
_OF_KEYS = 1


@handles("aten::_nested_tensor_from_mask_left_aligned.default")
def _left_aligned(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """No: ``nn.TransformerEncoder`` then keeps its padding, as there are no nested tensors here."""
    return False


@handles("aten::_native_multi_head_attention.default")
def _native_multi_head_attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return _attention(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if mask is not None:
        if mask_type == _OF_KEYS:
            mask = mask[:, None, None, :]
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(mask, -math.inf)
        else:
            scores = scores + mask
    attention = scores.softmax(-1)
    out = F.linear((attention @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return out, None
    return out, attention.mean(1) if average_attn_weights else attention


@handles("aten::_transformer_encoder_layer_fwd.default")
def _transformer_encoder_layer(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return _encoder_layer(*args, **kwargs)


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        projections = qkv_weight, qkv_bias, proj_weight, proj_bias
        sizes = embed_dim, num_heads
        return _attention(x, x, x, *sizes, *projections, mask, False, True, mask_type)[0]

    def feed_forward(x: Tensor) -> Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else inner.relu(), ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        x = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)
