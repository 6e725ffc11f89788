"""Every rule that Paddle registers by name has a counterpart here, for the torch op it stands for.

Seeds: ``rules.cc`` of Paddle's ``spmd_rules``. A name that is not in `ELSEWHERE` is the torch name.
"""

from __future__ import annotations

import pytest
import torch

from xla_dtensor.rules import find_rule

UNARY = """
    elementwise_unary assign hardswish mish relu6 swish acos acosh asin asinh atan atanh bernoulli
    bitwise_not ceil celu clip conj cos cosh digamma elu erf erfinv exp expm1 fill floor gelu
    hardshrink hardsigmoid hardtanh leaky_relu lgamma log log10 log1p log2 logical_not
    logit logsigmoid poisson pow reciprocal relu round rsqrt scale selu sigmoid sign silu sin sinh
    softplus softshrink softsign sqrt square stanh tan tanh tanh_shrink thresholded_relu trunc
    dropout label_smooth
"""
BINARY = """
    elementwise_binary add elementwise_add divide elementwise_div elementwise_pow floor_divide fmin
    fmax heaviside maximum minimum multiply elementwise_mul remainder subtract bitwise_and
    bitwise_or bitwise_xor logical_and logical_or logical_xor not_equal greater_than less_than
    swiglu fused_dropout_add
"""
OTHERS = """
    matmul matmul_v2 fused_linear_param_grad_add reduce_base all amax amin any frobenius_norm max
    reduce_max min prod sum reduce_sum squared_l2_norm logsumexp layer_norm fused_rms_norm
    flash_attention fused_rotary_position_embedding reshape reshape2 squeeze unsqueeze unsqueeze2
    flatten transpose transpose2 tile expand_as expand_as_v2 stack concat split split_with_num
    slice strided_slice unbind softmax log_softmax cross_entropy_with_softmax
    softmax_with_cross_entropy embedding lookup_table_v2 gather gather_nd scatter one_hot where
    triu tril_triu cumsum argmax add_n argmin argsort batch_norm group_norm instance_norm bmm cast
    conv2d conv2d_transpose conv3d depthwise_conv2d cummax cummin einsum expand full_like
    index_put index_select linear_v2 mean_all nonzero p_norm pad put_along_axis take_along_axis
    rms_norm roll topk unique check_finite_and_unscale adam adamw sgd fused_gemm_epilogue numel
"""

# The torch op that computes the same, where the names differ. Several: it is a composition.
ELSEWHERE = {
    "elementwise_unary": "neg",
    "assign": "clone",
    "swish": "silu",
    "relu6": "hardtanh",
    "clip": "clamp",
    "conj": "_conj",
    "logsigmoid": "log_sigmoid_forward",
    "scale": "mul.Scalar",
    "pow": "pow.Tensor_Scalar",
    "selu": "elu",
    "softsign": "abs div.Tensor",
    "square": "pow.Tensor_Scalar",
    "stanh": "tanh mul.Scalar",
    "tanh_shrink": "tanh sub.Tensor",
    "thresholded_relu": "threshold",
    "dropout": "native_dropout",
    "label_smooth": "mul.Scalar add.Tensor",
    "fill": "fill.Scalar",
    "elementwise_binary": "add.Tensor",
    "elementwise_add": "add.Tensor",
    "divide": "div.Tensor",
    "elementwise_div": "div.Tensor",
    "elementwise_pow": "pow.Tensor_Tensor",
    "multiply": "mul.Tensor",
    "elementwise_mul": "mul.Tensor",
    "subtract": "sub.Tensor",
    "add": "add.Tensor",
    "floor_divide": "floor_divide.Scalar",
    "remainder": "remainder.Tensor",
    "not_equal": "ne.Tensor",
    "greater_than": "gt.Tensor",
    "less_than": "lt.Tensor",
    "swiglu": "silu mul.Tensor",
    "fused_dropout_add": "native_dropout add.Tensor",
    "matmul_v2": "matmul",
    "fused_linear_param_grad_add": "mm add.Tensor sum.dim_IntList",
    "reduce_base": "sum.dim_IntList",
    "all": "all.dim",
    "any": "any.dim",
    "frobenius_norm": "linalg_vector_norm",
    "reduce_max": "amax",
    "max": "max.dim",
    "reduce_sum": "sum.dim_IntList",
    "sum": "sum.dim_IntList",
    "squared_l2_norm": "linalg_vector_norm mul.Tensor",
    "layer_norm": "native_layer_norm",
    "fused_rms_norm": "_fused_rms_norm",
    "rms_norm": "_fused_rms_norm",
    "flash_attention": "scaled_dot_product_attention _scaled_dot_product_flash_attention",
    "fused_rotary_position_embedding": "mul.Tensor neg cat add.Tensor",
    "reshape2": "reshape",
    "unsqueeze2": "unsqueeze",
    "flatten": "flatten.using_ints",
    "transpose": "permute",
    "transpose2": "permute",
    "expand_as_v2": "expand_as",
    "concat": "cat",
    "split": "split_with_sizes",
    "split_with_num": "chunk",
    "slice": "slice.Tensor",
    "strided_slice": "slice.Tensor",
    "unbind": "unbind.int",
    "softmax": "_softmax",
    "log_softmax": "_log_softmax",
    "cross_entropy_with_softmax": "_log_softmax nll_loss_forward",
    "softmax_with_cross_entropy": "_log_softmax nll_loss_forward",
    "lookup_table_v2": "embedding",
    "gather": "index_select",
    "gather_nd": "index.Tensor",
    "scatter": "index_put",
    "where": "where.self",
    "tril_triu": "tril",
    "add_n": "add.Tensor",
    "batch_norm": "native_batch_norm",
    "group_norm": "native_group_norm",
    "instance_norm": "native_batch_norm",
    "cast": "_to_copy",
    **dict.fromkeys(("conv2d", "conv2d_transpose", "conv3d", "depthwise_conv2d"), "convolution"),
    "linear_v2": "linear",
    "mean_all": "mean",
    "p_norm": "linalg_vector_norm",
    "pad": "constant_pad_nd",
    "put_along_axis": "scatter.src",
    "take_along_axis": "gather",
    "unique": "_unique2",
    "check_finite_and_unscale": "_amp_foreach_non_finite_check_and_unscale_",
    "adam": "_fused_adam_",
    "adamw": "_fused_adamw_",
    "sgd": "_fused_sgd_",
    "fused_gemm_epilogue": "_addmm_activation",
    "numel": "_local_scalar_dense",
}


@pytest.mark.parametrize("name", (UNARY + BINARY + OTHERS).split())
def test_the_name_has_a_rule(name):
    for op in ELSEWHERE.get(name, name).split():
        packet, _, overload = op.partition(".")
        found = getattr(torch.ops.aten, packet)
        chosen = overload or ("default" if "default" in found.overloads() else found.overloads()[0])
        assert find_rule(getattr(found, chosen)) is not None, op
