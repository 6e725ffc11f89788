"""Samples of operations that contract."""

from __future__ import annotations

import torch

from tools.rule_check.entries import (
    CUBE,
    F32,
    I32,
    I64,
    ROW,
    SCALAR,
    X,
    Y,
    half,
    ints,
    s,
    t,
)
from tools.rule_check.samples import Like, Sample


def matmul() -> list[Sample]:
    q, w = t(8, 16, 8), t(32, 8)
    return [
        s("mm", t(16, 8), t(8, 32)),
        s("bmm", q, t(8, 8, 32)),
        s("mv", X, ROW),
        s("dot", t(16), t(16)),
        s("vdot", t(16), t(16)),
        s("ger", t(16), ROW),
        s("outer", t(16), ROW),
        s("_int_mm", Like((32, 16), torch.int8), Like((16, 8), torch.int8)),
        s("addmm", t(32), t(16, 8), t(8, 32)),
        s("addmm", t(16, 32), t(16, 8), t(8, 32)),
        s("_addmm_activation", t(32), t(16, 8), t(8, 32)),
        s("addmv", t(16), X, ROW),
        s("addr", X, t(16), ROW),
        s("baddbmm", t(8, 16, 32), q, t(8, 8, 32)),
        s("addbmm", t(16, 32), q, t(8, 8, 32)),
        s("matmul", q, t(8, 32)),
        s("matmul", t(8, 8, 16, 8), t(8, 8, 8, 32)),
        s("linear", q, w, t(32)),
        s("linear", q, w),
        s("xla_dtensor::linear_weight_grad", t(8, 16, 32), q),
        s("xla_dtensor::linear_input_grad", t(8, 16, 32), w),
        s("einsum", "bij,bjk->bik", [q, t(8, 8, 32)]),
        s("_grouped_mm", half(16, 8), half(8, 8, 16), Like((8,), I32)),
        s("_grouped_mm", half(8, 16, 8), half(8, 8, 16)),
        s("cdist", q, t(8, 32, 8)),
        s("_cdist_forward", q, t(8, 32, 8), 2.0, None),
        s("linalg_cross", t(16, 3), t(16, 3)),
        s("linalg_cross", t(8, 3, 16), t(8, 3, 16), dim=1),
    ]


def norm() -> list[Sample]:
    image, stat = t(8, 16, 8, 8), t(16)
    rows = t(8, 16, 1)
    groups = t(8, 4)
    batch = (stat, stat, stat, stat)
    return [
        *(s(name, X, 1, False) for name in ("_softmax", "_log_softmax")),
        s("_softmax", CUBE, 1, False),
        s("_safe_softmax", X, 1),
        s("softmax.int", CUBE, 2),
        s("log_softmax.int", CUBE, 0),
        s("_softmax_backward_data", X, Y, 1, F32),
        s("_log_softmax_backward_data", X, Y, 1, F32),
        s("native_layer_norm", CUBE, [8], ROW, ROW, 1e-5),
        s("native_layer_norm", CUBE, [8], None, None, 1e-5),
        s("native_layer_norm", CUBE, [16, 8], None, None, 1e-5),
        s("layer_norm", CUBE, [8], ROW, ROW),
        s("_fused_rms_norm", CUBE, [8], ROW, 1e-5),
        s("rms_norm", CUBE, [8], ROW, 1e-5),
        s("native_layer_norm_backward", CUBE, CUBE, [8], rows, rows, ROW, ROW, [True] * 3),
        s("_fused_rms_norm_backward", CUBE, CUBE, [8], rows, ROW, [True, True]),
        s("native_group_norm", image, stat, stat, 8, 16, 64, 4, 1e-5),
        s(
            "native_group_norm_backward",
            image,
            image,
            groups,
            groups,
            stat,
            8,
            16,
            64,
            4,
            [True] * 3,
        ),
        s("native_batch_norm", image, *batch, True, 0.1, 1e-5),
        s("native_batch_norm", image, *batch, False, 0.1, 1e-5),
        s("_native_batch_norm_legit.no_stats", image, stat, stat, True, 0.1, 1e-5),
        s("_native_batch_norm_legit_functional", image, *batch, True, 0.1, 1e-5),
        s("_native_batch_norm_legit_no_training", image, *batch, 0.1, 1e-5),
        s("_batch_norm_with_update", image, *batch, 0.1, 1e-5),
        s("_batch_norm_with_update_functional", image, *batch, 0.1, 1e-5),
        s("cudnn_batch_norm", image, *batch, True, 0.1, 1e-5),
        s("batch_norm", image, *batch, True, 0.1, 1e-5, False),
        s("native_batch_norm_backward", image, image, *(stat,) * 5, True, 1e-5, [True] * 3),
        s("native_batch_norm_backward", image, image, *(stat,) * 5, False, 1e-5, [True] * 3),
        s("batch_norm_backward", image, image, *(stat,) * 5, True, 1e-5, [True] * 3, t(0)),
        s("cudnn_batch_norm_backward", image, image, *(stat,) * 5, 1e-5, Like((0,), torch.uint8)),
    ]


def loss() -> list[Sample]:
    target, pixels = ints(16), ints(8, 8, 8)
    names = "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss"
    names += " kl_div hinge_embedding_loss"
    reduced = {"smooth_l1_loss": (1.0,), "huber_loss": (1.0,)}
    samples = []
    for reduction in (0, 1, 2):
        grad = X if reduction == 0 else SCALAR
        image_grad = t(8, 8, 8) if reduction == 0 else SCALAR
        item_grad = t(16) if reduction == 0 else SCALAR
        samples += [
            *(s(name, X, Y, reduction=reduction) for name in names.split()),
            s("binary_cross_entropy_with_logits", X, Y, None, None, reduction),
            s("poisson_nll_loss", X, Y, True, False, 1e-8, reduction),
            s("mse_loss_backward", grad, X, Y, reduction),
            s("soft_margin_loss_backward", grad, X, Y, reduction),
            s("binary_cross_entropy_backward", grad, X, Y, None, reduction),
            *(s(f"{n}_backward", grad, X, Y, reduction, *more) for n, more in reduced.items()),
            s("nll_loss_forward", X, target, None, reduction, -100),
            s("nll_loss", X, target, None, reduction),
            s("nll_loss_nd", X, target, None, reduction),
            s("nll_loss2d_forward", t(8, 16, 8, 8), pixels, None, reduction, -100),
            s("nll_loss_backward", item_grad, X, target, None, reduction, -100, SCALAR),
            s(
                "nll_loss2d_backward",
                *(image_grad, t(8, 16, 8, 8), pixels, None, reduction, -100, SCALAR),
            ),
            s("cross_entropy_loss", X, target, None, reduction),
            s("cross_entropy_loss", X, Y, None, reduction),
        ]
    return samples


def linalg() -> list[Sample]:
    a, b = t(8, 4, 4), t(8, 4, 2)
    pivots = Like((8, 4), I32)
    names = (
        "cholesky cholesky_inverse linalg_cholesky_ex linalg_inv_ex linalg_matrix_exp linalg_eig"
    )
    names += " linalg_eigvals _linalg_eigh _linalg_svd linalg_qr geqrf linalg_lu"
    names += " linalg_lu_factor_ex linalg_ldl_factor_ex _linalg_det _linalg_slogdet"
    names += " _linalg_eigvals"
    return [
        *(s(name, a) for name in names.split()),
        s("linalg_pinv", a, 1e-6),
        s("linalg_lstsq", a, b),
        s("lu_unpack", a, pivots),
        s("linalg_householder_product", a, t(8, 4)),
        s("linalg_solve_triangular", a, b, upper=True),
        s("cholesky_solve", b, a),
        s("linalg_lu_solve", a, pivots, b),
        s("linalg_ldl_solve", a, pivots, b),
        s("ormqr", a, t(8, 4), b),
        s("_linalg_solve_ex", a, b),
        s("triangular_solve", b, a),
    ]


_SPATIAL = {1: t(8, 8, 16), 2: t(8, 8, 16, 16), 3: t(8, 8, 8, 8, 8)}


def _halved(x: Like, n: int) -> Like:
    return t(*x.shape[:-n], *(size // 2 for size in x.shape[-n:]))


def _positions(x: Like, n: int) -> Like:
    return Like(_halved(x, n).shape, I64)


def conv() -> list[Sample]:
    image, stride = t(8, 16, 8, 8), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    same = ([1, 1], [1, 1], [1, 1], False, [0, 0])
    up = ([1, 1], [0, 0], [1, 1], True, [0, 0], 1)
    back = ([True] * 3,)
    samples = [
        s("convolution", image, t(16, 16, 1, 1), None, *stride),
        s("convolution", image, t(32, 16, 3, 3), t(32), *same, 1),
        s("convolution", image, t(16, 1, 3, 3), None, *same, 16),
        s("convolution", image, t(16, 32, 1, 1), None, *up),
        s("_convolution", image, t(32, 16, 3, 3), t(32), *same, 1, False, False, False, False),
        s("conv1d", t(8, 16, 8), t(32, 16, 3)),
        s("conv2d", image, t(32, 16, 3, 3)),
        s("conv3d", t(8, 8, 8, 8, 8), t(16, 8, 3, 3, 3)),
        s("convolution_backward", image, image, t(16, 16, 1, 1), [16], *stride, *back),
        s("convolution_backward", image, image, t(16, 16, 3, 3), [16], *same, 1, *back),
        s("convolution_backward", image, image, t(16, 1, 3, 3), [16], *same, 16, *back),
    ]
    for n, x in _SPATIAL.items():
        two, zero, one = [2] * n, [0] * n, [1] * n
        out, where = _halved(x, n), _positions(x, n)
        half = list(out.shape[-n:])
        samples += [
            s(f"avg_pool{n}d", x, two),
            s(f"adaptive_avg_pool{n}d", x, half),
            s(f"max_pool{n}d", x, two),
            s(f"adaptive_max_pool{n}d", x, half),
        ]
        for name in (f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"):
            samples += [
                s(name, out, list(x.shape[-n:])),
                s(f"{name}_backward", x, list(x.shape[-n:]), list(out.shape)),
            ]
        if n == 1:
            samples.append(s("max_pool1d_with_indices", x, two))
            continue
        average = (two, two, zero, False, True, None)
        samples += [
            s(f"avg_pool{n}d_backward", out, x, *average),
            s(f"_adaptive_avg_pool{n}d", x, half),
            s(f"_adaptive_avg_pool{n}d_backward", out, x),
            s(f"adaptive_max_pool{n}d_backward", out, x, where),
            s(f"max_pool{n}d_with_indices", x, two),
            s(
                f"max_pool{n}d_with_indices_backward",
                *(out, x, two, two, zero, one, False, where),
            ),
            s(f"fractional_max_pool{n}d", x, two, half, t(*x.shape[:2], n)),
            s(f"fractional_max_pool{n}d_backward", out, x, two, half, where),
        ]
    square, volume = _SPATIAL[2], _SPATIAL[3]
    small, tiny = _halved(square, 2), _halved(volume, 3)
    samples += [
        s("max_pool2d_backward", small, square, [2, 2], [2, 2], [0, 0], [1, 1]),
        s("adaptive_avg_pool3d_backward.grad_input", tiny, volume, grad_input=volume),
        s("max_unpool2d", small, _positions(square, 2), [16, 16]),
        s("max_unpool3d", tiny, _positions(volume, 3), [8, 8, 8], [2, 2, 2], [0, 0, 0]),
        s("upsample_linear1d", _halved(_SPATIAL[1], 1), [16], False),
        s("upsample_linear1d_backward", _SPATIAL[1], [16], [8, 8, 8], False),
        s("upsample_trilinear3d", tiny, [8, 8, 8], False),
        s("upsample_trilinear3d_backward", volume, [8, 8, 8], list(tiny.shape), False),
    ]
    planar = "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa"
    planar += " _upsample_bicubic2d_aa _upsample_lanczos2d_aa"
    for name in planar.split():
        if hasattr(torch.ops.aten, name):
            samples += [
                s(name, small, [16, 16], False),
                s(f"{name}_backward", square, [16, 16], list(small.shape), False),
            ]
    grid2, grid3 = t(8, 16, 16, 2), t(8, 8, 8, 8, 3)
    samples += [
        s("grid_sampler_2d", square, grid2, 0, 0, False),
        s("grid_sampler_3d", volume, grid3, 0, 0, False),
        s("grid_sampler_2d_backward", square, square, grid2, 0, 0, False, [True, True]),
        s("grid_sampler_3d_backward", volume, volume, grid3, 0, 0, False, [True, True]),
    ]
    return samples


def recurrence() -> list[Sample]:
    gates, h, steps = t(8, 16, 32), t(16, 8), t(8, 16, 8)
    every = (gates, h, h, t(32, 8), t(32), None, None)
    gru = (t(8, 16, 24), h, None, t(24, 8), None, None, None)
    kept = (steps, steps, gates)
    return [
        s("xla_dtensor::recurrence", *every, "lstm", False, True),
        s("xla_dtensor::recurrence", *gru, "gru", True, False),
        s("xla_dtensor::recurrence_backward", steps, h, h, *every, *kept, "lstm", True),
    ]


def attention() -> list[Sample]:
    q, lse = t(8, 8, 16, 8), t(8, 8, 16)
    keys = t(8, 2, 16, 8)
    return [
        s("scaled_dot_product_attention", q, q, q),
        s("scaled_dot_product_attention", q, q, q, t(16, 16)),
        s("scaled_dot_product_attention", q, keys, keys, enable_gqa=True),
        s("_scaled_dot_product_attention_math", q, q, q),
        s("_scaled_dot_product_flash_attention_for_cpu", q, q, q),
        s("_scaled_dot_product_flash_attention_for_cpu_backward", q, q, q, q, q, lse, 0.0, False),
        s("xla_dtensor::attention_backward", q, q, q, q, None, False, None, False),
        s("xla_dtensor::flash_attention", q, keys, keys, None, True, 0.5),
        s("xla_dtensor::flash_attention_dropout", q, keys, keys, t(16, 16), 0.1, False, 0.5),
        s(
            *("xla_dtensor::flash_attention_backward", q, q, keys, keys, None, q, lse),
            *(None, 0.0, True, 0.5, False),
        ),
    ]
