"""Samples of operations by element, and along dims."""

from __future__ import annotations

from typing import Any

import torch

from tools.rule_check.entries import CUBE, INDEX, MASK, ROW, SCALAR, X, Y, ints, s, t
from tools.rule_check.samples import Like, Sample


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
