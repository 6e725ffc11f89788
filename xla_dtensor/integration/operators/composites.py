"""Kernels that keep composites of torch's (``linear``, attention) whole for XLA.

torch takes ``linear`` and attention apart before a backend sees them: batch dims are flattened into
one, grouped heads are copied, the scores go through a batched matmul. Each of those reshapes hides
from XLA's partitioner which dims belong together, and it answers with gathers. Kernels for the
``AutogradPrivateUse1`` key get hold of the composite first, for xla tensors alone; `below_autograd`
does where those aren't asked.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from xla_dtensor.base.ours import is_ours
from xla_dtensor.base.thread_state import is_in_blocks
from xla_dtensor.integration.distributed.context_parallel import causal_mask
from xla_dtensor.integration.operators import flash_attention, recurrent
from xla_dtensor.integration.operators.flash_attention import Attention
from xla_dtensor.integration.patching.calls import are_others, dispatched, is_transformed
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.tensors.saved_leaves import keep

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Define the operations and register the kernels."""
    own = torch.library.Library("xla_dtensor", "DEF")
    own.define("linear_weight_grad(Tensor grad_out, Tensor input) -> Tensor")
    own.impl("linear_weight_grad", _linear_weight_grad_meta, "Meta")
    own.define("linear_input_grad(Tensor grad_out, Tensor weight) -> Tensor")
    own.impl("linear_input_grad", _linear_input_grad_meta, "Meta")
    own.define(
        "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
        "Tensor? attn_mask, bool is_causal, float? scale, bool enable_gqa) "
        "-> (Tensor, Tensor, Tensor)"
    )
    own.impl("attention_backward", _attention_backward_meta, "Meta")
    flash_attention.define(own)
    recurrent.define(own)
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("linear", _linear, "AutogradPrivateUse1")
    aten.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    aten.impl("tensor_split.tensor_indices_or_sections", tensor_split, "AutogradPrivateUse1")
    aten.impl("one_hot", one_hot, "AutogradPrivateUse1")
    # With a kernel torch asks its own formula for the gradient of this one, and takes it apart
    # without. It is never run: our tensors' class dispatches before.
    aten.impl("_fused_rms_norm", _never_run, "PrivateUse1")
    aten.impl("rms_norm", rms_norm, "AutogradPrivateUse1")
    for name, kernel in recurrent.KERNELS.items():
        aten.impl(name, kernel, "AutogradPrivateUse1")
    _libraries.extend((own, aten))
    on_import("torch.utils.flop_counter", _count_flops)


def _count_flops(module: Any) -> None:
    """``FlopCounterMode`` takes apart what it doesn't know, which these can't be."""
    ops = torch.ops.xla_dtensor
    flash_attention.count_flops(module)
    recurrent.count_flops(module)

    @module.register_flop_formula(ops.linear_weight_grad)
    def of_weight_grad(grad_out: Any, input: Any, *_: Any, **__: Any) -> int:
        return 2 * math.prod(grad_out) * input[-1]

    @module.register_flop_formula(ops.linear_input_grad)
    def of_input_grad(grad_out: Any, weight: Any, *_: Any, **__: Any) -> int:
        return 2 * math.prod(grad_out) * weight[-1]

    @module.register_flop_formula(ops.attention_backward)
    def of_attention_backward(
        grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
    ) -> int:
        *batch, length, width = query
        scores = 2 * math.prod(batch) * length * key[-2]
        # The scores again, their gradient and the value's; the query's and the key's.
        return scores * (3 * width + 2 * value[-1])


def _check_leaves(name: str, *tensors: torch.Tensor | None) -> None:
    """Below an autograd function, dispatch can't tell whether gradients will be asked for."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and not is_ours(tensor):
                from xla_dtensor.dispatch import refuse_cpu_leaf

                refuse_cpu_leaf(name, tensor)


# --- tensor_split -----------------------------------------------------------------------------


def tensor_split(
    self: torch.Tensor, tensor_indices_or_sections: torch.Tensor, dim: int = 0
) -> list[torch.Tensor]:
    """``torch.tensor_split`` at places in a tensor, which torch reads on the CPU alone."""
    from xla_dtensor.dispatch.host_copies import to_cpu

    if is_ours(tensor_indices_or_sections):
        tensor_indices_or_sections = to_cpu(tensor_indices_or_sections)
    func = torch.ops.aten.tensor_split.tensor_indices_or_sections
    return func.decompose(self, tensor_indices_or_sections, dim)


# --- one_hot ----------------------------------------------------------------------------------


def one_hot(self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """``F.one_hot``, which refuses values as on the CPU; elsewhere torch looks at none."""
    from xla_dtensor.plans.conditions import look_at

    func = torch.ops.aten.one_hot.default
    look_at(func, (self, num_classes))
    if num_classes <= 0 or self.dtype is not torch.int64:
        return func.decompose(self, num_classes)
    # torch asserts the same again, which the kernel of a custom operation can't.
    classes = torch.arange(num_classes, device=self.device)
    return (self.unsqueeze(-1) == classes).to(torch.int64)


# --- rms_norm ---------------------------------------------------------------------------------


def _never_run(*args: Any) -> Any:
    raise NotImplementedError('tensors on "xla" dispatch before their backend\'s kernels')


def rms_norm(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """``F.rms_norm`` as one operation, forward and backward, where each row is on one device.

    Of rows that are cut torch's composition adds up the squares; the rule of the operation would
    gather them.
    """
    apart = rms_norm_apart(input, normalized_shape, weight, eps)
    if apart is not NotImplemented:
        return apart
    needed = weight is not None and weight.requires_grad and torch.is_grad_enabled()
    if needed and not input.requires_grad:
        # What torch computes with on a CPU doesn't save the input then, which may be written to.
        input = input.clone()
    return torch.ops.aten.rms_norm.default.decompose(input, normalized_shape, weight, eps)


def rms_norm_apart(
    input: torch.Tensor,
    normalized_shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """The same of rows that are cut, by torch's composition; else NotImplemented."""
    from xla_dtensor.plans.result_placements import has_users_rule
    from xla_dtensor.rules.merging import shard_dim

    fused, shape = torch.ops.aten._fused_rms_norm.default, tuple(normalized_shape)
    if is_in_blocks():
        return NotImplemented  # the composition rounds otherwise
    first = input.ndim - len(shape)
    placements: Any = getattr(input, "placements", ())
    if not any(d is not None and d >= first for d in map(shard_dim, placements)):
        return NotImplemented
    if input.shape[first:] != shape or (weight is not None and weight.shape != shape):
        return NotImplemented  # torch's whole function says what is wrong
    if has_users_rule(fused) or has_users_rule(torch.ops.aten.rms_norm.default):
        return NotImplemented
    return fused.decompose(input, normalized_shape, weight, eps)[0]


# --- linear -----------------------------------------------------------------------------------


def _linear_weight_grad_meta(grad_out: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return grad_out.new_empty(grad_out.shape[-1], input.shape[-1])


def _linear_input_grad_meta(grad_out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return grad_out.new_empty(*grad_out.shape[:-1], weight.shape[-1])


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    others = are_others(input, weight, bias)
    if others or input.ndim < 2 or weight.ndim != 2 or is_transformed():
        return torch.ops.aten.linear.default.decompose(input, weight, bias)
    _check_leaves("aten::linear", input, weight, bias)
    return _Linear.apply(input, weight, bias)


class _Linear(torch.autograd.Function):
    """``input @ weight.T + bias`` with all leading dims kept apart."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any) -> Any:
        # torch saves views of these two, each for the other's gradient.
        of_input, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
        ctx.kept = (
            keep(weight) if of_input else None,
            keep(input) if of_weight and input.ndim > 2 else None,
        )
        return dispatched(torch.ops.aten.linear.default, input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        input, weight = ctx.saved_tensors
        of_weight, of_input = ctx.kept
        weight = weight if of_weight is None else of_weight.of(weight)
        input = input if of_input is None else of_input.of(input)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        # Then of torch's operations: those of our own below have no gradient formulas.
        again = torch.is_grad_enabled()  # differentiated again
        # Not with weight.t(): where the weight is gathered for the forward pass, XLA would gather
        # the transposed one once more.
        if needs_input:
            of = torch.ops.xla_dtensor.linear_input_grad.default
            grad_input = F.linear(grad, weight.mH) if again else dispatched(of, grad, weight)
        if needs_weight and again:
            grad_weight = grad.flatten(0, -2).t() @ input.flatten(0, -2).conj()
        elif needs_weight:
            grad_weight = dispatched(torch.ops.xla_dtensor.linear_weight_grad.default, grad, input)
        if needs_bias:
            grad_bias = grad.sum(tuple(range(grad.ndim - 1)))
        return grad_input, grad_weight, grad_bias


# --- attention --------------------------------------------------------------------------------


def _attention_backward_meta(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if are_others(query, key, value, attn_mask):
        return torch.ops.aten.scaled_dot_product_attention.default.decompose(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    call = Attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    found = attention_otherwise(call)
    if found is not NotImplemented:
        return found
    own = 3 if enable_gqa else 2
    if any(t.shape[:-own] != query.shape[:-own] for t in (key, value)):
        return _attention_apart(call)
    _check_leaves("aten::scaled_dot_product_attention", *call.tensors)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    return _Attention.apply(*call.tensors, is_causal, scale, enable_gqa)


def attention_otherwise(call: Attention) -> Any:
    """Attention that isn't one operation of XLA's: of sequences that were dealt out, of long ones,
    and where torch takes it apart; else NotImplemented.

    Raises:
        RuntimeError: there is a mask and ``is_causal``.
    """
    query, key, value, attn_mask = call.tensors
    if call.is_causal:
        dealt_out = causal_mask(query, key, attn_mask)
        if dealt_out is not None:
            masked = call._replace(attn_mask=dealt_out, is_causal=False)
            return torch.ops.aten.scaled_dot_product_attention.default(**masked._asdict())
    transformed = is_transformed()
    if not transformed:
        known = flash_attention.with_known_mask(call)
        if flash_attention.is_long(known):
            _check_leaves("aten::scaled_dot_product_attention", *call.tensors)
            long = flash_attention.attend(known)
            if long is not None:
                return long
    mask_needs_grad = attn_mask is not None and attn_mask.requires_grad
    other_heads = call.enable_gqa and key.shape[-3:-2] != value.shape[-3:-2]
    if transformed or call.dropout_p > 0 or mask_needs_grad or query.ndim < 3 or other_heads:
        return _attention_apart(call)
    flash_attention.refuse_two_masks(attn_mask, call.is_causal)
    return NotImplemented


def _attention_apart(call: Attention) -> torch.Tensor:
    mask = call.attn_mask
    if mask is not None and mask.dtype is torch.bool:
        # It would be added as zeros and ones.
        mask = call.query.new_zeros(()).masked_fill(~mask, -math.inf)
    given = call._replace(attn_mask=mask)._asdict()
    return torch.ops.aten._scaled_dot_product_attention_math.default.decompose(**given)[0]


class _Attention(torch.autograd.Function):
    """Attention whose scores are computed again in backward; nothing of size L x S is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        is_causal: bool,
        scale: float,
        enable_gqa: bool,
    ) -> Any:
        saved = [query, key, value, mask]
        if query.ndim != 4 or query.shape[-1] != value.shape[-1]:
            # torch has no kernel for these, and what it computes with keeps scaled copies of all
            # but the values, which only the others' gradients need.
            copied = [0, 1, 3] if any(ctx.needs_input_grad[:2]) else [0, 1, 2, 3]
            saved = [t.clone() if i in copied and t is not None else t for i, t in enumerate(saved)]
        ctx.save_for_backward(*saved)
        ctx.options = is_causal, scale, enable_gqa
        return dispatched(
            torch.ops.aten.scaled_dot_product_attention.default,
            query,
            key,
            value,
            mask,
            0.0,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        query, key, value, mask = ctx.saved_tensors
        grads = dispatched(
            torch.ops.xla_dtensor.attention_backward.default,
            grad,
            query,
            key,
            value,
            mask,
            *ctx.options,
        )
        return *grads, None, None, None, None
