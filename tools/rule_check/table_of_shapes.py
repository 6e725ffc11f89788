"""Samples of operations that rearrange."""

from __future__ import annotations

import torch

from tools.rule_check.entries import (
    COMPLEX,
    CUBE,
    INDEX,
    MASK,
    PICK,
    ROW,
    SCALAR,
    X,
    Y,
    ints,
    s,
    t,
)
from tools.rule_check.samples import Sample


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
