"""Every rule that Paddle registers by name, forwards and backwards on 1-D and 2-D meshes.

The rows are written by hand in ``dims_mapping``, from what an op computes. Where Paddle's own
answer is another, a comment says so. Names of one family share its rows.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.rules.devices import assemble, devices, parts
from xla_dtensor.rules import rules
from xla_dtensor.rules.paddle import TensorSpec, spmd_rule
from xla_dtensor.rules.paddle.names import NAMES, rule_of_name

pytestmark = pytest.mark.usefixtures("one_thread")

ONE, TWO = (4,), (2, 4)
INT, BOOL = torch.int64, torch.bool
SUM, AVG, MAX = "sum", "avg", "max"


def t(*shape: int, m: Any = None, p: Any = (), dtype: torch.dtype = torch.float32) -> TensorSpec:
    """A tensor: its dims_mapping (whole unless given), and what is pending by mesh dim."""
    return TensorSpec(shape, list(m) if m else [-1] * len(shape), tuple(p), dtype)


def i(*shape: int, m: Any = None) -> TensorSpec:
    return t(*shape, m=m, dtype=INT)


@dataclass(frozen=True)
class Row:
    """One call. `used` and `out` have a dims_mapping per tensor; where reductions are pending, the
    entry is ``(dims_mapping, {mesh dim: reduction})``."""

    direction: str
    mesh: tuple[int, ...]
    args: tuple[Any, ...]
    used: list[Any]
    out: list[Any]
    attrs: dict[str, Any] = field(default_factory=dict)


def fwd(mesh: tuple[int, ...], *args: Any, used: list[Any], out: list[Any], **attrs: Any) -> Row:
    return Row("forward", mesh, args, used, out, attrs)


def bwd(mesh: tuple[int, ...], *args: Any, used: list[Any], out: list[Any], **attrs: Any) -> Row:
    """`args` end with the wanted results; `out` is what they follow from the inputs as."""
    return Row("backward", mesh, args, used, out, attrs)


# --- elementwise ---------------------------------------------------------------------------------

UNARY_NAMES = """
    elementwise_unary assign hardswish mish relu6 swish acos acosh asin asinh atan atanh bernoulli
    bitwise_not ceil celu clip conj cos cosh digamma elu erf erfinv exp expm1 fill floor gelu
    hardshrink hardsigmoid hardtanh label_smooth leaky_relu lgamma log log10 log1p log2 logical_not
    logit logsigmoid poisson pow reciprocal relu round rsqrt scale selu sigmoid sign silu sin sinh
    softplus softshrink softsign sqrt square stanh tan tanh tanh_shrink thresholded_relu trunc
    dropout
"""
BINARY_NAMES = """
    elementwise_binary add elementwise_add divide elementwise_div elementwise_pow floor_divide fmin
    fmax heaviside maximum minimum multiply elementwise_mul remainder subtract bitwise_and
    bitwise_or bitwise_xor logical_and logical_or logical_xor not_equal greater_than less_than
    swiglu fused_dropout_add
"""
# Arguments that a function of one element has besides.
EXTRA: dict[str, tuple[Any, ...]] = {
    "clip": (0.0, 1.0),
    "dropout": (0.5, True),
    "fill": (1.0,),
    "full_like": (1.0,),
    "pow": (2.0,),
    "scale": (2.0,),
}
INTEGER = ("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor")


def unary(name: str) -> list[Row]:
    extra, dtype = EXTRA.get(name, ()), INT if name in INTEGER else torch.float32

    def x(*shape: int, m: Any = None) -> TensorSpec:
        return t(*shape, m=m, dtype=dtype)

    rows = [
        (ONE, [0, -1]),
        (ONE, [-1, 0]),
        (ONE, [-1, -1]),
        (TWO, [0, 1]),
        (TWO, [1, 0]),
        (TWO, [1, -1]),
        (TWO, [[0, 1], -1]),
        (TWO, [-1, [1, 0]]),
        (TWO, [1, -1, 0]),
    ]
    forward = [
        fwd(mesh, x(*(64, 16, 8)[: len(m)], m=m), *extra,
            used=[m], out=[m])
        for mesh, m in rows
    ]  # fmt: skip
    backward = [
        bwd(mesh, x(*(64, 16, 8)[: len(m)]), *extra, x(*(64, 16, 8)[: len(m)], m=m),
            used=[m], out=[m])
        for mesh, m in rows
    ]  # fmt: skip
    return forward + backward


def binary(name: str) -> list[Row]:
    dtype = INT if name in INTEGER else torch.float32

    def x(*shape: int, m: Any = None) -> TensorSpec:
        return t(*shape, m=m, dtype=dtype)

    whole = [-1, -1]
    return [
        fwd(ONE, x(64, 36, m=[0, -1]), x(64, 36), used=[[0, -1]] * 2, out=[[0, -1]]),
        fwd(ONE, x(64, 36), x(64, 36, m=[-1, 0]), used=[[-1, 0]] * 2, out=[[-1, 0]]),
        fwd(ONE, x(64, 36), x(64, 36), used=[whole] * 2, out=[whole]),
        # Both would use the mesh dim; moving either costs the same, so the first one stays.
        fwd(ONE, x(64, 36, m=[0, -1]), x(64, 36, m=[-1, 0]), used=[[0, -1]] * 2, out=[[0, -1]]),
        # The larger one stays, whichever it is.
        fwd(ONE, x(36, m=[0]), x(64, 36, m=[0, -1]), used=[[-1], [0, -1]], out=[[0, -1]]),
        fwd(TWO, x(64, 36, m=[0, -1]), x(64, 36, m=[-1, 1]), used=[[0, 1]] * 2, out=[[0, 1]]),
        fwd(TWO, x(64, 36, m=[[0, 1], -1]), x(64, 36), used=[[[0, 1], -1]] * 2, out=[[[0, 1], -1]]),
        # Broadcasting: missing dims, and dims of size one, which are whole.
        fwd(TWO, x(64, 36, m=[0, 1]), x(36), used=[[0, 1], [1]], out=[[0, 1]]),
        fwd(TWO, x(64, 36, m=[0, 1]), x(1, 36), used=[[0, 1], [-1, 1]], out=[[0, 1]]),
        fwd(TWO, x(16, 64, 36, m=[1, 0, -1]), x(64, 1), used=[[1, 0, -1], [0, -1]],
            out=[[1, 0, -1]]),
        bwd(ONE, x(64, 36), x(64, 36), x(64, 36, m=[0, -1]), used=[[0, -1]] * 2, out=[[0, -1]]),
        bwd(TWO, x(64, 36), x(64, 36), x(64, 36, m=[0, 1]), used=[[0, 1]] * 2, out=[[0, 1]]),
        bwd(TWO, x(64, 36), x(36), x(64, 36, m=[0, 1]), used=[[0, 1], [1]], out=[[0, 1]]),
        bwd(TWO, x(96, 1, 48), x(96, 24, 48), x(96, 24, 48, m=[0, 1, -1]),
            used=[[0, -1, -1], [0, 1, -1]], out=[[0, 1, -1]]),
        bwd(TWO, x(64, 36), x(64, 36), x(64, 36, m=[-1, [0, 1]]), used=[[-1, [0, 1]]] * 2,
            out=[[-1, [0, 1]]]),
    ]  # fmt: skip


def pending(mesh_dim: int, reduction: str = SUM, shape: Any = (64, 36)) -> TensorSpec:
    return t(*shape, p=[(mesh_dim, reduction)])


WHOLE = [-1, -1]
S0, A0, M0 = (WHOLE, {0: SUM}), (WHOLE, {0: AVG}), (WHOLE, {0: MAX})

# Whether a pending reduction passes depends on the function. Paddle keeps sums of linear ones, and
# of no other; torch (and so we) also maxima and minima of monotone ones.
PENDING: dict[str, list[Row]] = {
    "scale": [fwd(ONE, pending(0), 2.0, used=[S0], out=[S0])],
    "cast": [fwd(ONE, pending(0), used=[S0], out=[S0], dtype=torch.float64)],
    "cos": [fwd(ONE, pending(0), used=[WHOLE], out=[WHOLE])],
    "elementwise_unary": [fwd(TWO, pending(1), used=[WHOLE], out=[WHOLE])],
    "relu": [
        fwd(ONE, pending(0), used=[WHOLE], out=[WHOLE]),
        fwd(ONE, pending(0, MAX), used=[M0], out=[M0]),
    ],
    "add": [
        fwd(ONE, pending(0), pending(0), used=[S0, S0], out=[S0]),
        fwd(ONE, pending(0, AVG), t(64, 36), used=[A0, WHOLE], out=[A0]),
        # What is whole is a sum too: one device's is it, and the others' are zero.
        fwd(ONE, pending(0), t(64, 36), used=[S0, S0], out=[S0]),
    ],
    "multiply": [
        fwd(ONE, pending(0), t(64, 36), used=[S0, WHOLE], out=[S0]),
        fwd(TWO, t(64, 36, m=[0, -1], p=[(1, SUM)]), t(64, 36),
            used=[([0, -1], {1: SUM}), [0, -1]], out=[([0, -1], {1: SUM})]),
    ],
    "divide": [fwd(ONE, pending(0), t(64, 36), used=[S0, WHOLE], out=[S0])],
    "maximum": [fwd(ONE, pending(0, MAX), pending(0, MAX), used=[M0, M0], out=[M0])],
    "elementwise_binary": [fwd(ONE, pending(0), t(64, 36), used=[WHOLE, WHOLE], out=[WHOLE])],
    "add_n": [fwd(ONE, [pending(0)] * 3, used=[S0] * 3, out=[S0])],
}  # fmt: skip

ELEMENTWISE: dict[str, list[Row]] = {
    "add_n": [
        fwd(ONE, [t(64, 36), t(64, 36, m=[0, -1]), t(64, 36)], used=[[0, -1]] * 3, out=[[0, -1]]),
        fwd(TWO, [t(64, 36, m=[0, -1]), t(64, 36, m=[-1, 1])], used=[[0, 1]] * 2, out=[[0, 1]]),
        bwd(ONE, [t(64, 36)] * 3, t(64, 36, m=[-1, 0]), used=[[-1, 0]] * 3, out=[[-1, 0]]),
        bwd(TWO, [t(64, 36)] * 2, t(64, 36, m=[0, 1]), used=[[0, 1]] * 2, out=[[0, 1]]),
    ],
    # Of one input the halves of the last dim belong together.
    "swiglu": [
        fwd(ONE, t(64, 36, m=[-1, 0]), used=[WHOLE], out=[WHOLE]),
        fwd(TWO, t(64, 36, m=[0, 1]), used=[[0, -1]], out=[[0, -1]]),
        bwd(TWO, t(64, 36), t(64, 18, m=[1, 0]), used=[[1, -1]], out=[[1, -1]]),
    ],
    "label_smooth": [
        fwd(TWO, t(64, 36, m=[0, 1]), t(1, 36), 0.1, used=[[0, 1], [-1, 1]], out=[[0, 1]]),
    ],
    "where": [
        fwd(ONE, t(64, 36, dtype=BOOL), t(64, 36, m=[0, -1]), t(64, 36),
            used=[[0, -1]] * 3, out=[[0, -1]]),
        fwd(TWO, t(64, 36, m=[0, -1], dtype=BOOL), t(64, 36, m=[-1, 1]), t(36),
            used=[[0, 1], [0, 1], [1]], out=[[0, 1]]),
        bwd(ONE, t(64, 1, dtype=BOOL), t(64, 36), t(64, 36), t(64, 36, m=[-1, 0]),
            used=[WHOLE, [-1, 0], [-1, 0]], out=[[-1, 0]]),
        bwd(TWO, t(64, 36, dtype=BOOL), t(64, 36), t(36), t(64, 36, m=[1, 0]),
            used=[[1, 0], [1, 0], [0]], out=[[1, 0]]),
    ],
}  # fmt: skip

# --- products ------------------------------------------------------------------------------------

X, Y = (64, 32), (32, 48)
MATMUL = [
    fwd(ONE, t(*X, m=[0, -1]), t(*Y), used=[[0, -1], WHOLE], out=[[0, -1]]),
    fwd(ONE, t(*X), t(*Y, m=[-1, 0]), used=[WHOLE, [-1, 0]], out=[[-1, 0]]),
    fwd(ONE, t(*X, m=[-1, 0]), t(*Y), used=[[-1, 0], [0, -1]], out=[S0]),
    fwd(ONE, t(*X, m=[-1, 0]), t(*Y, m=[0, -1]), used=[[-1, 0], [0, -1]], out=[S0]),
    # Rows against columns: only one can be had; the smaller one, the weight, is gathered.
    fwd(ONE, t(*X, m=[0, -1]), t(*Y, m=[-1, 0]), used=[[0, -1], WHOLE], out=[[0, -1]]),
    fwd(TWO, t(*X, m=[1, 0]), t(*Y), used=[[1, 0], [0, -1]], out=[([1, -1], {0: SUM})]),
    fwd(TWO, t(*X, m=[0, -1]), t(*Y, m=[-1, 1]), used=[[0, -1], [-1, 1]], out=[[0, 1]]),
    fwd(TWO, t(*X), t(*Y, m=[1, 0]), used=[[-1, 1], [1, 0]], out=[([-1, 0], {1: SUM})]),
    fwd(TWO, t(*X, m=[-1, [0, 1]]), t(*Y), used=[[-1, [0, 1]], [[0, 1], -1]],
        out=[(WHOLE, {0: SUM, 1: SUM})]),
    fwd(TWO, t(512, 48, *X, m=[0, 1, -1, -1]), t(*Y), used=[[0, 1, -1, -1], WHOLE],
        out=[[0, 1, -1, -1]]),
    fwd(TWO, t(512, 48, *X, m=[0, -1, -1, 1]), t(1, *Y), used=[[0, -1, -1, 1], [-1, 1, -1]],
        out=[([0, -1, -1, -1], {1: SUM})]),
    # transpose_x, transpose_y; both.
    fwd(TWO, t(32, 64, m=[0, 1]), t(*Y), True, False, used=[[0, 1], [0, -1]],
        out=[([1, -1], {0: SUM})]),
    fwd(TWO, t(*X, m=[0, -1]), t(48, 32, m=[1, -1]), False, True, used=[[0, -1], [1, -1]],
        out=[[0, 1]]),
    fwd(TWO, t(512, 32, 64, m=[0, 1, -1]), t(48, 32), True, True, used=[[0, 1, -1], [-1, 1]],
        out=[([0, -1, -1], {1: SUM})]),
    # Vectors.
    fwd(ONE, t(32, m=[0]), t(32, 48), used=[[0], [0, -1]], out=[([-1], {0: SUM})]),
    fwd(TWO, t(64, 32, m=[1, 0]), t(32), used=[[1, 0], [0]], out=[([1], {0: SUM})]),
    # A sum of products is the product of the sum.
    fwd(ONE, t(*X, p=[(0, SUM)]), t(*Y), used=[S0, WHOLE], out=[S0]),
    bwd(ONE, t(*X), t(*Y), t(64, 48, m=[0, -1]), used=[[0, -1], WHOLE], out=[[0, -1]]),
    bwd(ONE, t(*X), t(*Y), t(64, 48, m=[-1, 0]), used=[WHOLE, [-1, 0]], out=[[-1, 0]]),
    bwd(TWO, t(*X), t(*Y), t(64, 48, m=[1, 0]), used=[[1, -1], [-1, 0]], out=[[1, 0]]),
    bwd(TWO, t(512, 48, *X), t(1, *Y), t(512, 48, 64, 48, m=[0, 1, -1, -1]),
        used=[[0, 1, -1, -1], [-1, -1, -1]], out=[[0, 1, -1, -1]]),
    bwd(TWO, t(32, 64), t(48, 32), t(64, 48, m=[0, 1]), True, True, used=[[-1, 0], [1, -1]],
        out=[[0, 1]]),
    # A pending sum could be a shard of the contraction, but need not: it asks for nothing.
    bwd(ONE, t(*X), t(*Y), t(64, 48, p=[(0, SUM)]), used=[WHOLE, WHOLE], out=[WHOLE]),
]  # fmt: skip

B32, B48 = (8, 16, 32), (8, 16, 48)
PRODUCTS: dict[str, list[Row]] = {
    "fused_linear_param_grad_add": [
        # Both are sums over the batch.
        fwd(ONE, t(*B32, m=[0, -1, -1]), t(*B48), used=[[0, -1, -1]] * 2,
            out=[S0, ([-1], {0: SUM})]),
        fwd(ONE, t(*B32), t(*B48, m=[-1, -1, 0]), used=[[-1, -1, -1], [-1, -1, 0]],
            out=[[-1, 0], [0]]),
        # The bias's gradient has nothing of x, and is whole where only x is sharded.
        fwd(TWO, t(*B32, m=[0, -1, 1]), t(*B48), used=[[0, -1, 1], [0, -1, -1]],
            out=[([1, -1], {0: SUM}), ([-1], {0: SUM})]),
        fwd(TWO, t(*B32, m=[0, -1, -1]), t(*B48, m=[0, -1, 1]), t(32, 48, m=[-1, 1], p=[(0, SUM)]),
            t(48, m=[1], p=[(0, SUM)]),
            used=[[0, -1, -1], [0, -1, 1], ([-1, 1], {0: SUM}), ([1], {0: SUM})],
            out=[([-1, 1], {0: SUM}), ([1], {0: SUM})]),
        bwd(ONE, t(*B32), t(*B48), t(32, 48, m=[0, -1]), t(48), used=[[-1, -1, 0], [-1, -1, -1]],
            out=[[0, -1], [-1]]),
        bwd(TWO, t(*B32), t(*B48), t(32, 48, m=[0, 1]), t(48, m=[1]),
            used=[[-1, -1, 0], [-1, -1, 1]], out=[[0, 1], [1]]),
    ],
    "bmm": [
        fwd(ONE, t(8, *X, m=[0, -1, -1]), t(8, *Y), used=[[0, -1, -1]] * 2, out=[[0, -1, -1]]),
        fwd(TWO, t(8, *X, m=[0, -1, 1]), t(8, *Y), used=[[0, -1, 1], [0, 1, -1]],
            out=[([0, -1, -1], {1: SUM})]),
        bwd(ONE, t(8, *X), t(8, *Y), t(8, 64, 48, m=[-1, -1, 0]),
            used=[[-1, -1, -1], [-1, -1, 0]], out=[[-1, -1, 0]]),
        bwd(TWO, t(8, *X), t(8, *Y), t(8, 64, 48, m=[0, 1, -1]),
            used=[[0, 1, -1], [0, -1, -1]], out=[[0, 1, -1]]),
    ],
    "einsum": [
        fwd(ONE, "ij,jk->ik", [t(*X, m=[0, -1]), t(*Y)], used=[[0, -1], WHOLE], out=[[0, -1]]),
        fwd(TWO, "bij,jk->bik", [t(8, *X, m=[0, -1, 1]), t(*Y)],
            used=[[0, -1, 1], [1, -1]], out=[([0, -1, -1], {1: SUM})]),
        bwd(ONE, "ij,jk->ik", [t(*X), t(*Y)], t(64, 48, m=[-1, 0]), used=[WHOLE, [-1, 0]],
            out=[[-1, 0]]),
        bwd(TWO, "ij,jk->ki", [t(*X), t(*Y)], t(48, 64, m=[0, 1]), used=[[1, -1], [-1, 0]],
            out=[[0, 1]]),
    ],
    "fused_gemm_epilogue": [
        fwd(ONE, t(48), t(*X, m=[0, -1]), t(*Y), used=[[-1], [0, -1], WHOLE], out=[[0, -1]]),
        # The activation is of the sum: a sharded contraction is gathered.
        fwd(ONE, t(48), t(*X, m=[-1, 0]), t(*Y), used=[[-1], WHOLE, WHOLE], out=[WHOLE]),
        fwd(TWO, t(48), t(*X, m=[0, -1]), t(*Y, m=[-1, 1]), used=[[1], [0, -1], [-1, 1]],
            out=[[0, 1]]),
        bwd(ONE, t(48), t(*X), t(*Y), t(64, 48, m=[-1, 0]), used=[[0], WHOLE, [-1, 0]],
            out=[[-1, 0]]),
        bwd(TWO, t(48), t(*X), t(*Y), t(64, 48, m=[0, 1]), used=[[1], [0, -1], [-1, 1]],
            out=[[0, 1]]),
    ],
    # Torch's weight is (out, in).
    "linear_v2": [
        fwd(ONE, t(8, *X), t(48, 32, m=[0, -1]), t(48), used=[[-1] * 3, [0, -1], [0]],
            out=[[-1, -1, 0]]),
        fwd(TWO, t(8, *X, m=[0, -1, 1]), t(48, 32), used=[[0, -1, 1], [-1, 1]],
            out=[([0, -1, -1], {1: SUM})]),
        bwd(ONE, t(8, *X), t(48, 32), t(48), t(8, 64, 48, m=[0, -1, -1]),
            used=[[0, -1, -1], WHOLE, [-1]], out=[[0, -1, -1]]),
        bwd(TWO, t(8, *X), t(48, 32), t(48), t(8, 64, 48, m=[0, -1, 1]),
            used=[[0, -1, -1], [1, -1], [1]], out=[[0, -1, 1]]),
    ],
}  # fmt: skip

# --- reductions ----------------------------------------------------------------------------------

# What is pending where a reduced dim was sharded; None: the dim is gathered first.
REDUCTIONS = {
    "reduce_base": SUM,
    "sum": SUM,
    "reduce_sum": SUM,
    "any": SUM,  # of truth values, as torch has it
    "all": "product",
    "prod": "product",
    "max": MAX,
    "reduce_max": MAX,
    "amax": MAX,
    "min": "min",
    "amin": "min",
    "frobenius_norm": "norm2",  # Paddle gathers: its sums are of the elements
    "p_norm": "norm2",
    "logsumexp": None,
}


def reductions(name: str) -> list[Row]:
    op = REDUCTIONS[name]

    def row(mesh: Any, m: list[Any], dim: list[int], kept: list[Any], keepdim: bool = False) -> Row:
        own = [kept[d] if d in dim else entry for d, entry in enumerate(m)]
        left = kept if keepdim else [e for d, e in enumerate(kept) if d not in dim]
        sums = {e: op for d, e in enumerate(m) if d in dim and e != -1}
        out = (left, sums) if op else left
        x = t(64, 32, m=m)
        return fwd(mesh, x, used=[m if op else own], out=[out], dim=dim, keepdim=keepdim)

    forward = [
        row(ONE, [0, -1], [1], [0, -1]),
        row(ONE, [-1, 0], [1], [-1, -1]),
        row(TWO, [0, 1], [1], [0, -1]),
        row(TWO, [0, 1], [0], [-1, 1]),
        row(TWO, [0, 1], [1], [0, -1], keepdim=True),
        row(TWO, [0, 1], [0, 1], [-1, -1]),
    ]
    if op in (SUM, MAX, "min", "product"):
        p = t(64, 32, m=[0, -1], p=[(1, op)])
        kept = ([0, -1], {1: op})
        forward.append(fwd(TWO, p, used=[kept], out=[([0], {1: op})], dim=[1], keepdim=False))
    backward = [
        bwd(ONE, t(64, 32), t(64, m=[0]), used=[[0, -1]], out=[[0]], dim=[1], keepdim=False),
        bwd(ONE, t(64, 32), t(1, 32, m=[-1, 0]), used=[[-1, 0]], out=[[-1, 0]], dim=[0],
            keepdim=True),
        bwd(TWO, t(64, 32), t(32, m=[1]), used=[[-1, 1]], out=[[1]], dim=[0], keepdim=False),
        bwd(TWO, t(8, 64, 32), t(8, 32, m=[1, 0]), used=[[1, -1, 0]], out=[[1, 0]], dim=[1],
            keepdim=False),
        bwd(TWO, t(64, 32), t(), used=[WHOLE], out=[[]], dim=[0, 1], keepdim=False),
    ]  # fmt: skip
    return forward + backward


def whole_reduction(op: str) -> list[Row]:
    return [
        fwd(ONE, t(64, 32, m=[0, -1]), used=[[0, -1]], out=[([], {0: op})]),
        fwd(ONE, t(64, m=[0]), used=[[0]], out=[([], {0: op})]),
        fwd(TWO, t(64, 32, m=[-1, 1]), used=[[-1, 1]], out=[([], {1: op})]),
        fwd(TWO, t(64, 32, m=[0, 1]), used=[[0, 1]], out=[([], {0: op, 1: op})]),
        bwd(ONE, t(64, 32), t(), used=[WHOLE], out=[[]]),
        bwd(TWO, t(64, 32), t(), used=[WHOLE], out=[[]]),
    ]


def arg_reduction() -> list[Row]:
    return [
        fwd(ONE, t(64, 32, m=[0, -1]), 1, used=[[0, -1]], out=[[0]]),
        fwd(ONE, t(64, 32, m=[-1, 0]), 1, used=[WHOLE], out=[[-1]]),
        fwd(TWO, t(64, 32, m=[0, 1]), 0, True, used=[[-1, 1]], out=[[-1, 1]]),
        bwd(ONE, t(64, 32), 1, i(64, m=[0]), used=[[0, -1]], out=[[0]]),
        bwd(TWO, t(64, 8, 32), 1, i(64, 32, m=[1, 0]), used=[[1, -1, 0]], out=[[1, 0]]),
    ]


# --- normalization, attention --------------------------------------------------------------------

C = (16, 8, 12)


def norm_rows(params: int, statistics: int) -> list[Row]:
    """Normalized over the last dim; the statistics have the dims before it."""
    args, weights = ([12], *[t(12)] * params, 1e-5), [[-1]] * params
    stats = (16, 8, 1)

    def outs(m: list[int]) -> list[Any]:
        return [m] * (1 + statistics)

    def wanted(m: list[int]) -> list[Any]:
        return [t(*C, m=m), *[t(*stats, m=m)] * statistics]

    return [
        fwd(ONE, t(*C, m=[0, -1, -1]), *args, used=[[0, -1, -1], *weights], out=outs([0, -1, -1])),
        # What is small is gathered, what is large moves its shard to another dim (Paddle gathers).
        fwd(ONE, t(*C, m=[-1, -1, 0]), *args, used=[[-1] * 3, *weights], out=outs([-1] * 3)),
        fwd(ONE, t(512, 256, 12, m=[-1, -1, 0]), *args, used=[[0, -1, -1], *weights],
            out=outs([0, -1, -1])),
        fwd(TWO, t(*C, m=[0, 1, -1]), *args, used=[[0, 1, -1], *weights], out=outs([0, 1, -1])),
        fwd(TWO, t(*C, m=[1, -1, 0]), *args, used=[[1, -1, -1], *weights], out=outs([1, -1, -1])),
        bwd(ONE, t(*C), *args, *wanted([-1, 0, -1]), used=[[-1, 0, -1], *weights],
            out=outs([-1, 0, -1])),
        bwd(TWO, t(*C), *args, *wanted([1, 0, -1]), used=[[1, 0, -1], *weights],
            out=outs([1, 0, -1])),
    ]  # fmt: skip


I4, N4 = (16, 8, 6, 6), [-1, -1, -1, -1]
Q = (8, 4, 16, 8)
BATCH_NORM = [[0, 1, -1, -1], [1], [1], [1], [1]]
ARGS_BN = (*[t(8)] * 4, True, 0.1, 1e-5)
ROPE, TABLE_SHAPE = (8, 16, 4, 8), (1, 16, 1, 8)
NORMS: dict[str, list[Row]] = {
    "layer_norm": norm_rows(2, 2),
    "fused_rms_norm": norm_rows(1, 1),
    "rms_norm": norm_rows(1, 1),
    "batch_norm": [
        # A sharded channel has its own statistics; those of a sharded batch come out whole.
        fwd(ONE, t(*I4, m=[-1, 0, -1, -1]), *ARGS_BN, used=[[-1, 0, -1, -1], *[[0]] * 4],
            out=[[-1, 0, -1, -1], [0], [0]]),
        fwd(TWO, t(*I4, m=[0, 1, -1, -1]), *ARGS_BN, used=BATCH_NORM,
            out=[[0, 1, -1, -1], [1], [1]]),
        bwd(ONE, t(*I4), *ARGS_BN, t(*I4, m=[0, -1, -1, -1]), t(8), t(8),
            used=[[0, -1, -1, -1], *[[-1]] * 4], out=[[0, -1, -1, -1], [-1], [-1]]),
        bwd(TWO, t(*I4), *ARGS_BN, t(*I4, m=[0, 1, -1, -1]), t(8, m=[1]), t(8, m=[1]),
            used=BATCH_NORM, out=[[0, 1, -1, -1], [1], [1]]),
    ],
    "group_norm": [
        # Channels of a group belong together: torch, and so we, keep the batch only.
        fwd(ONE, t(*I4, m=[0, -1, -1, -1]), t(8), t(8), 16, 8, 36, 4, 1e-5,
            used=[[0, -1, -1, -1], [-1], [-1]], out=[[0, -1, -1, -1], [0, -1], [0, -1]]),
        fwd(TWO, t(*I4, m=[0, 1, -1, -1]), t(8), t(8), 16, 8, 36, 4, 1e-5,
            used=[[0, -1, -1, -1], [-1], [-1]], out=[[0, -1, -1, -1], [0, -1], [0, -1]]),
        bwd(ONE, t(*I4), t(8), t(8), 16, 8, 36, 4, 1e-5, t(*I4, m=[0, -1, -1, -1]),
            t(16, 4, m=[0, -1]), t(16, 4, m=[0, -1]),
            used=[[0, -1, -1, -1], [-1], [-1]], out=[[0, -1, -1, -1], [0, -1], [0, -1]]),
        bwd(TWO, t(*I4), t(8), t(8), 16, 8, 36, 4, 1e-5, t(*I4, m=[1, 0, -1, -1]),
            t(16, 4, m=[1, -1]), t(16, 4, m=[1, -1]),
            used=[[1, -1, -1, -1], [-1], [-1]], out=[[1, -1, -1, -1], [1, -1], [1, -1]]),
    ],
    "instance_norm": [
        fwd(ONE, t(*I4, m=[-1, 0, -1, -1]), t(8), t(8), used=[[-1, 0, -1, -1], [0], [0]],
            out=[[-1, 0, -1, -1]]),
        fwd(TWO, t(*I4, m=[0, -1, 1, -1]), t(8), t(8), used=[[0, -1, -1, -1], [-1], [-1]],
            out=[[0, -1, -1, -1]]),
        bwd(ONE, t(*I4), t(*I4, m=[0, -1, -1, -1]), used=[[0, -1, -1, -1]], out=[[0, -1, -1, -1]]),
        bwd(TWO, t(*I4), t(8), t(8), t(*I4, m=[1, 0, -1, -1]), used=[[1, 0, -1, -1], [0], [0]],
            out=[[1, 0, -1, -1]]),
    ],
    # Torch's dims are batch, heads, positions, features.
    "flash_attention": [
        fwd(ONE, *[t(*Q, m=[0, -1, -1, -1])] * 3, used=[[0, -1, -1, -1]] * 3,
            out=[[0, -1, -1, -1]]),
        fwd(ONE, t(*Q, m=[-1, -1, 0, -1]), t(*Q), t(*Q), used=[[-1, -1, 0, -1], N4, N4],
            out=[[-1, -1, 0, -1]]),
        # Positions of keys are whole; features too.
        fwd(ONE, *[t(*Q, m=[-1, -1, 0, -1])] * 3, used=[[-1, -1, 0, -1], N4, N4],
            out=[[-1, -1, 0, -1]]),
        fwd(TWO, *[t(*Q, m=[0, 1, -1, -1])] * 3, used=[[0, 1, -1, -1]] * 3, out=[[0, 1, -1, -1]]),
        fwd(TWO, t(*Q, m=[0, -1, 1, -1]), *[t(*Q, m=[0, -1, -1, -1])] * 2,
            used=[[0, -1, 1, -1], [0, -1, -1, -1], [0, -1, -1, -1]], out=[[0, -1, 1, -1]]),
        bwd(ONE, *[t(*Q)] * 3, t(*Q, m=[-1, 0, -1, -1]), used=[[-1, 0, -1, -1]] * 3,
            out=[[-1, 0, -1, -1]]),
        bwd(TWO, *[t(*Q)] * 3, t(*Q, m=[0, -1, 1, -1]),
            used=[[0, -1, 1, -1], [0, -1, -1, -1], [0, -1, -1, -1]], out=[[0, -1, 1, -1]]),
    ],
    "fused_rotary_position_embedding": [
        fwd(ONE, t(*ROPE, m=[0, -1, -1, -1]), t(*ROPE), None, t(*TABLE_SHAPE), t(*TABLE_SHAPE),
            used=[[0, -1, -1, -1]] * 2 + [N4] * 2, out=[[0, -1, -1, -1]] * 2),
        # A shard of the positions takes its rows of the tables; halves of a head stay together.
        fwd(TWO, t(*ROPE, m=[0, 1, -1, -1]), t(*ROPE, m=[0, 1, -1, -1]), None, t(*TABLE_SHAPE),
            t(*TABLE_SHAPE), used=[[0, 1, -1, -1]] * 2 + [[-1, 1, -1, -1]] * 2,
            out=[[0, 1, -1, -1]] * 2),
        fwd(TWO, t(*ROPE, m=[0, -1, -1, 1]), None, None, t(*TABLE_SHAPE), t(*TABLE_SHAPE),
            used=[[0, -1, -1, -1], N4, N4], out=[[0, -1, -1, -1]]),
        bwd(ONE, t(*ROPE), None, None, t(*TABLE_SHAPE), t(*TABLE_SHAPE),
            [t(*ROPE, m=[-1, -1, 0, -1])], used=[[-1, -1, 0, -1], N4, N4],
            out=[[-1, -1, 0, -1]]),
        bwd(TWO, t(*ROPE), t(*ROPE), t(*ROPE), t(*TABLE_SHAPE), t(*TABLE_SHAPE),
            [t(*ROPE, m=[-1, 0, 1, -1])] * 3, used=[[-1, 0, 1, -1]] * 3 + [[-1, 0, -1, -1]] * 2,
            out=[[-1, 0, 1, -1]] * 3),
    ],
}  # fmt: skip

# --- shape ---------------------------------------------------------------------------------------

RESHAPE = [
    # seeds/001: two dims flattened, one kept, one split.
    fwd(ONE, t(8, 12, 24, 48, m=[0, -1, -1, -1]), [96, 24, 8, 6], used=[[0, -1, -1, -1]],
        out=[[0, -1, -1, -1]]),
    fwd(TWO, t(8, 12, 24, 48, m=[-1, -1, 0, 1]), [96, 24, 8, 6], used=[[-1, -1, 0, 1]],
        out=[[-1, 0, 1, -1]]),
    # A shard of an inner flattened dim is strided. Paddle gathers it.
    fwd(TWO, t(8, 12, 24, 48, m=[-1, 0, -1, 1]), [96, 24, 48], used=[[-1, 0, -1, 1]],
        out=[[0, -1, 1]]),
    # A factor that the mesh dim does not divide.
    fwd(ONE, t(12, 8, m=[0, -1]), [3, 4, 8], used=[WHOLE], out=[[-1, -1, -1]]),
    fwd(TWO, t(6, 8, m=[-1, 1]), [6, -1, 2], used=[[-1, 1]], out=[[-1, 1, -1]]),
    bwd(ONE, t(6, 12, 24, 48), [72, 24, 6, 8], t(72, 24, 6, 8, m=[-1, 0, -1, -1]),
        used=[[-1, -1, 0, -1]], out=[[-1, 0, -1, -1]]),
    bwd(TWO, t(8, 12, 24, 48), [96, 24, 8, 6], t(96, 24, 8, 6, m=[0, -1, 1, -1]),
        used=[[0, -1, -1, 1]], out=[[0, -1, 1, -1]]),
]  # fmt: skip
UNSQUEEZE = [
    fwd(ONE, t(64, 36, m=[0, -1]), 0, used=[[0, -1]], out=[[-1, 0, -1]]),
    fwd(TWO, t(64, 36, m=[0, 1]), 1, used=[[0, 1]], out=[[0, -1, 1]]),
    fwd(TWO, t(64, 36, m=[1, 0]), -1, used=[[1, 0]], out=[[1, 0, -1]]),
    bwd(ONE, t(64, 36), 1, t(64, 1, 36, m=[-1, -1, 0]), used=[[-1, 0]], out=[[-1, -1, 0]]),
    bwd(TWO, t(64, 36), 0, t(1, 64, 36, m=[-1, 1, 0]), used=[[1, 0]], out=[[-1, 1, 0]]),
]
TRANSPOSE = [
    fwd(ONE, t(64, 48, 36, m=[0, -1, -1]), [2, 0, 1], used=[[0, -1, -1]], out=[[-1, 0, -1]]),
    fwd(TWO, t(64, 48, 36, m=[0, 1, -1]), [1, 0, 2], used=[[0, 1, -1]], out=[[1, 0, -1]]),
    fwd(TWO, t(64, 48, m=[[0, 1], -1]), [-1, -2], used=[[[0, 1], -1]], out=[[-1, [0, 1]]]),
    fwd(ONE, t(64, 48, p=[(0, SUM)]), [1, 0], used=[S0], out=[S0]),
    bwd(ONE, t(64, 48, 36), [2, 0, 1], t(36, 64, 48, m=[-1, 0, -1]), used=[[0, -1, -1]],
        out=[[-1, 0, -1]]),
    bwd(TWO, t(64, 48, 36), [2, 0, 1], t(36, 64, 48, m=[0, -1, 1]), used=[[-1, 1, 0]],
        out=[[0, -1, 1]]),
]  # fmt: skip
EXPAND_AS = [
    fwd(ONE, t(36, m=[0]), t(64, 36), used=[[0], WHOLE], out=[[-1, 0]]),
    fwd(TWO, t(64, 1, m=[0, -1]), t(8, 64, 36), used=[[0, -1], [-1] * 3], out=[[-1, 0, -1]]),
    bwd(ONE, t(64, 1), t(64, 36), t(64, 36, m=[0, -1]), used=[[0, -1], [0, -1]], out=[[0, -1]]),
    # What only the result has may be sharded there; a broadcast dim is made whole.
    bwd(TWO, t(64, 1), t(64, 36), t(64, 36, m=[0, 1]), used=[[0, -1], [0, -1]], out=[[0, -1]]),
]


def slices(step: int) -> list[Row]:
    n = 32 // step
    return [
        fwd(ONE, t(64, 36, m=[0, -1]), 1, 4, 36, step, used=[[0, -1]], out=[[0, -1]]),
        fwd(ONE, t(64, 36, m=[-1, 0]), 1, 4, 36, step, used=[WHOLE], out=[WHOLE]),
        fwd(TWO, t(64, 36, m=[0, 1]), 1, 4, 36, step, used=[[0, -1]], out=[[0, -1]]),
        bwd(ONE, t(64, 36), 1, 4, 36, step, t(64, n, m=[0, -1]), used=[[0, -1]], out=[[0, -1]]),
        bwd(TWO, t(64, 36), 1, 4, 36, step, t(64, n, m=[0, 1]), used=[[0, -1]], out=[[0, -1]]),
    ]


A, H = (64, 36), (32, 36)
SHAPES: dict[str, list[Row]] = {
    **dict.fromkeys(("reshape", "reshape2"), RESHAPE),
    **dict.fromkeys(("unsqueeze", "unsqueeze2"), UNSQUEEZE),
    **dict.fromkeys(("transpose", "transpose2"), TRANSPOSE),
    **dict.fromkeys(("expand_as", "expand_as_v2"), EXPAND_AS),
    "slice": [
        *slices(1),
        # All of it is no cut.
        fwd(TWO, t(64, 36, m=[0, 1]), 1, 0, 36, used=[[0, 1]], out=[[0, 1]]),
    ],
    "strided_slice": slices(2),
    "squeeze": [
        fwd(ONE, t(64, 1, 36, m=[0, -1, -1]), [1], used=[[0, -1, -1]], out=[[0, -1]]),
        fwd(TWO, t(64, 1, 36, m=[0, -1, 1]), [1], used=[[0, -1, 1]], out=[[0, 1]]),
        fwd(TWO, t(1, 64, 1, m=[-1, 1, 0]), [0, 2], used=[[-1, 1, -1]], out=[[1]]),
        bwd(ONE, t(64, 1, 36), [1], t(64, 36, m=[-1, 0]), used=[[-1, -1, 0]], out=[[-1, 0]]),
        bwd(TWO, t(1, 64, 36), [0], t(64, 36, m=[1, 0]), used=[[-1, 1, 0]], out=[[1, 0]]),
    ],
    "flatten": [
        fwd(ONE, t(16, 8, 36, m=[0, -1, -1]), 0, 1, used=[[0, -1, -1]], out=[[0, -1]]),
        fwd(TWO, t(16, 8, 36, m=[1, -1, 0]), 0, 1, used=[[1, -1, 0]], out=[[1, 0]]),
        fwd(TWO, t(8, 16, 36, m=[[0, 1], -1, -1]), 0, 2, used=[[[0, 1], -1, -1]], out=[[[0, 1]]]),
        bwd(ONE, t(16, 8, 36), 0, 1, t(128, 36, m=[0, -1]), used=[[0, -1, -1]], out=[[0, -1]]),
        bwd(TWO, t(16, 8, 36), 1, 2, t(16, 288, m=[0, 1]), used=[[0, 1, -1]], out=[[0, 1]]),
    ],
    "tile": [
        fwd(ONE, t(64, 36, m=[0, -1]), [1, 2], used=[[0, -1]], out=[[0, -1]]),
        fwd(TWO, t(64, 36, m=[0, 1]), [2, 1, 2], used=[[0, -1]], out=[[-1, 0, -1]]),
        bwd(ONE, t(64, 36), [2, 1], t(128, 36, m=[-1, 0]), used=[[-1, 0]], out=[[-1, 0]]),
        bwd(TWO, t(64, 36), [1, 2], t(64, 72, m=[0, 1]), used=[[0, -1]], out=[[0, -1]]),
    ],
    "expand": [
        fwd(ONE, t(64, 1, m=[0, -1]), [64, 36], used=[[0, -1]], out=[[0, -1]]),
        fwd(TWO, t(64, 1, 36, m=[0, -1, 1]), [8, 64, 5, 36], used=[[0, -1, 1]],
            out=[[-1, 0, -1, 1]]),
        bwd(ONE, t(64, 1), [64, 36], t(64, 36, m=[0, -1]), used=[[0, -1]], out=[[0, -1]]),
        bwd(TWO, t(64, 1), [8, 64, 36], t(8, 64, 36, m=[-1, 1, 0]), used=[[1, -1]],
            out=[[-1, 1, -1]]),
    ],
    "stack": [
        fwd(ONE, [t(*A, m=[0, -1]), t(*A)], 0, used=[[0, -1]] * 2, out=[[-1, 0, -1]]),
        fwd(TWO, [t(*A, m=[0, -1]), t(*A, m=[-1, 1])], 1, used=[[0, 1]] * 2, out=[[0, -1, 1]]),
        bwd(ONE, [t(*A)] * 2, -1, t(64, 36, 2, m=[-1, 0, -1]), used=[[-1, 0]] * 2,
            out=[[-1, 0, -1]]),
        bwd(TWO, [t(*A)] * 2, 0, t(2, 64, 36, m=[-1, 1, 0]), used=[[1, 0]] * 2,
            out=[[-1, 1, 0]]),
    ],
    "concat": [
        fwd(ONE, [t(*A, m=[-1, 0]), t(*H)], 0, used=[[-1, 0]] * 2, out=[[-1, 0]]),
        fwd(ONE, [t(*A, m=[0, -1]), t(*A)], 0, used=[WHOLE] * 2, out=[WHOLE]),
        # The layout of the larger one is the cheaper one for both.
        fwd(ONE, [t(8, 16, 4, m=[0, -1, -1]), t(8, 16, 400, m=[-1, 0, -1])], 2,
            used=[[-1, 0, -1]] * 2, out=[[-1, 0, -1]]),
        fwd(TWO, [t(*A, m=[0, 1]), t(*H)], 0, used=[[-1, 1]] * 2, out=[[-1, 1]]),
        bwd(ONE, [t(*A), t(*H)], 0, t(96, 36, m=[-1, 0]), used=[[-1, 0]] * 2, out=[[-1, 0]]),
        bwd(TWO, [t(*A), t(*H)], 0, t(96, 36, m=[0, 1]), used=[[-1, 1]] * 2, out=[[-1, 1]]),
    ],
    "split": [
        fwd(ONE, t(*A, m=[0, -1]), [12, 24], 1, used=[[0, -1]], out=[[0, -1]] * 2),
        fwd(TWO, t(*A, m=[0, 1]), [12, 24], 1, used=[[0, -1]], out=[[0, -1]] * 2),
        bwd(ONE, t(*A), [32, 32], 0, [t(*H, m=[-1, 0])] * 2, used=[[-1, 0]], out=[[-1, 0]] * 2),
        bwd(TWO, t(*A), [32, 32], 0, [t(*H, m=[0, 1])] * 2, used=[[-1, 1]], out=[[-1, 1]] * 2),
    ],
    "split_with_num": [
        fwd(ONE, t(*A, m=[0, -1]), 2, 1, used=[[0, -1]], out=[[0, -1]] * 2),
        fwd(TWO, t(*A, m=[1, 0]), 4, 0, used=[[-1, 0]], out=[[-1, 0]] * 4),
        bwd(ONE, t(*A), 2, 0, [t(*H, m=[-1, 0])] * 2, used=[[-1, 0]], out=[[-1, 0]] * 2),
        bwd(TWO, t(*A), 2, 0, [t(*H, m=[0, 1])] * 2, used=[[-1, 1]], out=[[-1, 1]] * 2),
    ],
    "unbind": [
        fwd(ONE, t(3, *A, m=[-1, 0, -1]), 0, used=[[-1, 0, -1]], out=[[0, -1]] * 3),
        fwd(TWO, t(64, 4, 36, m=[0, 1, -1]), 1, used=[[0, -1, -1]], out=[[0, -1]] * 4),
        bwd(ONE, t(64, 2, 36), 1, [t(*A, m=[0, -1])] * 2, used=[[0, -1, -1]], out=[[0, -1]] * 2),
        bwd(TWO, t(2, *A), 0, [t(*A, m=[1, 0])] * 2, used=[[-1, 1, 0]], out=[[1, 0]] * 2),
    ],
    "pad": [
        fwd(ONE, t(*A, m=[0, -1]), [1, 1], used=[[0, -1]], out=[[0, -1]]),
        fwd(TWO, t(*A, m=[0, 1]), [0, 4], used=[[0, -1]], out=[[0, -1]]),
        bwd(ONE, t(*A), [0, 0, 2, 2], t(68, 36, m=[-1, 0]), used=[[-1, 0]], out=[[-1, 0]]),
        bwd(TWO, t(*A), [0, 4], t(64, 40, m=[0, 1]), used=[[0, -1]], out=[[0, -1]]),
    ],
    "roll": [
        fwd(ONE, t(*A, m=[0, -1]), [1], [1], used=[[0, -1]], out=[[0, -1]]),
        fwd(TWO, t(*A, m=[0, 1]), [1], [1], used=[[0, -1]], out=[[0, -1]]),
        bwd(ONE, t(*A), [1], [0], t(*A, m=[-1, 0]), used=[[-1, 0]], out=[[-1, 0]]),
        bwd(TWO, t(*A), [1], [1], t(*A, m=[1, 0]), used=[[1, -1]], out=[[1, -1]]),
    ],
}  # fmt: skip

# --- softmax, losses -----------------------------------------------------------------------------

SOFTMAX = [
    fwd(ONE, t(*A, m=[0, -1]), 1, False, used=[[0, -1]], out=[[0, -1]]),
    fwd(ONE, t(*A, m=[-1, 0]), -1, False, used=[WHOLE], out=[WHOLE]),
    fwd(TWO, t(*C, m=[0, 1, -1]), 2, False, used=[[0, 1, -1]], out=[[0, 1, -1]]),
    fwd(TWO, t(*C, m=[1, -1, 0]), 2, False, used=[[1, -1, -1]], out=[[1, -1, -1]]),
    fwd(ONE, t(*A, p=[(0, SUM)]), 1, False, used=[WHOLE], out=[WHOLE]),
    bwd(ONE, t(*A), 1, False, t(*A, m=[0, -1]), used=[[0, -1]], out=[[0, -1]]),
    bwd(TWO, t(*C), 1, False, t(*C, m=[0, -1, 1]), used=[[0, -1, 1]], out=[[0, -1, 1]]),
    bwd(TWO, t(*A), 1, False, t(*A, m=[0, 1]), used=[[0, -1]], out=[[0, -1]]),
]
ROWS_KEPT = [[0, -1], [0, -1]]
CROSS_ENTROPY = [
    fwd(ONE, t(*A, m=[0, -1]), i(64, 1), used=ROWS_KEPT, out=ROWS_KEPT),
    fwd(ONE, t(*A, m=[-1, 0]), i(64, 1), used=[WHOLE] * 2, out=[WHOLE] * 2),
    fwd(TWO, t(*A, m=[0, 1]), i(64, 1), used=ROWS_KEPT, out=ROWS_KEPT),
    fwd(TWO, t(8, *A, m=[0, 1, -1]), t(8, *A), True, used=[[0, 1, -1]] * 2, out=[[0, 1, -1]] * 2),
    fwd(TWO, t(8, 36, 64, m=[0, -1, 1]), i(8, 1, 64), axis=1, used=[[0, -1, 1]] * 2,
        out=[[0, -1, 1]] * 2),
    bwd(ONE, t(*A), i(64, 1), t(*A, m=[0, -1]), t(64, 1, m=[0, -1]), used=ROWS_KEPT, out=ROWS_KEPT),
    bwd(TWO, t(8, *A), i(8, 64, 1), t(8, *A, m=[1, 0, -1]), t(8, 64, 1, m=[1, 0, -1]),
        used=[[1, 0, -1]] * 2, out=[[1, 0, -1]] * 2),
]  # fmt: skip


def parallel_cross_entropy(*labels: TensorSpec) -> list[Row]:
    """Classes may be sharded, which other losses gather: the op reduces over them itself."""
    whole, rows = [[-1, -1]] * len(labels), [[0, -1]] * len(labels)
    return [
        fwd(ONE, t(*A, m=[-1, 0]), *labels, used=[[-1, 0], *whole], out=[[-1, 0], WHOLE]),
        fwd(TWO, t(*A, m=[0, 1]), *labels, used=[[0, 1], *rows], out=[[0, 1], [0, -1]]),
        bwd(ONE, t(*A), *labels, t(*A, m=[0, -1]), t(64, 1, m=[0, -1]), used=[[0, -1], *rows],
            out=[[0, -1], [0, -1]]),
        bwd(TWO, t(*A), *labels, t(*A, m=[0, 1]), t(64, 1, m=[0, -1]), used=[[0, 1], *rows],
            out=[[0, 1], [0, -1]]),
    ]  # fmt: skip


LOSSES: dict[str, list[Row]] = {
    **dict.fromkeys(("softmax", "log_softmax"), SOFTMAX),
    **dict.fromkeys(("cross_entropy_with_softmax", "softmax_with_cross_entropy"), CROSS_ENTROPY),
    "c_softmax_with_cross_entropy": parallel_cross_entropy(i(64, 1)),
    "c_softmax_with_multi_label_cross_entropy": parallel_cross_entropy(i(64, 3), t(64, 3)),
}

# --- indexing, scans -----------------------------------------------------------------------------

WEIGHT, IDS = (512, 768), (8, 16)
EMBEDDING = [
    fwd(ONE, t(*WEIGHT, m=[-1, 0]), i(*IDS), used=[[-1, 0], WHOLE], out=[[-1, -1, 0]]),
    # Each device finds the words it has; the others give zeros.
    fwd(ONE, t(*WEIGHT, m=[0, -1]), i(*IDS), used=[[0, -1], WHOLE], out=[([-1] * 3, {0: SUM})]),
    fwd(TWO, t(*WEIGHT, m=[-1, 1]), i(*IDS, m=[0, -1]), used=[[-1, 1], [0, -1]],
        out=[[0, -1, 1]]),
    fwd(TWO, t(*WEIGHT, m=[1, -1]), i(*IDS, m=[0, -1]), used=[[1, -1], [0, -1]],
        out=[([0, -1, -1], {1: SUM})]),
    bwd(ONE, t(*WEIGHT), i(*IDS), t(*IDS, 768, m=[-1, 0, -1]), used=[WHOLE, [-1, 0]],
        out=[[-1, 0, -1]]),
    bwd(TWO, t(*WEIGHT), i(*IDS), t(*IDS, 768, m=[0, -1, 1]), used=[[-1, 1], [0, -1]],
        out=[[0, -1, 1]]),
]  # fmt: skip
INDEX_SELECT = [
    fwd(ONE, t(*A, m=[-1, 0]), 0, i(16), used=[[-1, 0], [-1]], out=[[-1, 0]]),
    fwd(ONE, t(*A), 0, i(16, m=[0]), used=[WHOLE, [0]], out=[[0, -1]]),
    fwd(TWO, t(*A, m=[0, 1]), 0, i(16), used=[[-1, 1], [-1]], out=[[-1, 1]]),
    bwd(ONE, t(*A), 1, i(16), t(64, 16, m=[0, -1]), used=[[0, -1], [-1]], out=[[0, -1]]),
    bwd(TWO, t(*A), 1, i(16), t(64, 16, m=[0, 1]), used=[[0, -1], [1]], out=[[0, 1]]),
]
TRIANGLE = [
    # Paddle gathers the last two dims; here a device knows where its part is.
    fwd(ONE, t(*A, m=[0, -1]), used=[[0, -1]], out=[[0, -1]]),
    fwd(TWO, t(8, *A, m=[0, -1, 1]), used=[[0, -1, 1]], out=[[0, -1, 1]]),
    bwd(ONE, t(*A), t(*A, m=[-1, 0]), used=[[-1, 0]], out=[[-1, 0]]),
    bwd(TWO, t(8, *A), t(8, *A, m=[1, 0, -1]), used=[[1, 0, -1]], out=[[1, 0, -1]]),
]
PUT = [
    fwd(ONE, t(*A, m=[-1, 0]), [i(8)], t(8, 36), used=[[-1, 0], [-1], [-1, 0]], out=[[-1, 0]]),
    # Rows that anyone may write are whole.
    fwd(ONE, t(*A, m=[0, -1]), [i(8)], t(8, 36), used=[WHOLE, [-1], WHOLE], out=[WHOLE]),
    fwd(TWO, t(*A, m=[0, 1]), [i(8)], t(8, 36), used=[[-1, 1], [-1], [-1, 1]], out=[[-1, 1]]),
    bwd(ONE, t(*A), [i(8)], t(8, 36), t(*A, m=[-1, 0]), used=[[-1, 0], [-1], [-1, 0]],
        out=[[-1, 0]]),
    bwd(TWO, t(*A), [i(8)], t(8, 36), t(*A, m=[0, 1]), used=[[-1, 1], [-1], [-1, 1]],
        out=[[-1, 1]]),
]  # fmt: skip


def scan(n_outputs: int, *args: Any) -> list[Row]:
    """The last dim is scanned."""

    def outs(m: list[int]) -> list[Any]:
        return [m] * n_outputs

    def wanted(shape: tuple[int, ...], m: list[int]) -> list[TensorSpec]:
        return [t(*shape, m=m), i(*shape, m=m)][:n_outputs]

    return [
        fwd(ONE, t(*A, m=[0, -1]), *args, used=[[0, -1]], out=outs([0, -1])),
        fwd(ONE, t(*A, m=[-1, 0]), *args, used=[WHOLE], out=outs(WHOLE)),
        fwd(TWO, t(8, *A, m=[1, 0, -1]), *args, used=[[1, 0, -1]], out=outs([1, 0, -1])),
        fwd(TWO, t(*A, m=[0, 1]), *args, used=[[0, -1]], out=outs([0, -1])),
        bwd(ONE, t(*A), *args, *wanted(A, [0, -1]), used=[[0, -1]], out=outs([0, -1])),
        bwd(TWO, t(8, *A), *args, *wanted((8, *A), [0, 1, -1]), used=[[0, 1, -1]],
            out=outs([0, 1, -1])),
        bwd(TWO, t(*A), *args, *wanted(A, [0, 1]), used=[[0, -1]], out=outs([0, -1])),
    ]  # fmt: skip


G = (16, 36)
INDEXING: dict[str, list[Row]] = {
    **dict.fromkeys(("embedding", "lookup_table_v2", "c_embedding"), EMBEDDING),
    **dict.fromkeys(("gather", "index_select"), INDEX_SELECT),
    **dict.fromkeys(("triu", "tril_triu"), TRIANGLE),
    **dict.fromkeys(("scatter", "index_put"), PUT),
    "argmax": arg_reduction(),
    "argmin": arg_reduction(),
    "cumsum": scan(1, -1),
    "cummax": scan(2, -1),
    "cummin": scan(2, -1),
    "argsort": scan(1, -1),
    "topk": scan(2, 36, -1),
    "gather_nd": [
        # x[index[..., 0], index[..., 1]]: two dims looked up, one left alone.
        fwd(ONE, t(8, 16, 36, m=[-1, -1, 0]), i(64, 2), used=[[-1, -1, 0], WHOLE], out=[[-1, 0]]),
        fwd(ONE, t(8, 16, 36, m=[0, -1, -1]), i(64, 2), used=[[-1] * 3, WHOLE], out=[WHOLE]),
        fwd(TWO, t(8, 16, 36, m=[-1, -1, 1]), i(64, 2, m=[0, -1]),
            used=[[-1, -1, 1], [0, -1]], out=[[0, 1]]),
        bwd(ONE, t(8, 16, 36), i(64, 2), t(64, 36, m=[0, -1]), used=[[-1] * 3, [0, -1]],
            out=[[0, -1]]),
        bwd(TWO, t(8, 16, 36), i(64, 2), t(64, 36, m=[1, 0]), used=[[-1, -1, 0], [1, -1]],
            out=[[1, 0]]),
    ],
    "one_hot": [
        fwd(ONE, i(*IDS, m=[0, -1]), 10, used=[[0, -1]], out=[[0, -1, -1]]),
        fwd(TWO, i(*IDS, m=[0, 1]), 10, used=[[0, 1]], out=[[0, 1, -1]]),
        bwd(ONE, i(*IDS), 10, i(*IDS, 10, m=[-1, 0, -1]), used=[[-1, 0]], out=[[-1, 0, -1]]),
        bwd(TWO, i(*IDS), 10, i(*IDS, 10, m=[1, -1, 0]), used=[[1, -1]], out=[[1, -1, -1]]),
    ],
    "put_along_axis": [
        fwd(ONE, t(*A, m=[-1, 0]), 0, i(*G), t(*G), used=[[-1, 0]] * 3, out=[[-1, 0]]),
        fwd(TWO, t(*A, m=[0, 1]), 0, i(*G), t(*G), used=[[-1, 1]] * 3, out=[[-1, 1]]),
        bwd(ONE, t(*A), 0, i(*G), t(*G), t(*A, m=[-1, 0]), used=[[-1, 0]] * 3, out=[[-1, 0]]),
        bwd(TWO, t(*A), 0, i(*G), t(*G), t(*A, m=[1, 0]), used=[[-1, 0]] * 3, out=[[-1, 0]]),
    ],
    "take_along_axis": [
        fwd(ONE, t(*A, m=[-1, 0]), 0, i(*G), used=[[-1, 0]] * 2, out=[[-1, 0]]),
        fwd(TWO, t(*A), 0, i(*G, m=[0, -1]), used=[WHOLE, [0, -1]], out=[[0, -1]]),
        fwd(TWO, t(*A, m=[-1, 1]), 0, i(*G, m=[0, 1]), used=[[-1, 1], [0, 1]], out=[[0, 1]]),
        bwd(ONE, t(*A), 0, i(*G), t(*G, m=[0, -1]), used=[WHOLE, [0, -1]], out=[[0, -1]]),
        bwd(TWO, t(*A), 0, i(*G), t(*G, m=[0, 1]), used=[[-1, 1], [0, 1]], out=[[0, 1]]),
    ],
    # How many there are depends on the values, so everyone must see all of them.
    "nonzero": [
        fwd(ONE, t(*A, m=[0, -1]), used=[WHOLE], out=[WHOLE], out_shapes=[(9, 2)]),
        fwd(TWO, t(*A, m=[0, 1]), used=[WHOLE], out=[WHOLE], out_shapes=[(9, 2)]),
        bwd(ONE, t(*A), i(9, 2, m=[0, -1]), used=[WHOLE], out=[WHOLE]),
        bwd(TWO, t(*A), i(9, 2, m=[1, 0]), used=[WHOLE], out=[WHOLE]),
    ],
    "unique": [
        fwd(ONE, t(*A, m=[0, -1]), used=[WHOLE], out=[[-1], WHOLE, [-1]],
            out_shapes=[(9,), A, (9,)]),
        fwd(TWO, t(*A, m=[0, 1]), used=[WHOLE], out=[[-1], WHOLE, [-1]],
            out_shapes=[(9,), A, (9,)]),
        bwd(ONE, t(*A), t(9, m=[0]), i(*A), i(9), used=[WHOLE], out=[[-1], WHOLE, [-1]]),
        bwd(TWO, t(*A), t(9), i(*A, m=[0, 1]), i(9), used=[WHOLE], out=[[-1], WHOLE, [-1]]),
    ],
}  # fmt: skip

# --- convolution ---------------------------------------------------------------------------------


def convolution(spatial: int, *args: Any, transposed: bool = False) -> list[Row]:
    """n c *, o c * -> n o *."""
    rest = [-1] * spatial
    x, out = (8, 16, *[6] * spatial), (8, 32, *[6] * spatial)
    w = (16, 32, *[1] * spatial) if transposed else (32, 16, *[1] * spatial)

    def weight(o: int, c: int) -> list[int]:
        return [c, o, *rest] if transposed else [o, c, *rest]

    return [
        fwd(ONE, t(*x, m=[0, -1, *rest]), t(*w), *args, used=[[0, -1, *rest], weight(-1, -1)],
            out=[[0, -1, *rest]]),
        fwd(ONE, t(*x), t(*w, m=weight(0, -1)), *args, used=[[-1, -1, *rest], weight(0, -1)],
            out=[[-1, 0, *rest]]),
        # Contracted channels.
        fwd(ONE, t(*x, m=[-1, 0, *rest]), t(*w), *args, used=[[-1, 0, *rest], weight(-1, 0)],
            out=[([-1, -1, *rest], {0: SUM})]),
        fwd(TWO, t(*x, m=[0, -1, *rest]), t(*w, m=weight(1, -1)), *args,
            used=[[0, -1, *rest], weight(1, -1)], out=[[0, 1, *rest]]),
        fwd(TWO, t(*x, m=[0, 1, *rest]), t(*w, m=weight(-1, 1)), *args,
            used=[[0, 1, *rest], weight(-1, 1)], out=[([0, -1, *rest], {1: SUM})]),
        bwd(ONE, t(*x), t(*w), *args, t(*out, m=[-1, 0, *rest]),
            used=[[-1, -1, *rest], weight(0, -1)], out=[[-1, 0, *rest]]),
        bwd(TWO, t(*x), t(*w), *args, t(*out, m=[0, 1, *rest]),
            used=[[0, -1, *rest], weight(1, -1)], out=[[0, 1, *rest]]),
    ]  # fmt: skip


D4, DW = (8, 16, 6, 6), (16, 1, 1, 1)
DEPTHWISE = (None, [1, 1], [0, 0], [1, 1], 16)
CONVOLUTIONS: dict[str, list[Row]] = {
    "conv2d": convolution(2),
    "conv3d": convolution(3),
    "conv2d_transpose": convolution(
        2, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1, transposed=True
    ),
    # A channel has its own filter.
    "depthwise_conv2d": [
        fwd(ONE, t(*D4, m=[-1, 0, -1, -1]), t(*DW), *DEPTHWISE,
            used=[[-1, 0, -1, -1], [0, -1, -1, -1]], out=[[-1, 0, -1, -1]]),
        fwd(TWO, t(*D4, m=[0, 1, -1, -1]), t(*DW), *DEPTHWISE,
            used=[[0, 1, -1, -1], [1, -1, -1, -1]], out=[[0, 1, -1, -1]]),
        bwd(ONE, t(*D4), t(*DW), *DEPTHWISE, t(*D4, m=[0, -1, -1, -1]),
            used=[[0, -1, -1, -1], N4], out=[[0, -1, -1, -1]]),
        bwd(TWO, t(*D4), t(*DW), *DEPTHWISE, t(*D4, m=[1, 0, -1, -1]),
            used=[[1, 0, -1, -1], [0, -1, -1, -1]], out=[[1, 0, -1, -1]]),
    ],
}  # fmt: skip

# --- optimizers, loss scaling --------------------------------------------------------------------

ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8,
        "amsgrad": False, "maximize": False}  # fmt: skip
SGD = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False,
       "maximize": False, "is_first_step": False}  # fmt: skip


def adam() -> list[Row]:
    """All that belongs to a parameter goes as it does; the step counts are whole."""

    def lists(m: Any) -> tuple[Any, ...]:
        return ([t(*A, m=m)], [t(*A)], [t(*A)], [t(*A)], [])

    def wanted(m: Any) -> tuple[Any, ...]:
        return (*[[t(*A, m=m)]] * 4, [])

    return [
        fwd(ONE, *lists([0, -1]), [t()], used=[*[[0, -1]] * 4, []],
            out=[[0, -1], [-1, -1], [-1, -1], [-1, -1]], **ADAM),
        fwd(TWO, *lists([1, 0]), [t()], used=[*[[1, 0]] * 4, []],
            out=[[1, 0], [-1, -1], [-1, -1], [-1, -1]], **ADAM),
        bwd(ONE, *lists(None), [t()], *wanted([-1, 0]), used=[*[[-1, 0]] * 4, []],
            out=[[-1, 0]] * 4, **ADAM),
        bwd(TWO, *lists(None), [t()], *wanted([0, 1]), used=[*[[0, 1]] * 4, []],
            out=[[0, 1]] * 4, **ADAM),
    ]  # fmt: skip


def scaling(n_scalars: int, results: int) -> list[Row]:
    """Gradients stay as they are; scalars are whole."""
    scalars, wanted = [t()] * n_scalars, [t()] * results
    own, outs = [[]] * n_scalars, [[]] * results
    two = [t(*A, m=[0, 1]), t(36, m=[-1])]
    return [
        fwd(ONE, [t(*A, m=[0, -1]), t(36, m=[0])], *scalars, used=[[0, -1], [0], *own],
            out=[[0, -1], [0], *outs]),
        fwd(TWO, two, *scalars, used=[[0, 1], [-1], *own], out=[[0, 1], [-1], *outs]),
        bwd(ONE, [t(*A)], *scalars, [t(*A, m=[0, -1])], *wanted, used=[[0, -1], *own],
            out=[[0, -1], *outs]),
        bwd(TWO, [t(*A)], *scalars, [t(*A, m=[1, 0])], *wanted, used=[[1, 0], *own],
            out=[[1, 0], *outs]),
    ]  # fmt: skip


TRAINING: dict[str, list[Row]] = {
    "adam": adam(),
    "adamw": adam(),
    "sgd": [
        fwd(ONE, [t(*A, m=[0, -1])], [t(*A)], [t(*A)], used=[[0, -1]] * 3,
            out=[[0, -1], WHOLE, WHOLE], out_shapes=[A] * 3, **SGD),
        fwd(TWO, [t(*A, m=[0, 1])], [t(*A)], [t(*A)], used=[[0, 1]] * 3,
            out=[[0, 1], WHOLE, WHOLE], out_shapes=[A] * 3, **SGD),
        bwd(ONE, *[[t(*A)]] * 3, *[[t(*A, m=[-1, 0])]] * 3, used=[[-1, 0]] * 3,
            out=[[-1, 0]] * 3, **SGD),
        bwd(TWO, *[[t(*A)]] * 3, *[[t(*A, m=[1, 0])]] * 3, used=[[1, 0]] * 3,
            out=[[1, 0]] * 3, **SGD),
    ],
    "check_finite_and_unscale": scaling(2, 1),
    "update_loss_scaling": scaling(4, 3),
}  # fmt: skip

# --- mixtures of experts, any op -----------------------------------------------------------------

GATE = [[-1, -1], [-1, -1], [-1], [-1, -1]]
# Here the results are like the inputs; an op that reuses the rule has its own.
REPLICATED = [
    fwd(ONE, [t(*A, m=[0, -1]), t(8, m=[0])], used=[WHOLE, [-1]], out=[WHOLE, [-1]]),
    fwd(TWO, [t(*A, m=[0, 1]), t(8, p=[(1, SUM)])], used=[WHOLE, [-1]], out=[WHOLE, [-1]]),
    bwd(ONE, [t(*A)], [t(*A, m=[0, -1])], used=[WHOLE], out=[WHOLE]),
    bwd(TWO, [t(*A)], [t(*A, m=[0, 1])], used=[WHOLE], out=[WHOLE]),
]
ANY: dict[str, list[Row]] = {
    "moe_gate_dispatch": [
        fwd(ONE, t(64, 32, m=[-1, 0]), t(64, 8), 2, 16, used=[[-1, 0], WHOLE],
            out=[[-1, -1, 0], *GATE]),
        # A token's slot depends on the other tokens.
        fwd(TWO, t(64, 32, m=[0, 1]), t(64, 8, m=[0, -1]), 2, 16, used=[[-1, 1], WHOLE],
            out=[[-1, -1, 1], *GATE]),
        bwd(ONE, t(64, 32), t(64, 8), 2, 16, t(8, 16, 32, m=[-1, -1, 0]), t(64, 2), i(2, 64), i(8),
            i(64, 2), used=[[-1, 0], WHOLE], out=[[-1, -1, 0], *GATE]),
        bwd(TWO, t(64, 32), t(64, 8), 2, 16, t(8, 16, 32, m=[0, -1, 1]), t(64, 2), i(2, 64), i(8),
            i(64, 2), used=[[-1, 1], WHOLE], out=[[-1, -1, 1], *GATE]),
    ],
    "moe_combine": [
        fwd(ONE, t(128, 32, m=[-1, 0]), t(64, 2), i(2, 64), used=[[-1, 0], WHOLE, WHOLE],
            out=[[-1, 0]]),
        fwd(TWO, t(128, 32, m=[-1, 1]), t(64, 2, m=[0, -1]), i(2, 64),
            used=[[-1, 1], [0, -1], [-1, 0]], out=[[0, 1]]),
        bwd(ONE, t(128, 32), t(64, 2), i(2, 64), t(64, 32, m=[0, -1]),
            used=[WHOLE, [0, -1], [-1, 0]], out=[[0, -1]]),
        bwd(TWO, t(128, 32), t(64, 2), i(2, 64), t(64, 32, m=[1, 0]),
            used=[[-1, 0], [1, -1], [-1, 1]], out=[[1, 0]]),
    ],
    "replicated": REPLICATED,
    "default_": REPLICATED,
    "default_data_parallel": [
        fwd(ONE, [t(64, 10, 10, m=[0, -1, -1]), t(64, 10)], used=[[0, -1, -1], [0, -1]],
            out=[[0, -1, -1], [0, -1]]),
        fwd(TWO, [t(64, 10, 10, m=[0, 1, -1]), t(64, 10)], used=[[0, -1, -1], [0, -1]],
            out=[[0, -1, -1], [0, -1]]),
        bwd(ONE, [t(64, 10), t(64)], [t(64, 10, m=[0, -1]), t(64)], used=[[0, -1], [0]],
            out=[[0, -1], [0]]),
        bwd(TWO, [t(64, 10)], [t(64, 10, m=[1, 0])], used=[[1, -1]], out=[[1, -1]]),
    ],
}  # fmt: skip

# --- the table -----------------------------------------------------------------------------------

REGISTERED = (
    UNARY_NAMES
    + BINARY_NAMES
    + """
    matmul matmul_v2 fused_linear_param_grad_add
    reduce_base all amax amin any frobenius_norm max reduce_max min prod sum reduce_sum
    squared_l2_norm logsumexp
    layer_norm fused_rms_norm
    flash_attention fused_rotary_position_embedding
    reshape reshape2 squeeze unsqueeze unsqueeze2 flatten transpose transpose2 tile expand_as
    expand_as_v2 stack concat split split_with_num slice strided_slice unbind
    softmax log_softmax cross_entropy_with_softmax softmax_with_cross_entropy
    embedding lookup_table_v2 gather gather_nd scatter one_hot where triu tril_triu cumsum argmax
    default_data_parallel default_ replicated
"""
).split()
"""The names that Paddle's ``rules.cc`` registers."""

LATER = """
    add_n check_finite_and_unscale update_loss_scaling argmin argsort batch_norm group_norm
    instance_norm bmm c_embedding c_softmax_with_cross_entropy
    c_softmax_with_multi_label_cross_entropy cast conv2d conv2d_transpose conv3d depthwise_conv2d
    cummax cummin einsum expand full_like fused_gemm_epilogue index_put index_select linear_v2
    mean_all moe_combine moe_gate_dispatch nonzero numel sgd adam adamw p_norm pad put_along_axis
    take_along_axis rms_norm roll topk unique
"""
"""Those of its later headers; ``roi_align`` is not an op of torch's but of torchvision's."""

GROUPS = (
    ELEMENTWISE, PRODUCTS, NORMS, SHAPES, LOSSES, INDEXING, CONVOLUTIONS, TRAINING, ANY, PENDING
)  # fmt: skip
TABLE: dict[str, list[Row]] = {
    **{name: unary(name) for name in (*UNARY_NAMES.split(), "full_like", "cast")},
    **{name: binary(name) for name in BINARY_NAMES.split()},
    "matmul": MATMUL,
    "matmul_v2": MATMUL,
    **{name: reductions(name) for name in REDUCTIONS},
    "squared_l2_norm": whole_reduction(SUM),
    "numel": whole_reduction(SUM),
    "mean_all": whole_reduction(AVG),
}
for _group in GROUPS:
    for _name, _rows in _group.items():
        TABLE[_name] = [*TABLE.get(_name, []), *_rows]


def test_every_name_is_in_the_table():
    assert len(REGISTERED) == len(set(REGISTERED)) == 151
    assert set(TABLE) == {*REGISTERED, *LATER.split()} == set(NAMES)


@pytest.mark.parametrize("name", TABLE)
def test_there_are_rows_of_both_directions_on_both_meshes(name):
    found = {(row.direction, len(row.mesh)) for row in TABLE[name]}
    assert found == {("forward", 1), ("forward", 2), ("backward", 1), ("backward", 2)}


def told(spec: TensorSpec) -> Any:
    return (spec.dims_mapping, dict(spec.partial)) if spec.partial else spec.dims_mapping


def expected(entries: list[Any]) -> list[Any]:
    """Without a pending reduction an entry is the mapping alone."""
    return [e[0] if isinstance(e, tuple) and not e[1] else e for e in entries]


@pytest.mark.parametrize("name", TABLE)
def test_the_rule_of(name):
    rule = spmd_rule(name)
    wrong = []
    for row in TABLE[name]:
        infer = rule.infer_forward if row.direction == "forward" else rule.infer_backward
        inputs, outputs = infer(*row.args, mesh_shape=row.mesh, **row.attrs)
        got = [told(s) for s in inputs], [told(s) for s in outputs]
        if got != (expected(row.used), expected(row.out)):
            wrong.append((row, got))
    assert not wrong


# --- the table, computed -------------------------------------------------------------------------

RANDOM = "its values are random"
GIVEN = "it is given a global shape or size"
PLACE = "it has to know which piece it has"
ARGUMENT = "its results are arguments, laid out as those are"
VALUES = "the shapes of its results depend on values"
NOT_LOCAL = {
    **dict.fromkeys(("bernoulli", "poisson", "dropout", "fused_dropout_add"), RANDOM),
    **dict.fromkeys(("reshape", "reshape2", "expand", "expand_as", "expand_as_v2"), GIVEN),
    **dict.fromkeys(("group_norm", "depthwise_conv2d"), GIVEN),
    **dict.fromkeys(("triu", "tril_triu", "embedding", "lookup_table_v2", "c_embedding"), PLACE),
    **dict.fromkeys(("adam", "adamw", "sgd", "check_finite_and_unscale"), ARGUMENT),
    **dict.fromkeys(("nonzero", "unique"), VALUES),
    "batch_norm": "its statistics are of all devices",
    "c_softmax_with_cross_entropy": "its sums are of all devices",
    "c_softmax_with_multi_label_cross_entropy": "its sums are of all devices",
    "moe_gate_dispatch": "it is not computed",
}
"""The rules that say what other than a device's own computation on its pieces gives."""


DOMAIN = {"acosh": 1.1}
"""Where arguments start, if not near zero."""


def value(spec: TensorSpec, generator: torch.Generator, start: float) -> torch.Tensor:
    if spec.dtype == torch.float32:
        drawn = torch.rand(spec.shape, dtype=torch.float64, generator=generator)
        return drawn * 0.8 + start
    return torch.randint(0, 2, spec.shape, dtype=spec.dtype, generator=generator)


@pytest.mark.parametrize("name", [name for name in TABLE if name not in NOT_LOCAL])
def test_devices_compute_their_pieces_of(name):
    """Every device runs the op on its pieces; together they are what the op gives of the whole."""
    rule, rng = spmd_rule(name), random.Random(name)
    generator = torch.Generator().manual_seed(0)
    for row in TABLE[name]:
        size = max(math.prod(s.shape) for s in tree_leaves(row.args) if isinstance(s, TensorSpec))
        if row.direction == "backward" or size > 10**4:
            continue
        used, outputs = rule.infer_forward(*row.args, mesh_shape=row.mesh, **row.attrs)
        leaves, tree = tree_flatten(row.args)
        layouts = iter(used)
        wholes, held = [], []
        for leaf in leaves:
            if not isinstance(leaf, TensorSpec):
                wholes.append(leaf)
                held.append(dict.fromkeys(devices(row.mesh), leaf))
                continue
            wholes.append(value(leaf, generator, DOMAIN.get(name, 0.1)))
            layout = next(layouts).info(row.mesh).placements
            held.append(parts(wholes[-1], layout, row.mesh, rng))

        def run(args: list[Any], tree: Any = tree, attrs: Any = row.attrs) -> list[torch.Tensor]:
            return tree_leaves(rule.func(*tree_unflatten(args, tree), **attrs))

        results = {at: run([each[at] for each in held]) for at in devices(row.mesh)}
        for i, (spec, expected) in enumerate(zip(outputs, run(wholes), strict=True)):
            pieces = {at: r[i] for at, r in results.items()}
            got = assemble(pieces, spec.info(row.mesh).placements, row.mesh, spec.shape)
            expected = expected.to(torch.float64)
            torch.testing.assert_close(got, expected, msg=lambda m, row=row: f"{row}\n{m}")


# --- the names themselves ------------------------------------------------------------------------


def test_an_unknown_name_lists_the_close_ones():
    with pytest.raises(ValueError, match=r"'matmull' is neither .* close to it are matmul"):
        spmd_rule("matmull")


def test_the_name_of_an_op_is_a_name_too():
    x = t(64, 32, m=[0, -1])
    for name in ("aten::mm", "aten::mm.default", "paddle::matmul"):
        _, outputs = spmd_rule(name).infer_forward(x, t(32, 48), mesh_shape=ONE)
        assert outputs[0].dims_mapping == [0, -1]


def test_every_rule_can_be_reused_by_its_name():
    assert [name for name in rules() if rule_of_name(name) is None] == []


def test_an_op_without_a_rule_says_so():
    with pytest.raises(ValueError, match=r"aten::lstm.input has no layout rule"):
        spmd_rule("aten::lstm.input")


def test_a_spec_says_what_is_wrong_with_it():
    with pytest.raises(ValueError, match=r"\[0\] has 1 entries for the 2 dims"):
        TensorSpec((64, 36), [0])
    rule = spmd_rule("relu")
    with pytest.raises(ValueError, match=r"mesh dims \[0\] are used more than once"):
        rule.infer_forward(t(64, 36, m=[0, 0]), mesh_shape=ONE)
    with pytest.raises(ValueError, match="names a mesh dim"):
        rule.infer_forward(t(64, 36, m=[1, -1]), mesh_shape=ONE)
    with pytest.raises(TypeError, match="takes the inputs and then the results"):
        rule.infer_backward(mesh_shape=ONE)


def test_a_call_left_to_the_compiler_says_so():
    mask = t(64, dtype=BOOL)
    with pytest.raises(ValueError, match="leaves this call to the compiler"):
        spmd_rule("aten::index.Tensor").infer_forward(
            t(64), [mask], mesh_shape=ONE, out_shapes=[(9,)]
        )


def test_a_strided_shard_goes_through_a_spec_unchanged():
    _, (flat,) = spmd_rule("reshape").infer_forward(
        t(8, 12, 24, m=[-1, 0, -1]), [96, 24], mesh_shape=TWO
    )
    assert flat.strided == ((0, 0, 8),)
    _, (back,) = spmd_rule("reshape").infer_forward(flat, [8, 12, 24], mesh_shape=TWO)
    assert back.dims_mapping == [-1, 0, -1]
    assert back.strided == ()
