"""Calls of the ops that are not elementwise, by the module that has their rules.

Dims divide by 8 where they may be sharded. Values do not matter: programs are compiled, not run.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from xla_dtensor.debug.rule_check.samples import Like, Sample
from xla_dtensor.rules.paddle.names import NAMES

F32, I64, I32, BOOL, C64 = torch.float32, torch.int64, torch.int32, torch.bool, torch.complex64


def t(*shape: int) -> Like:
    return Like(shape)


def half(*shape: int) -> Like:
    return Like(shape, torch.bfloat16)


def ints(*shape: int) -> Like:
    return Like(shape, I64)


def s(name: str, *args: Any, **kwargs: Any) -> Sample:
    """A call of `name`: an op with a default overload, ``op.overload``, or with its namespace."""
    namespace, _, rest = name.rpartition("::")
    op, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), op)
    return Sample(getattr(packet, overload or "default"), args, kwargs)


X, Y, ROW, CUBE = t(16, 8), t(16, 8), t(8), t(8, 16, 8)
MASK, INDEX, PICK = Like((16, 8), BOOL), ints(16, 8), ints(8)
COMPLEX = Like((16, 8), C64)
SCALAR = t()


def elementwise() -> list[Sample]:
    """Those whose tensors are not all of one shape and dtype."""
    lists: Any = ([X, CUBE], [Y, CUBE])
    steps = [SCALAR, SCALAR]
    return [
        s("add.Tensor", X, ROW),
        s("mul.Tensor", X, t(16, 1)),
        s("sub.Tensor", CUBE, X),
        s("where.self", MASK, X, Y),
        s("where.self", MASK, X, SCALAR),
        s("where.ScalarSelf", MASK, 1.0, X),
        s("where.ScalarOther", MASK, X, 1.0),
        s("where.Scalar", MASK, 1.0, 2.0),
        s("masked_fill.Scalar", X, MASK, 0.0),
        s("masked_fill.Tensor", X, MASK, SCALAR),
        s("clamp", X, 0.0, 1.0),
        s("clamp.Tensor", X, Y, ROW),
        s("clip", X, 0.0),
        s("clip.Tensor", X, Y),
        s("fill_diagonal_", X, 1.0),
        s("random", X),
        s("ldexp.Tensor", X, INDEX),
        s("polygamma", 1, X),
        s("_prelu_kernel", CUBE, t(1, 16, 1)),
        s("_prelu_kernel_backward", CUBE, CUBE, t(1, 16, 1)),
        s("native_dropout_backward", X, MASK, 2.0),
        s("log_sigmoid_backward", X, X, X),
        s("elu_backward", X, 1.0, 1.0, 1.0, False, Y),
        s("glu", X, 1),
        s("glu", CUBE, 1),
        s("glu_backward", t(16, 8), t(16, 16), 1),
        s("max.other", X, Y),
        s("min.other", X, Y),
        s("copy", X, Y),
        s("copy", CUBE, X),
        s("_to_copy", X, dtype=torch.float64),
        s("_to_copy", X),
        s("to.dtype", X, torch.float64),
        s("fill.Scalar", X, 1.0),
        s("fill.Tensor", X, SCALAR),
        s("zero", X),
        s("contiguous", X),
        s("clone", X, memory_format=torch.contiguous_format),
        s("lift_fresh_copy", X),
        s("_reshape_alias_copy", CUBE, [128, 8], [8, 1]),
        s("_autocast_to_full_precision", Like((16, 8), torch.bfloat16), False, True),
        s("rrelu_with_noise_functional", X, Y, 0.1, 0.3, True),
        s("_foreach_add.List", *lists),
        s("_foreach_addcmul.ScalarList", *lists, [X, CUBE], [1.0, 2.0]),
        s("_foreach_mul.Tensor", [X, CUBE], SCALAR),
        s("_foreach_add.Tensor", [X, CUBE], SCALAR),
        s("_foreach_div.Tensor", [X, CUBE], SCALAR),
        s("_foreach_norm.Scalar", [X, CUBE]),
        s("_foreach_max", [X, CUBE]),
        s("_foreach_copy", *lists),
        s("_foreach_lerp.Scalar", *lists, 0.5),
        s("_foreach_pow.ScalarAndTensor", 2.0, [X, CUBE]),
        *(
            s(
                name,
                *(lists[0], lists[1], lists[0], lists[1], [], steps),
                lr=0.1,
                beta1=0.9,
                beta2=0.99,
                weight_decay=0.0,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
            for name in ("_fused_adam_", "_fused_adamw_")
        ),
        s(
            "_fused_sgd_",
            *(lists[0], lists[1], lists[0]),
            weight_decay=0.0,
            momentum=0.9,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        ),
        s(
            "_fused_adagrad_",
            *(lists[0], lists[1], lists[0], steps),
            lr=0.1,
            lr_decay=0.0,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        ),
        s("_amp_foreach_non_finite_check_and_unscale", [X, CUBE], SCALAR, SCALAR),
    ]


def factory() -> list[Sample]:
    return [
        *(s(f"{name}_like", X) for name in ("zeros", "ones", "rand", "randn", "empty")),
        s("full_like", X, 2.0),
        s("randint_like", X, 10),
        *(s(f"new_{name}", X, [16, 8]) for name in ("zeros", "ones", "empty")),
        s("new_zeros", X, [4, 8]),
        s("new_full", X, [16, 8], 2.0),
        s("new_empty_strided", X, [16, 8], [8, 1]),
        s("normal_functional", X),
        s("normal.Tensor_float", X),
        s("normal.Tensor_Tensor", X, Y),
    ]


def reduction() -> list[Sample]:
    dims: list[tuple[Any, ...]] = [
        *(("sum.dim_IntList", [0]), ("sum.dim_IntList", [1], True), ("nansum", [0])),
        *(("mean.dim", [0]), ("mean.dim", [1]), ("nanmean", [0]), ("amax", [0]), ("amin", [1])),
        *(("prod.dim_int", 0), ("all.dim", 1), ("any.dim", 0), ("argmax", 1), ("argmin", 0)),
        *(("var.correction", [1]), ("std.correction", [0]), ("logsumexp", [1])),
        *(("var_mean.correction", [0]), ("std_mean.correction", [1]), ("median.dim", 1)),
        *(("nanmedian.dim", 0), ("max.dim", 1), ("min.dim", 0), ("mode", 1), ("kthvalue", 3, 1)),
        *(("count_nonzero.dim_IntList", [0]), ("linalg_vector_norm", 2, [0])),
        *(("linalg_vector_norm", float("inf"), [1]), ("norm.ScalarOpt_dim", 2, [0])),
        ("linalg__powsum", 2, [0]),
        ("aminmax",),
    ]
    full = (
        "sum mean amax amin max min prod all any argmax nansum median nanmedian linalg_vector_norm"
    )
    return [
        *(s(name, X, *rest) for name, *rest in dims),
        *(s(name, X) for name in full.split()),
        s("aminmax", X, dim=0),
        s("prims::sum", X, [0]),
        s("prims::prod", X, [0]),
        s("prims::var", X, [0], 1.0),
        s("sum.dim_IntList", CUBE, [0, 2]),
        s("mean.dim", CUBE, [1], True),
    ]


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
        s("einsum", "bij,bjk->bik", [q, t(8, 8, 32)]),
        s("_grouped_mm", half(16, 8), half(8, 8, 16), Like((8,), I32)),
        s("_grouped_mm", half(8, 16, 8), half(8, 8, 16)),
        s("cdist", q, t(8, 32, 8)),
        s("_cdist_forward", q, t(8, 32, 8), 2.0, None),
        s("linalg_cross", t(16, 3), t(16, 3)),
        s("linalg_cross", t(8, 3, 16), t(8, 3, 16), dim=1),
    ]


def view() -> list[Sample]:
    return [
        *(s(name, CUBE, [128, 8]) for name in ("view", "_unsafe_view", "reshape", "view_copy")),
        s("_reshape_alias", CUBE, [8, 128], [128, 1]),
        s("_reshape_copy", CUBE, [8, 128]),
        s("view", t(64, 8), [8, 8, 8]),
        s("view", t(16, 32), [16, 8, 4]),
        s("view", X, [1, 16, 1, 8]),
        s("view", t(8, 16), [16, 8]),
        s("flatten.using_ints", CUBE, 0, 1),
        s("unflatten.int", t(64, 8), 0, [8, 8]),
        s("squeeze.dim", t(16, 1, 8), 1),
        s("squeeze.dims", t(16, 1, 8), [1]),
        s("squeeze", t(16, 1, 8)),
        s("unsqueeze", X, 1),
        s("permute", CUBE, [2, 0, 1]),
        s("permute_copy", CUBE, [2, 0, 1]),
        s("transpose.int", CUBE, 0, 1),
        s("swapaxes", CUBE, 0, 2),
        s("t", X),
        *(s(name, X) for name in ("numpy_T", "mT", "adjoint")),
        s("movedim.int", CUBE, 0, 2),
        s("expand", t(16, 1), [16, 8]),
        s("expand", X, [4, 16, 8]),
        s("expand_as", t(16, 1), X),
        s("view_as", CUBE, t(8, 128)),
        s("reshape_as", CUBE, t(128, 8)),
        s("broadcast_to", X, [4, 16, 8]),
        s("repeat", X, [2, 1, 3]),
        s("tile", X, [2, 3]),
        s("view_as_real", COMPLEX),
        s("view_as_complex", t(16, 8, 2)),
        s("diagonal", CUBE, 0, 1, 2),
        s("linalg_diagonal", CUBE),
        s("diag_embed", X),
        s("unfold", X, 0, 4, 2),
        s("real", COMPLEX),
        s("imag", COMPLEX),
        *(s(name, COMPLEX) for name in ("resolve_conj", "_conj", "_conj_physical")),
        s("_neg_view", X),
        s("resolve_neg", X),
        s("view.dtype", X, torch.int32),
        s("detach", X),
        s("alias", X),
        s("lift", X),
        s("lift_fresh", X),
        s("prims::view_of", X),
    ]


def shape() -> list[Sample]:
    cut = [("split.Tensor", 4, 1), ("unsafe_split.Tensor", 4, 1), ("chunk", 2, 1)]
    cut += [("unsafe_chunk", 2, 1), ("tensor_split.sections", 2, 1)]
    sizes = [("split_with_sizes", [4, 12], 0), ("unsafe_split_with_sizes", [4, 12], 0)]
    pads: list[Sample] = []
    for n, x in ((1, CUBE), (2, t(8, 8, 16, 8)), (3, t(8, 8, 8, 16, 8))):
        padded = t(*x.shape[:-n], *(d + 2 for d in x.shape[-n:]))
        for kind in ("reflection", "replication"):
            pads.append(s(f"{kind}_pad{n}d", x, [1] * (2 * n)))
            pads.append(s(f"{kind}_pad{n}d_backward", padded, x, [1] * (2 * n)))
    image = t(8, 8, 16, 16)
    return [
        *(s(name, X, *rest) for name, *rest in (*cut, *sizes)),
        *(s(name, CUBE, 2) for name in ("hsplit.int", "vsplit.int", "dsplit.int")),
        s("select.int", CUBE, 1, 3),
        s("unbind.int", X, 1),
        s("slice.Tensor", X, 0, 0, 8),
        s("slice.Tensor", X, 0, 0, 16),
        s("narrow", X, 0, 2, 4),
        s("select_backward", X, [16, 4, 8], 1, 2),
        s("slice_backward", X, [32, 8], 0, 0, 16, 1),
        s("slice_scatter", X, t(4, 8), 0, 0, 4),
        s("select_scatter", X, ROW, 0, 2),
        s("diagonal_scatter", CUBE, t(16, 8), 0, 0, 2),
        s("cat", [X, Y], 0),
        s("cat", [X, Y, t(16, 4)], 1),
        s("stack", [X, Y], 1),
        s("concat", [X, Y], 1),
        s("concatenate", [X, Y], 1),
        s("roll", X, [1], [1]),
        s("roll", X, [3], [0]),
        s("flip", X, [0]),
        s("fliplr", X),
        s("flipud", X),
        s("rot90", CUBE, 1, [0, 1]),
        s("_fft_c2c", COMPLEX, [1], 0, True),
        s("_fft_r2c", X, [1], 0, True),
        s("_fft_c2r", COMPLEX, [1], 0, 14),
        s("constant_pad_nd", X, [1, 1]),
        s("constant_pad_nd", X, [1, 1], 2.0),
        s("pad", X, [1, 1]),
        *pads,
        s("tril", CUBE),
        s("triu", X, 1),
        s("repeat_interleave.self_int", X, 2, 1),
        s("pixel_shuffle", image, 2),
        s("pixel_unshuffle", image, 2),
        s("channel_shuffle", image, 2),
        s("unfold_backward", t(24, 8, 4), [27, 8], 0, 4, 1),
        s("trace_backward", SCALAR, [16, 8]),
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


def indexing() -> list[Sample]:
    return [
        s("embedding", t(32, 8), ints(8, 16)),
        s("embedding_dense_backward", CUBE, ints(8, 16), 32, -1, False),
        s("one_hot", ints(16), 8),
        s("gather", X, 1, INDEX),
        s("gather", CUBE, 0, ints(8, 16, 8)),
        s("take_along_dim", X, INDEX, 1),
        s("scatter.value", X, 1, INDEX, 1.0),
        s("scatter.src", X, 1, INDEX, Y),
        s("scatter_add", X, 0, INDEX, Y),
        s("scatter_reduce.two", X, 0, INDEX, Y, "amax"),
        s("index_select", X, 0, PICK),
        s("take", X, PICK),
        s("index.Tensor", CUBE, [None, PICK]),
        s("index.Tensor", CUBE, [ints(8, 1), None, PICK]),
        s("_unsafe_index.Tensor", CUBE, [None, PICK]),
        s("index_put", X, [PICK], t(8, 8)),
        s("_unsafe_index_put", X, [PICK], t(8, 8)),
        s("_index_put_impl", X, [PICK], t(8, 8)),
        s("index_add", X, 0, PICK, t(8, 8)),
        s("index_copy", X, 0, PICK, t(8, 8)),
        s("index_reduce", X, 0, PICK, t(8, 8), "amax"),
        s("index_fill.int_Scalar", X, 0, PICK, 1.0),
        s("index_fill.int_Tensor", X, 0, PICK, SCALAR),
        s("masked_scatter", X, MASK, Y),
        s("put", X, PICK, t(8)),
        s("bucketize.Tensor", X, t(16)),
        s("searchsorted.Tensor", t(16), X),
        s("searchsorted.Scalar", t(16), 2.0),
    ]


def scan_sort() -> list[Sample]:
    return [
        *(s(name, X, 0) for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")),
        s("cumsum", CUBE, 2),
        s("sort", X, 1),
        s("sort.stable", CUBE, stable=True, dim=0),
        s("argsort", X, 1),
        s("topk", CUBE, 2, 1),
        s("msort", X),
        s("cumulative_trapezoid.dx", X),
        s("diff", X),
        s("histc", X, 10, 0, 1),
        s("histc", X, 10),
        s("bincount", ints(16), None, 8),
        s("multinomial", X, 2),
        s("quantile.scalar", X, 0.5),
        s("nanquantile.scalar", X, 0.5),
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
    ]


@cache
def samples() -> tuple[Sample, ...]:
    """Every call of this table."""
    families = (
        *(elementwise, factory, reduction, matmul, view, shape, norm, indexing, scan_sort),
        *(loss, linalg, conv, attention),
    )
    return tuple(sample for family in families for sample in family())


CUDA = "its kernels are of other devices' libraries: there is no lowering to XLA"
HOST = "its result is a Python value: nothing is laid out"
VALUES = "the size of its result depends on values: dispatch computes it in two steps"

COMPOSED = "programs run the ops that it is composed of, which are checked"

NOT_CHECKED: dict[str, str] = {
    "xla_dtensor::jax_call": "the rule is the user's",
    **{op: COMPOSED for op in NAMES.values() if op.startswith("paddle::")},
    **dict.fromkeys(
        (
            "aten::_scaled_dot_product_attention_math_for_mps",
            "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_cudnn_attention_backward",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_efficient_attention_backward",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_backward",
            "aten::_scaled_dot_product_fused_attention_overrideable",
            "aten::_scaled_dot_product_fused_attention_overrideable_backward",
            "aten::convolution_overrideable",
            "aten::cudnn_convolution",
            "aten::convolution_backward_overrideable",
            "aten::_scaled_mm",
        ),
        CUDA,
    ),
    **dict.fromkeys(
        (
            *("aten::_local_scalar_dense", "aten::equal", "aten::is_same_size"),
            *("aten::is_nonzero", "aten::item", "aten::allclose", "aten::_linalg_check_errors"),
        ),
        HOST,
    ),
    **dict.fromkeys(
        ("aten::masked_select", "aten::nonzero", "aten::_unique2", "aten::unique_dim"), VALUES
    ),
    **dict.fromkeys(
        ("aten::_cummax_helper", "aten::_cummin_helper"),
        "cummax and cummin have lowerings of their own, and need no helper",
    ),
    "aten::set_.source_Tensor": "it moves a storage, and computes nothing",
}
"""Rules without a call that can be compiled, each with its reason."""
