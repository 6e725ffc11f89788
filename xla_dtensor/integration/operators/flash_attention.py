"""Attention over long sequences without storing the scores: operations, and their autograd.

Operations of their own: unlike ``scaled_dot_product_attention`` they give what the backward pass
needs in place of the probabilities, the logs of the rows' sums and, with dropout, its seed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from xla_dtensor.base.ours import is_ours
from xla_dtensor.integration.patching.calls import dispatched

LONG = 256 * 256
"""From so many pairs of queries and keys on. Below, one product of all is as fast or faster, and
its scores are small (docs/design.md)."""
LONG_FOR_CUDNN = 128 * 128
"""Likewise where cuDNN computes it."""
LARGEST_KNOWN = 2**28
"""Elements of a mask whose values are looked at."""


class Attention(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Queries, keys, values and the mask."""
        return self.query, self.key, self.value, self.attn_mask


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask"


def define(library: torch.library.Library) -> None:
    """Define the operations in ``library``."""
    library.define(f"flash_attention({_INPUTS}, bool is_causal, float scale) -> (Tensor, Tensor)")
    library.impl("flash_attention", _forward_meta, "Meta")
    library.define(
        f"flash_attention_dropout({_INPUTS}, float dropout_p, bool is_causal, float scale) "
        "-> (Tensor, Tensor, Tensor)",
        tags=(torch.Tag.nondeterministic_seeded,),
    )
    library.impl("flash_attention_dropout", _dropout_meta, "Meta")
    library.define(
        f"flash_attention_backward(Tensor grad_out, {_INPUTS}, Tensor out, Tensor log_sums, "
        "Tensor? seed, float dropout_p, bool is_causal, float scale, bool of_mask) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.impl("flash_attention_backward", _backward_meta, "Meta")


def count_flops(module: Any) -> None:
    """Tell ``FlopCounterMode`` of them."""
    ops = torch.ops.xla_dtensor

    def of_forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        scores = 2 * math.prod(query[:-1]) * key[-2]
        return scores * (query[-1] + value[-1])

    module.register_flop_formula([ops.flash_attention, ops.flash_attention_dropout])(of_forward)

    @module.register_flop_formula(ops.flash_attention_backward)
    def of_backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
        scores = 2 * math.prod(query[:-1]) * key[-2]
        return scores * (3 * query[-1] + 2 * value[-1])


def is_long(call: Attention) -> bool:
    """Whether the scores are so many that they shouldn't be materialised."""
    from xla_dtensor.lowering.attention import cudnn  # which imports JAX

    query, key = call.query, call.key
    if min(query.ndim, key.ndim) < 2:
        return False
    length, keys = int(query.shape[-2]), int(key.shape[-2])
    if length * keys >= LONG or length * keys < LONG_FOR_CUDNN:
        return length * keys >= LONG
    halves = query.dtype in (torch.float16, torch.bfloat16) and query.dtype is key.dtype
    if not halves or call.attn_mask is not None or call.dropout_p or call.value.ndim < 1:
        return False
    square = length == keys or not call.is_causal
    return square and cudnn.takes_widths(int(query.shape[-1]), int(call.value.shape[-1]))


def with_known_mask(call: Attention) -> Attention:
    """The call without its mask, where it is known what the mask says: that all keys are seen, or
    as many as queries, up to the query's own position (``is_causal``).

    Known are the values of masks that a compiled step makes of sizes alone, as transformers does in
    programs that are compiled. Platforms' kernels take no mask that is a tensor, and of a causal
    one they leave out half of the work. A rectangle's stays: kernels don't agree on what causal is
    there (`cudnn.takes`).
    """
    from xla_dtensor.forms.read import constant_recipe

    mask = call.attn_mask
    if mask is None or call.is_causal or mask.requires_grad or not is_ours(mask):
        return call
    if not 0 < mask.numel() <= LARGEST_KNOWN or not is_long(call._replace(attn_mask=None)):
        return call
    found, recipe = _same_batch(*call.tensors[:3], call.enable_gqa), constant_recipe(mask)
    if recipe is None or found is None or not _fits(mask, *found[:2]):
        return call
    seen = _seen(np.asarray(recipe()))  # not as a tensor, with which the step would compute
    if seen is None:
        return call
    if seen.all():
        return call._replace(attn_mask=None)
    length, keys = call.query.shape[-2], call.key.shape[-2]
    if length == keys and seen.shape[-2:] == (length, keys) and (seen == np.tri(length)).all():
        return call._replace(attn_mask=None, is_causal=True)
    return call


def _seen(mask: np.ndarray) -> Any:
    """Where keys are seen as they are, if they aren't seen at all elsewhere; else None. To what is
    added the lowest number is infinity: no score is as large."""
    if mask.dtype == np.bool_:
        return mask
    seen, hidden = mask == 0, mask <= ml_dtypes.finfo(mask.dtype).min
    return seen if (seen | hidden).all() else None


def attend(call: Attention) -> torch.Tensor | None:
    """``scaled_dot_product_attention`` of long sequences; None if it isn't for these arguments,
    or torch refuses them.

    Raises:
        RuntimeError: there is a mask and ``is_causal``.
    """
    refuse_two_masks(call.attn_mask, call.is_causal)
    query, key, value, attn_mask = call.tensors
    if query.ndim == 2 and key.ndim == 2 and value.ndim == 2:
        q, k, v = (x.unsqueeze(0) for x in (query, key, value))
        out = attend(call._replace(query=q, key=k, value=v, enable_gqa=False))
        return None if out is None else out.squeeze(0)
    found = _same_batch(query, key, value, call.enable_gqa)
    if found is None or not _fits(attn_mask, *found[:2]):
        return None
    query, key, value = found
    scale = 1 / math.sqrt(query.shape[-1]) if call.scale is None else call.scale
    return _FlashAttention.apply(
        query, key, value, attn_mask, call.dropout_p, call.is_causal, scale
    )


def refuse_two_masks(attn_mask: torch.Tensor | None, is_causal: bool) -> None:
    """Raise torch's error if there is a mask and ``is_causal``."""
    if attn_mask is not None and is_causal:
        raise RuntimeError(
            "scaled_dot_product_attention: explicit attn_mask should not be set when is_causal=True"
        )


def _same_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The three with the same leading dims, and heads of which the keys' divide the queries'."""
    tensors = (query, key, value)
    if min(t.ndim for t in tensors) < 3 or not query.is_floating_point():
        return None
    if len({t.dtype for t in tensors}) > 1 or query.shape[-1] != key.shape[-1]:
        return None
    if key.shape[-2] != value.shape[-2] or 0 in (*query.shape, *key.shape, *value.shape):
        return None
    own = [-3, -2, -1] if enable_gqa else [-2, -1]
    leads = [t.shape[: t.ndim - len(own)] for t in tensors]
    try:
        lead = torch.broadcast_shapes(*leads)
    except RuntimeError:
        return None
    query, key, value = (
        t if t.shape == (*lead, *t.shape[-len(own) :]) else t.expand(*lead, *t.shape[-len(own) :])
        for t in tensors
    )
    heads = key.shape[-3]
    return (
        (query, key, value) if heads == value.shape[-3] and query.shape[-3] % heads == 0 else None
    )


def _fits(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> bool:
    scores = (*query.shape[:-1], key.shape[-2])
    if mask is None:
        return True
    if mask.ndim > len(scores) or not (mask.dtype is torch.bool or mask.is_floating_point()):
        return False
    sizes = zip(mask.shape, scores[len(scores) - mask.ndim :], strict=True)
    return all(own in (1, size) for own, size in sizes)


class _FlashAttention(torch.autograd.Function):
    """Attention whose scores are computed again in backward, block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        dropout_p: float,
        is_causal: bool,
        scale: float,
    ) -> Any:
        ops = torch.ops.xla_dtensor
        inputs = (query, key, value, mask)
        seed = None
        if dropout_p == 0:
            out, log_sums = dispatched(ops.flash_attention.default, *inputs, is_causal, scale)
        else:
            op = ops.flash_attention_dropout.default
            out, log_sums, seed = dispatched(op, *inputs, dropout_p, is_causal, scale)
        ctx.save_for_backward(*inputs, out, log_sums, seed)
        ctx.options = dropout_p, is_causal, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        of_mask = ctx.needs_input_grad[3]
        op = torch.ops.xla_dtensor.flash_attention_backward.default
        *grads, grad_mask = dispatched(op, grad, *ctx.saved_tensors, *ctx.options, of_mask)
        return *grads, grad_mask if of_mask else None, None, None, None


def _forward_meta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    return out, query.new_empty(query.shape[:-1], dtype=wide)


def _dropout_meta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return *_forward_meta(query, key, value), query.new_empty((), dtype=torch.int64)


def _backward_meta(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    of_mask = attn_mask if rest[-1] and attn_mask is not None else query.new_empty(())
    return tuple(x.new_empty(x.shape) for x in (query, key, value, of_mask))
