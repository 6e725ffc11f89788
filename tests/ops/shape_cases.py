"""Views, reshapes, joins and splits, indexing."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.ops.harness import bools, case, f, ints

c64 = torch.complex64

VIEW = [
    case("view_flatten", lambda x: x.view(-1), f("m k")),
    case("view_merge", lambda x: x.view(x.shape[0] * x.shape[1], -1), f("b s h")),
    case("view_split", lambda x: x.view(*x.shape[:2], 2, -1), f("b s h")),
    case("view_split_uneven", lambda x: x.view(2, -1, x.shape[1]), f("m k")),
    case("view_regroup", lambda x: x.view(-1, 2 * x.shape[2]), f("b h k"), light=True),
    case("reshape_copy", lambda x: x.transpose(1, 2).reshape(x.shape[0], -1), f("b s h")),
    case("heads", lambda x: x.view(*x.shape[:-1], -1, 2).transpose(1, 2), f("b s n")),
    case(
        "heads_back", lambda x: x.transpose(1, 2).contiguous().flatten(2), f("b 4 s 2"), light=True
    ),
    case("unflatten", lambda x: x.unflatten(1, (2, -1)), f("m n"), light=True),
    case("transpose", lambda x: x.transpose(0, 2), f("b s h")),
    case("permute", lambda x: x.permute(2, 0, 1), f("b s h"), light=True),
    case("movedim", lambda x: x.movedim(0, -1), f("b s h"), light=True),
    case("t", torch.t, f("m k"), light=True),
    case("unsqueeze", lambda x: x.unsqueeze(1), f("m k")),
    case("squeeze", lambda x: (x.squeeze(1), x.squeeze()), f("m 1 k")),
    case("expand", lambda x: x.expand(4, -1, 3), f("m 1"), light=True),
    case("expand_new", lambda x: x.expand(3, *x.shape), f("m k"), light=True),
    case(
        "broadcast_to_clone", lambda x: x[:, None].expand(-1, 2, -1).clone(), f("m k"), light=True
    ),
    case("select", lambda x: (x[1], x.select(-1, 0)), f("m k")),
    case("slice", lambda x: (x[1:3], x[..., :2], x[:, -2:]), f("m k")),
    case("slice_step", lambda x: x[::2, 1::2], f("m k"), light=True),
    case("narrow", lambda x: x.narrow(0, 2, 5), f("m k"), light=True),
    case("diagonal", lambda x: x.diagonal(), f("m k")),
    case("split", lambda x: x.split(3, 0), f("m k"), light=True),
    case("split_sizes", lambda x: x.split([2, x.shape[1] - 2], 1), f("m n"), light=True),
    case("chunk", lambda x: x.chunk(2, -1), f("b s h")),
    case("unbind", lambda x: x.unbind(0), f("3 m"), light=True),
    case(
        "pairs_as_complex",
        lambda x: torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)),
        f("b s n"),
        light=True,
    ),
    case(
        "view_as_real_flatten",
        lambda x: torch.view_as_real(x).flatten(2),
        f("b s h", c64),
        light=True,
    ),
    case("clone_contiguous", lambda x: (x.t().clone(), x.t().contiguous()), f("m k"), light=True),
    case("unfold", lambda x: x.unfold(0, 3, 2), f("m k")),
]

JOIN = [
    case("cat", lambda x, y: torch.cat([x, y]), f("m k"), f("n k")),
    case("cat_last", lambda x, y: torch.cat([x, y, x], -1), f("m k"), f("m n"), light=True),
    case("stack", lambda x, y: torch.stack([x, y], 1), f("m k"), f("m k"), light=True),
    case("repeat", lambda x: x.repeat(2, 1, 3), f("m k")),
    case("repeat_interleave", lambda x: x.repeat_interleave(2, 1), f("b 4 s k"), light=True),
    case("flip", lambda x: x.flip(0), f("m k"), light=True),
    case("roll", lambda x: x.roll(2, 0), f("m k"), light=True),
    case("pad", lambda x: F.pad(x, (1, 2, 0, 3)), f("m k")),
    case("tril_triu", lambda x: (x.tril(), x.triu(1)), f("b s s"), light=True),
]

INDEXING = [
    case("embedding", F.embedding, ints("b s", 6), f("n h")),
    case(
        "embedding_padding",
        lambda i, w: F.embedding(i, w, padding_idx=2),
        ints("b s", 6),
        f("n h"),
        light=True,
    ),
    case("index_rows", lambda x, i: x[i], f("n k"), ints("s", 6)),
    case("index_pairs", lambda x, i, j: x[i, j], f("n h"), ints("s", 6), ints("s", 6), light=True),
    case("index_middle", lambda x, i: x[:, i], f("b n k"), ints("s", 6), light=True),
    case("index_none", lambda x, i: x[:, None, i], f("b n"), ints("s", 6), light=True),
    case("index_mask", lambda x, m: x[m], f("m k"), bools("m k"), light=True),
    case("index_select", lambda x, i: x.index_select(1, i), f("m n"), ints("s", 6)),
    case("gather", lambda x, i: x.gather(1, i), f("m n"), ints("m k", 6)),
    case(
        "take_along_dim", lambda x, i: x.take_along_dim(i, 0), f("n k"), ints("m k", 6), light=True
    ),
    case(
        "scatter",
        lambda x, i, y: x.scatter(1, i[:, :1], y[:, :1]),
        f("m n"),
        ints("m k", 6),
        f("m k"),
        light=True,
    ),
    case("scatter_add", lambda x, i, y: x.scatter_add(0, i, y), f("n k"), ints("m k", 6), f("m k")),
    case("index_add", lambda x, i, y: x.index_add(0, i, y), f("n k"), ints("s", 6), f("s k")),
    case(
        "index_put",
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        f("n k"),
        ints("s", 6),
        f("s k"),
    ),
    case("one_hot", lambda i: F.one_hot(i, 6), ints("m", 6), light=True),
    case("masked_select", lambda x, m: x.masked_select(m), f("m k"), bools("m k"), light=True),
    # The CPU's result is a transposed buffer, which distributing it makes contiguous.
    case("nonzero", torch.nonzero, bools("m k"), strides=False, light=True),
]

FACTORIES = [
    case(
        "zeros_like",
        lambda x: (torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2)),
        f("m k"),
    ),
    case(
        "new_zeros",
        lambda x: (x.new_zeros(3, 5), x.new_full((8,), 2, dtype=torch.int64)),
        f("m k"),
        light=True,
    ),
    case(
        "zeros_like_dtype",
        lambda x: torch.zeros_like(x, dtype=torch.float64),
        ints("m k"),
        light=True,
    ),
]

CASES = VIEW + JOIN + INDEXING + FACTORIES
