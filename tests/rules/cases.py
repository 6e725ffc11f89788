"""The calls whose placements are compared with torch's."""

from __future__ import annotations

import torch

from tests.rules.torch_truth import Case, T

aten = torch.ops.aten
X = T((16, 8))
Y = T((16, 8))
ROW = T((8,))
CUBE = T((8, 16, 8))
INDEX = T((16, 8), torch.int64, ())
MASK = T((16, 8), torch.bool, ())
ANY = ("sum", "avg", "max", "min")
XP = T((16, 8), partials=ANY)
YP = T((16, 8), partials=ANY)


IMAGE = T((8, 16, 8, 8))
WEIGHT = T((16, 16, 1, 1))
CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
SEED = T((2,), torch.int64, (), ())
QKV = T((8, 8, 16, 8), partials=(), dims=(0, 1))
HEADS = T((8, 8, 16), partials=(), dims=(0, 1))


def unary(*names: str) -> list[Case]:
    return [Case(name, getattr(aten, name).default, (XP,)) for name in names]


POINTWISE = [
    *unary("relu", "gelu", "silu", "neg", "exp", "sigmoid", "abs", "sqrt", "erfc", "positive"),
    Case("add", aten.add.Tensor, (XP, YP)),
    Case("sub", aten.sub.Tensor, (XP, YP)),
    Case("mul", aten.mul.Tensor, (XP, YP)),
    Case("div", aten.div.Tensor, (XP, YP)),
    Case("add-row", aten.add.Tensor, (X, ROW)),
    Case("mul-ones", aten.mul.Tensor, (X, T((16, 1)))),
    Case("mul-scalar", aten.mul.Tensor, (XP, 2.0)),
    Case("add-scalar", aten.add.Tensor, (XP, 2.0)),
    Case("div-scalar", aten.div.Tensor, (XP, 2.0)),
    Case("div-floor", aten.div.Tensor_mode, (X, Y), {"rounding_mode": "floor"}),
    Case("pow-scalar", aten.pow.Tensor_Scalar, (X, 2.0)),
    Case("maximum", aten.maximum.default, (XP, YP)),
    Case("minimum", aten.minimum.default, (XP, YP)),
    Case("logaddexp", aten.logaddexp.default, (XP, YP)),
    Case("eq", aten.eq.Tensor, (X, Y)),
    Case("gt-scalar", aten.gt.Scalar, (X, 0.0)),
    Case("where", aten.where.self, (MASK, X, Y)),
    Case("clamp", aten.clamp.default, (X, 0.0, 1.0)),
    Case("masked_fill", aten.masked_fill.Scalar, (X, MASK, 0.0)),
    Case("addcmul", aten.addcmul.default, (X, Y, ROW)),
    Case("lerp", aten.lerp.Scalar, (X, Y, 0.5)),
    Case("clone", aten.clone.default, (XP,)),
    Case("detach", aten.detach.default, (XP,)),
    Case("to_int", aten._to_copy.default, (XP,), {"dtype": torch.int32}),
    Case("to_bf16", aten._to_copy.default, (XP,), {"dtype": torch.bfloat16}),
    Case("gelu_backward", aten.gelu_backward.default, (X, Y)),
    Case("threshold_backward", aten.threshold_backward.default, (X, Y, 0)),
    Case("foreach_add", aten._foreach_add.List, ([X, CUBE], [Y, CUBE])),
    Case("foreach_mul", aten._foreach_mul.Scalar, ([XP, CUBE], 2.0)),
    Case("foreach_sqrt", aten._foreach_sqrt.default, ([X, CUBE],)),
]

REDUCTIONS = [
    Case("sum", aten.sum.default, (XP,)),
    Case("sum-0", aten.sum.dim_IntList, (XP, [0])),
    Case("sum-1-keep", aten.sum.dim_IntList, (X, [-1], True)),
    Case("mean", aten.mean.default, (XP,)),
    Case("mean-0", aten.mean.dim, (CUBE, [0])),
    Case("mean-1-keep", aten.mean.dim, (CUBE, [1, 2], True)),
    Case("amax", aten.amax.default, (XP, [0])),
    Case("amin-keep", aten.amin.default, (XP, [1], True)),
    Case("max", aten.max.default, (XP,)),
    Case("max-dim", aten.max.dim, (X, 0)),
    Case("min-dim-keep", aten.min.dim, (CUBE, 1, True)),
    Case("prod", aten.prod.dim_int, (X, 0)),
    Case("all", aten.all.dim, (MASK, 1)),
    Case("any", aten.any.default, (MASK,)),
    Case("argmax", aten.argmax.default, (X, 1)),
    Case("argmin-all", aten.argmin.default, (X,)),
    Case("var", aten.var.correction, (X, [1]), {"correction": 1}),
    Case("var_mean", aten.var_mean.correction, (X, [0]), {"correction": 1, "keepdim": True}),
    Case("logsumexp", aten.logsumexp.default, (X, [1])),
    Case("norm", aten.linalg_vector_norm.default, (X,)),
    Case("norm-inf", aten.linalg_vector_norm.default, (X, float("inf"), [0])),
    Case("norm-3-keep", aten.linalg_vector_norm.default, (CUBE, 3, [1], True)),
    Case("foreach_norm", aten._foreach_norm.Scalar, ([X, CUBE], 2)),
    Case("median", aten.median.dim, (X, 1)),
]

MATMULS = [
    Case("mm", aten.mm.default, (T((16, 8)), T((8, 32)))),
    Case("mm-tall", aten.mm.default, (T((4096, 8)), T((8, 8)))),
    Case("bmm", aten.bmm.default, (T((8, 16, 8)), T((8, 8, 32)))),
    Case("addmm", aten.addmm.default, (T((32,)), T((16, 8)), T((8, 32)))),
    Case("addmm-2d", aten.addmm.default, (T((16, 32)), T((16, 8)), T((8, 32)))),
    Case("baddbmm", aten.baddbmm.default, (T((8, 16, 32)), T((8, 16, 8)), T((8, 8, 32)))),
    Case("dot", aten.dot.default, (T((16,)), T((16,)))),
]

VIEWS = [
    Case("view-flatten", aten.view.default, (CUBE, [128, 8])),
    Case("view-flatten-last", aten.view.default, (CUBE, [8, 128])),
    Case("view-flatten-all", aten.view.default, (CUBE, [-1])),
    Case("view-split", aten.view.default, (T((64, 8)), [8, 8, 8])),
    Case("view-split-last", aten.view.default, (T((16, 32)), [16, 8, 4])),
    Case("view-regroup", aten.view.default, (T((8, 16)), [16, 8])),
    Case("view-ones", aten.view.default, (T((16, 8)), [1, 16, 1, 8])),
    Case("reshape", aten.reshape.default, (CUBE, [8, 128])),
    Case("unsafe_view", aten._unsafe_view.default, (T((128, 8)), [8, 16, 8])),
    Case("permute", aten.permute.default, (CUBE, [2, 0, 1])),
    Case("transpose", aten.transpose.int, (CUBE, 0, -1)),
    Case("t", aten.t.default, (X,)),
    Case("unsqueeze", aten.unsqueeze.default, (X, 1)),
    Case("unsqueeze-last", aten.unsqueeze.default, (X, -1)),
    Case("squeeze", aten.squeeze.dim, (T((16, 1, 8)), 1)),
    Case("squeeze-all", aten.squeeze.default, (T((16, 1, 8)),)),
    Case("expand", aten.expand.default, (T((16, 1)), [16, 8])),
    Case("expand-new", aten.expand.default, (X, [4, 16, 8])),
    Case("repeat", aten.repeat.default, (X, [2, 1, 3])),
]

SHAPES = [
    Case("select", aten.select.int, (CUBE, 1, 3)),
    Case("slice", aten.slice.Tensor, (X, 0, 0, 8)),
    Case("slice-whole", aten.slice.Tensor, (X, 0, 0, 16)),
    Case("cat", aten.cat.default, ([X, Y], 0)),
    Case("cat-1", aten.cat.default, ([X, Y, T((16, 4))], -1)),
    Case("stack", aten.stack.default, ([X, Y], 1)),
    Case("split", aten.split.Tensor, (X, 4, 1)),
    Case("split_with_sizes", aten.split_with_sizes.default, (X, [4, 12], 0)),
    Case("unbind", aten.unbind.int, (X, 1)),
    Case("select_backward", aten.select_backward.default, (X, [16, 4, 8], 1, 2)),
    Case("slice_backward", aten.slice_backward.default, (X, [32, 8], 0, 0, 16, 1)),
    Case("flip", aten.flip.default, (XP, [0])),
    Case("roll", aten.roll.default, (XP, [1], [1])),
    Case("pad", aten.constant_pad_nd.default, (XP, [1, 1])),
    Case("pad-value", aten.constant_pad_nd.default, (XP, [1, 1], 2.0)),
]

NORMS = [
    Case("softmax", aten._softmax.default, (X, 1, False)),
    Case("log_softmax", aten._log_softmax.default, (CUBE, 1, False)),
    Case("softmax_backward", aten._softmax_backward_data.default, (X, Y, 1, torch.float32)),
    Case("layer_norm", aten.native_layer_norm.default, (CUBE, [8], ROW, ROW, 1e-5)),
    Case("layer_norm-plain", aten.native_layer_norm.default, (CUBE, [8], None, None, 1e-5)),
    Case(
        "layer_norm_backward",
        aten.native_layer_norm_backward.default,
        (X, Y, [8], T((16, 1)), T((16, 1)), ROW, ROW, [True, True, True]),
    ),
    Case("rms_norm", aten._fused_rms_norm.default, (CUBE, [8], ROW, 1e-5), dispatched=False),
    Case("group_norm", aten.native_group_norm.default, (CUBE, None, None, 8, 16, 8, 4, 1e-5)),
]

INDEXING = [
    Case("embedding", aten.embedding.default, (T((32, 8)), T((8, 16), torch.int64, ()))),
    Case(
        "embedding_backward",
        aten.embedding_dense_backward.default,
        (CUBE, T((8, 16), torch.int64, ()), 32, -1, False),
    ),
    Case("gather", aten.gather.default, (X, 1, INDEX)),
    Case("scatter", aten.scatter.value, (X, 1, INDEX, 1.0)),
    Case("scatter_add", aten.scatter_add.default, (X, 0, INDEX, Y)),
    Case("index_select", aten.index_select.default, (X, 0, T((8,), torch.int64, ()))),
    Case("index", aten.index.Tensor, (CUBE, [None, T((8,), torch.int64, ())])),
    Case(
        "index-two",
        aten.index.Tensor,
        (CUBE, [T((8, 1), torch.int64, ()), None, T((8,), torch.int64, ())]),
    ),
    Case(
        "index_put",
        aten.index_put.default,
        (X, [T((8,), torch.int64, ())], T((8, 8))),
    ),
]

SCANS = [
    Case("cumsum", aten.cumsum.default, (X, 0)),
    Case("sort", aten.sort.default, (X, 1)),
    Case("topk", aten.topk.default, (CUBE, 2, 1)),
    Case("cummax", aten.cummax.default, (X, 0)),
]

FACTORIES = [
    Case("zeros_like", aten.zeros_like.default, (XP,)),
    Case("empty_like", aten.empty_like.default, (X,)),
    Case("new_zeros", aten.new_zeros.default, (X, [16, 8])),
    Case("new_empty-other", aten.new_empty.default, (X, [4, 8])),
    Case("bernoulli", aten.bernoulli.default, (X,)),
]

LOSSES = [
    Case(
        "nll_loss-mean",
        aten.nll_loss_forward.default,
        (X, T((16,), torch.int64, ()), None, 1, -100),
    ),
    Case(
        "nll_loss-none",
        aten.nll_loss_forward.default,
        (X, T((16,), torch.int64, ()), None, 0, -100),
    ),
    Case(
        "nll_loss_backward",
        aten.nll_loss_backward.default,
        (T(()), X, T((16,), torch.int64, ()), None, 1, -100, T(())),
    ),
]

POOLS = [
    Case("avg_pool2d", aten.avg_pool2d.default, (IMAGE, [2, 2])),
    Case("max_pool2d", aten.max_pool2d_with_indices.default, (IMAGE, [2, 2])),
    Case("upsample", aten.upsample_nearest2d.default, (IMAGE, [16, 16])),
    Case("convolution", aten.convolution.default, (IMAGE, WEIGHT, None, *CONV)),
    Case(
        "convolution-batch",
        aten.convolution.default,
        (
            T((8, 16, 8, 8), partials=(), dims=(0,)),
            T((16, 16, 1, 1), partials=(), dims=()),
            None,
            *CONV,
        ),
    ),
]

ATTENTION = [
    Case(
        "flash_attention",
        aten._scaled_dot_product_flash_attention.default,
        (QKV, QKV, QKV),
        dispatched=False,
    ),
    Case(
        "flash_attention_backward",
        aten._scaled_dot_product_flash_attention_backward.default,
        (
            QKV,
            QKV,
            QKV,
            QKV,
            QKV,
            HEADS,
            None,
            None,
            16,
            16,
            0.0,
            True,
            SEED,
            SEED,
        ),
        dispatched=False,
    ),
    Case(
        "efficient_attention",
        aten._scaled_dot_product_efficient_attention.default,
        (QKV, QKV, QKV, None, True),
        dispatched=False,
    ),
]

CASES = [
    *POINTWISE,
    *REDUCTIONS,
    *MATMULS,
    *VIEWS,
    *SHAPES,
    *NORMS,
    *INDEXING,
    *SCANS,
    *FACTORIES,
    *LOSSES,
    *POOLS,
    *ATTENTION,
]
