"""Contractions, reductions, softmax and norms, losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.ops.harness import bools, case, distinct, f, ints, positive

bf16, f64, c64 = torch.bfloat16, torch.float64, torch.complex64

MATMUL = [
    case("mm", torch.mm, f("m k"), f("k n")),
    case("mm_transposed", lambda x, y: x @ y.t(), f("m k"), f("n k")),
    case("matmul_3d_2d", torch.matmul, f("b s h"), f("h n"), light=True),
    case("matmul_4d", lambda q, k: q @ k.transpose(-1, -2), f("b 4 s h"), f("b 4 s h")),
    case("matmul_broadcast", torch.matmul, f("b 1 s h"), f("k h n"), light=True),
    case("bmm", torch.bmm, f("b s h"), f("b h k")),
    case("baddbmm", torch.baddbmm, f("b s k"), f("b s h"), f("b h k"), light=True),
    case("linear", F.linear, f("b s h"), f("n h"), light=True),
    case("linear_bias", F.linear, f("b s h"), f("n h"), f("n")),
    case("linear_2d_bias", F.linear, f("m k"), f("n k"), f("n"), light=True),
    case(
        "addmm",
        lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2),
        f("n"),
        f("m k"),
        f("k n"),
        light=True,
    ),
    case("mv", torch.mv, f("m k"), f("k"), light=True),
    case("dot", torch.dot, f("n"), f("n"), light=True),
    case("outer", torch.outer, f("m"), f("n"), light=True),
    case("einsum", lambda x, w: torch.einsum("bsh,nhk->bnsk", x, w), f("b s h"), f("n h k")),
    case("bf16_linear", F.linear, f("m k", bf16), f("n k", bf16), light=True),
    case("f64_mm", torch.mm, f("m k", f64), f("k n", f64), light=True),
    case("complex_mm", torch.mm, f("m k", c64), f("k n", c64), light=True),
    case("int_mm", torch.mm, ints("m k"), ints("k n"), light=True),
]

REDUCTION = [
    case("sum", torch.sum, f("m k")),
    case("sum_dim", lambda x: x.sum(0), f("m k n")),
    case("sum_dims_keep", lambda x: x.sum((0, 2), keepdim=True), f("m k n")),
    case("sum_dtype", lambda x: x.sum(-1, dtype=f64), f("m k"), light=True),
    case("mean", torch.mean, f("m k"), light=True),
    case("mean_dim_keep", lambda x: x.mean(-1, keepdim=True), f("b s h")),
    case("amax_amin", lambda x: (x.amax(-1), x.amin(0)), distinct("m k"), light=True),
    case("max_dim", lambda x: x.max(-1), distinct("m k")),
    case("min_dim", lambda x: x.min(0), distinct("m k"), light=True),
    case("max", lambda x: (x.max(), x.min()), distinct("m k"), light=True),
    case("argmax", lambda x: (x.argmax(-1), x.argmax()), distinct("m k").constant, light=True),
    case("var", lambda x: x.var(-1), f("s m"), light=True),
    case("var_mean", lambda x: torch.var_mean(x, (0, 2), correction=0), f("b s h"), light=True),
    case("std", lambda x: x.std(0), f("s m"), light=True),
    case("prod", lambda x: x.prod(-1), positive("m k"), light=True),
    case("vector_norm", torch.linalg.vector_norm, f("m k")),
    case(
        "vector_norm_inf",
        lambda x: torch.linalg.vector_norm(x, float("inf")),
        distinct("m k"),
        light=True,
    ),
    case("norm_dim", lambda x: x.norm(dim=-1), f("m k"), light=True),
    case("logsumexp", lambda x: x.logsumexp(-1), f("m k"), light=True),
    case("cumsum", lambda x: (x.cumsum(0), x.cumsum(-1)), f("m k")),
    case("any_all", lambda x: (x.any(), x.all(-1), x.any(0)), bools("m k"), light=True),
    case("bool_sum", torch.sum, bools("m k"), light=True),
    case("int_sum", lambda x: (x.sum(), x.sum(0)), ints("m k", 5), light=True),
    case("bf16_sum", lambda x: x.sum(-1), f("m k", bf16), light=True),
    case("complex_sum", lambda x: x.sum(0), f("m k", c64), light=True),
    case("topk", lambda x: x.topk(1, -1), distinct("m k"), light=True),
    case("sort", lambda x: x.sort(-1), distinct("m k"), light=True),
    case("multinomial_free_argsort", lambda x: x.argsort(0), distinct("m k").constant, light=True),
]


def batch_norm_train(x, mean, variance, weight, bias):  # type: ignore[no-untyped-def]
    mean, variance = mean.clone(), variance.clone()
    y = F.batch_norm(x, mean, variance, weight, bias, training=True)
    return y, mean, variance


NORM = [
    case("softmax", lambda x: x.softmax(-1), f("b s h")),
    case("softmax_first", lambda x: x.softmax(0), f("m k"), light=True),
    case(
        "softmax_dtype", lambda x: F.softmax(x, -1, dtype=torch.float32), f("m k", bf16), light=True
    ),
    case("log_softmax", lambda x: x.log_softmax(-1), f("m k")),
    case(
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        f("b s h"),
        f("h"),
        f("h"),
    ),
    case("layer_norm_two_dims", lambda x: F.layer_norm(x, x.shape[1:]), f("b s h"), light=True),
    case(
        "rms_norm",
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5),
        f("b s h"),
        f("h"),
        light=True,
    ),
    case(
        "rms_norm_by_hand",
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5) * w,
        f("b s h"),
        f("h"),
        light=True,
    ),
    case(
        "batch_norm_train",
        batch_norm_train,
        f("b c w"),
        f("c").constant,
        positive("c").constant,
        f("c"),
        f("c"),
        tolerance=(2e-5, 2e-5),
    ),
    case(
        "batch_norm_eval",
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
        f("b c w 2"),
        f("c").constant,
        positive("c").constant,
        f("c"),
        f("c"),
        light=True,
    ),
    case(
        "group_norm",
        lambda x, w, b: F.group_norm(x, x.shape[1] // 2, w, b),
        f("b h w"),
        f("h"),
        f("h"),
        tolerance=(2e-5, 2e-5),
    ),
]

LOSS = [
    case("cross_entropy", F.cross_entropy, f("m n"), ints("m", 6)),
    case(
        "cross_entropy_sum",
        lambda x, y: F.cross_entropy(x, y, reduction="sum"),
        f("m n"),
        ints("m", 6),
        light=True,
    ),
    case(
        "cross_entropy_none",
        lambda x, y: F.cross_entropy(x, y, reduction="none"),
        f("m n"),
        ints("m", 6),
        light=True,
    ),
    case(
        "cross_entropy_ignore",
        lambda x, y: F.cross_entropy(x, y, ignore_index=2),
        f("m n"),
        ints("m", 6),
        light=True,
    ),
    case(
        "cross_entropy_smooth",
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        f("m n"),
        ints("m", 6),
        light=True,
    ),
    case(
        "cross_entropy_weight",
        lambda x, y, w: F.cross_entropy(x, y, w),
        f("m n"),
        ints("m", 6),
        positive("n").constant,
        light=True,
    ),
    case(
        "cross_entropy_flattened",
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
        f("b s n"),
        ints("b s", 6),
        light=True,
    ),
    case("cross_entropy_classes_second", F.cross_entropy, f("b n s"), ints("b s", 6), light=True),
    case("nll_loss", F.nll_loss, f("m n"), ints("m", 6), light=True),
    case("mse_loss", F.mse_loss, f("m k"), f("m k"), light=True),
    case(
        "bce_with_logits",
        F.binary_cross_entropy_with_logits,
        f("m k"),
        positive("m k").constant,
        light=True,
    ),
]

CASES = MATMUL + REDUCTION + NORM + LOSS
