"""Calls with an index out of range, of every op that CPU torch looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

R, S = Replicate(), Shard
LAYOUTS: dict[str, Any] = {"one device": None, "shards": [S(0), R], "uneven": [R, S(0)]}
X = torch.arange(40.0).reshape(10, 4)
COUNTED = torch.arange(40).reshape(10, 4)
SQUARE = torch.ones(2, 3, 2, 2)
ROW = torch.ones(1, 4)


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def place(tensor: torch.Tensor, layout: Any, mesh: DeviceMesh) -> Any:
    return tensor.to("xla") if layout is None else distribute_tensor(tensor, mesh, layout)


def in_place(x: Any, write: Callable[[Any], Any]) -> Any:
    y = x.clone()
    write(y)
    return y


# name: (the tensor, the index that is wrong, one that is right, the call)
CALLS: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, Callable[[Any, Any], Any]]] = {
    "embedding": (X, i(3, 12), i(3, 9), lambda x, k: F.embedding(k, x)),
    "embedding, negative": (X, i(3, -1), i(0, 0), lambda x, k: F.embedding(k, x)),
    "embedding_bag": (X, i(3, 12)[None], i(3, 9)[None], lambda x, k: F.embedding_bag(k, x)),
    "nll_loss": (X, i(*[0] * 9, 4), i(*[0] * 9, -100), lambda x, k: F.nll_loss(x, k)),
    "nll_loss, negative": (X, i(*[0] * 9, -1), i(*[3] * 10), lambda x, k: F.nll_loss(x, k)),
    "nll_loss, ignored": (
        X,
        i(*[0] * 9, 4),
        i(*[0] * 9, 77),
        lambda x, k: F.nll_loss(x, k, ignore_index=77),
    ),
    "nll_loss2d": (
        SQUARE,
        torch.full((2, 2, 2), 7),
        torch.full((2, 2, 2), 2),
        lambda x, k: F.nll_loss(x, k),
    ),
    "cross_entropy": (X, i(*[0] * 9, 4), i(*[0] * 9, -100), lambda x, k: F.cross_entropy(x, k)),
    "gather": (X, i(12, 1)[:, None], i(9, 1)[:, None], lambda x, k: x.gather(0, k)),
    "gather, negative": (X, i(-1, 1)[:, None], i(0, 1)[:, None], lambda x, k: x.gather(0, k)),
    "index_select": (X, i(12), i(9), lambda x, k: x.index_select(0, k)),
    "index_select, negative": (X, i(-1), i(0), lambda x, k: x.index_select(0, k)),
    "index": (X, i(12), i(-10), lambda x, k: x[k]),
    "floor_divide": (COUNTED, i(1, 0, 2, 2), i(1, -3, 2, 2), lambda x, k: x // k),
    "floor_divide in place": (
        COUNTED,
        i(1, 0, 2, 2),
        i(1, -3, 2, 2),
        lambda x, k: in_place(x, lambda y: y.floor_divide_(k)),
    ),
    "remainder": (COUNTED, i(0, 0, 2, 2), i(1, -3, 2, 2), lambda x, k: x % k),
    "fmod": (COUNTED, i(0, 0, 2, 2), i(1, -3, 2, 2), lambda x, k: x.fmod(k)),
    "div, rounded": (
        COUNTED,
        i(7, 0, 2, 2),
        i(1, -3, 2, 2),
        lambda x, k: torch.div(x, k, rounding_mode="trunc"),
    ),
    "index, after a slice": (X, i(3, -11), i(7, -8), lambda x, k: x[2:][:, 1:][k + 0]),
    "index_put": (X, i(12), i(-10), lambda x, k: x.index_put((k,), torch.ones(()).to(x.device))),
    "index_put_": (X, i(-11), i(9), lambda x, k: in_place(x, lambda y: y.__setitem__(k, 1.0))),
    "take": (X, i(44), i(-40), lambda x, k: x.take(k)),
    "put_": (X, i(-41), i(39), lambda x, k: in_place(x, lambda y: y.put_(k, k.float()))),
    "scatter": (X, i(12)[:, None], i(9)[:, None], lambda x, k: x.scatter(0, k, 1.0)),
    "scatter_": (
        X,
        i(-1)[:, None],
        i(0)[:, None],
        lambda x, k: in_place(x, lambda y: y.scatter_(0, k, 1.0)),
    ),
    "scatter_add": (X, i(12)[:, None], i(3)[:, None], lambda x, k: x.scatter_add(1, k, x)),
    "scatter_reduce": (
        X,
        i(12)[:, None],
        i(3)[:, None],
        lambda x, k: x.scatter_reduce(1, k, x, "sum"),
    ),
    "index_add": (X, i(12), i(9), lambda x, k: x.index_add(0, k, x[:1])),
    "index_add of a vector": (X, i(12), i(3), lambda x, k: x[0].index_add(0, k, x[0, :1])),
    "index_copy": (X, i(12), i(9), lambda x, k: x.index_copy(0, k, x[:1])),
    "index_fill": (X, i(12), i(-10), lambda x, k: x.index_fill(0, k, 1.0)),
    "index_reduce": (X, i(12), i(9), lambda x, k: x.index_reduce(0, k, x[:1], "prod")),
    "one_hot": (X, i(1, 5), i(1, 2), lambda x, k: F.one_hot(k, 3)),
    "one_hot, negative": (X, i(1, -1), i(1, 2), lambda x, k: F.one_hot(k, 3)),
}
# torch says where the index is, too, in an input that it has made flat.
OTHER_TEXTS = {"embedding_bag": "An index of the input is 12, which is not in the valid range"}
