"""Gathers, scatters and reorderings against CPU torch: the edges by hand, the rest by OpInfo."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.lowering.harness import check_call, check_overloads
from xla_dtensor.lowering.ops.indexing import index
from xla_dtensor.lowering.ops.shape import repeat_interleave

aten = torch.ops.aten
torch.manual_seed(0)
X = torch.randn(4, 5, 6)
ROW = torch.tensor([3, 0, -1])
COL = torch.tensor([[1], [-2]])
MASK = torch.tensor([True, False, True, False])
INDEX = torch.tensor([[3, 0, 2], [1, 1, 0]])
# Of all rows, a few columns each, some twice: the later value stays.
FEW = torch.tensor([[3, 0, 3], [1, 1, 1], [5, 4, 0], [0, 0, 2], [2, 5, 2]])
ODD = torch.tensor([[-0.0, torch.nan, 2.0]]).repeat(5, 1)
BITS = torch.tensor([[True, False], [False, True]])

CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.index.Tensor, (X, [ROW])),
    (aten.index.Tensor, (X, [None, COL])),
    (aten.index.Tensor, (X, [ROW, COL])),
    (aten.index.Tensor, (X, [ROW, None, COL])),  # not adjacent: their dims come first
    (aten.index.Tensor, (X, [None, ROW, COL])),
    (aten.index.Tensor, (X, [torch.tensor(2), None, ROW])),
    (aten.index.Tensor, (X, [None, None, torch.tensor(-1)])),
    (aten.index.Tensor, (X, [torch.tensor([], dtype=torch.int64)])),
    (aten.index.Tensor, (torch.zeros(0, 3), [torch.tensor([], dtype=torch.int64)])),
    (aten.index_put.default, (X, [ROW], torch.randn(3, 5, 6))),
    (aten.index_put.default, (X, [ROW, None, ROW], torch.randn(3, 1))),
    (aten.index_put.default, (X, [ROW], torch.randn(6))),
    (aten.index_put.default, (X, [torch.tensor([1, 1])], torch.randn(2, 5, 6), True)),
    (aten.index_put.default, (X, [MASK], torch.tensor(7.0))),
    (aten.index_put.default, (X, [MASK], torch.randn(2, 5, 6))),
    (aten.index_put.default, (X, [MASK], torch.randn(1, 6), True)),
    (aten.index_put.default, (X, [X > 0], torch.randn(int((X > 0).sum())))),
    (aten.index_put.default, (X, [None, X[0] > 0], torch.randn(4, int((X[0] > 0).sum())))),
    (aten.index_put.default, (BITS, [torch.tensor([0, 0])], ~BITS, True)),
    (aten.gather.default, (X[0], 0, INDEX)),
    (aten.gather.default, (X[0], -1, INDEX)),
    (aten.gather.default, (X, 1, torch.randint(5, (2, 9, 3)))),
    (aten.gather.default, (torch.tensor(3.0), 0, torch.tensor(0))),
    (aten.gather.default, (X[0], 1, torch.zeros(2, 0, dtype=torch.int64))),
    (aten.scatter.src, (X[0], 1, INDEX, torch.randn(4, 6))),
    (aten.scatter.src, (X[0], 1, FEW, ODD)),
    (aten.scatter_add.default, (torch.full((5, 6), -0.0), -1, FEW, ODD)),
    (aten.scatter.value, (X[0].to(torch.complex64), 1, FEW, 3.5j)),
    (aten.scatter.value, (X[0], 0, INDEX, 3.5)),
    (aten.scatter.value, (X[0].int(), 0, INDEX, 2)),
    (aten.scatter.reduce, (X[0], 1, INDEX, torch.randn(2, 3))),
    (aten.scatter_add.default, (X[0].bfloat16(), 1, INDEX, torch.randn(2, 3).bfloat16())),
    (aten.scatter_add.default, (BITS, 1, INDEX % 2, torch.rand(2, 3) > 0.5)),
    (aten.index_add.default, (X, 1, torch.tensor([4, 4, 0]), torch.randn(4, 3, 6))),
    (aten.index_add.default, (torch.tensor(1.0), 0, torch.tensor([0]), torch.tensor(2.0))),
    (aten.index_copy.default, (X, -1, torch.tensor([5, 0]), torch.randn(4, 5, 2))),
    (aten.index_fill.int_Scalar, (X, 1, torch.tensor([-1, 2]), 9.0)),
    (aten.index_fill.int_Scalar, (X.long(), 1, torch.tensor([1]), 9)),
    (aten.index_select.default, (X, -2, torch.tensor([4, 0, 4], dtype=torch.int32))),
    (aten.index_select.default, (torch.tensor(2.0), 0, torch.tensor([0]))),
    (aten.index_reduce.default, (X, 1, torch.tensor([4, 4, 0]), torch.ones(4, 3, 6), "mean")),
    (aten.take.default, (X, torch.tensor([[0, -1], [119, 60]]))),
    (aten.put.default, (X, torch.tensor([[0, -1]]), torch.tensor([[1.0, 2.0]]))),
    (aten.put.default, (X, torch.tensor([3, 3]), torch.tensor([1.0, 2.0]), True)),
    (aten.masked_scatter.default, (X, X > 0, torch.randn(200))),
    (aten.masked_scatter.default, (X, MASK[:, None, None], torch.randn(60))),
    (aten.masked_scatter_backward.default, (X, X > 0, [130])),
    (aten.embedding.default, (X[0], torch.tensor([[0, 4], [2, 2]]))),
    (aten.embedding_dense_backward.default, (X[0], torch.tensor([1, 1, 0, 2, 1]), 5, 0, False)),
    (aten.embedding_dense_backward.default, (X[0], torch.tensor([1, 1, 0, 2, 1]), 5, -1, True)),
    (aten.searchsorted.Tensor, (X.sort(-1)[0], torch.randn(4, 5, 2))),
    (aten.bucketize.Tensor, (torch.tensor([1, 3, 5]), torch.tensor([1, 3, 4]))),
    (aten.bucketize.Scalar, (2.5, torch.tensor([1.0, 3.0, 4.0]))),
    (aten.nonzero_static.default, (X > 0,)),
    (aten.roll.default, (X, [2])),
    (aten.roll.default, (X, [1, -2], [0, -1])),
    (aten.flip.default, (X, [0, -1])),
    (aten.repeat.default, (X[0], [2, 1, 3])),
    (aten.cat.default, ([X, torch.empty(0), X.double()], -1)),
    (aten.cat.default, ([torch.ones(2, dtype=torch.int32), torch.tensor([True])],)),
    (aten.stack.default, ([X.int(), X], -1)),
    (aten.constant_pad_nd.default, (X, [1, -2, 0, 3], 0.5)),
    (aten.sort.stable, (torch.tensor([2.0, torch.nan, 1.0, 2.0, -torch.inf]),)),
    (aten.topk.default, (X, 3, 1)),
    (aten.topk.default, (torch.randperm(50) - 25, 5, 0, False)),
    (aten.topk.default, (torch.tensor([1.0, torch.nan, 3.0]), 2)),
]
KEYWORDS: dict[Any, list[dict[str, Any]]] = {
    aten.scatter.reduce: [{"reduce": "multiply"}],
    aten.index_add.default: [{"alpha": -2.0}],
    aten.searchsorted.Tensor: [{}, {"right": True, "out_int32": True}],
    aten.bucketize.Tensor: [{}, {"right": True}],
    aten.nonzero_static.default: [{"size": 80}, {"size": 3, "fill_value": -7}],
    aten.sort.stable: [{"stable": True, "descending": d} for d in (False, True)],
}


@pytest.mark.parametrize(("op", "args"), CALLS, ids=lambda v: str(v) if callable(v) else "")
def test_call(op: Any, args: Any) -> None:
    for keywords in KEYWORDS.get(op, [{}]):
        assert check_call(op, *args, **keywords).mismatches == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce(reduce: str, include_self: bool) -> None:
    for x in (X[0], X[0].bfloat16(), (X[0] * 10).long()):
        src = torch.arange(1, 7).reshape(2, 3).to(x.dtype)
        op = aten.scatter_reduce.two
        for places, values in ((INDEX, src), (FEW, src[:1].repeat(5, 1))):
            args = (x, 1, places, values, reduce)
            assert check_call(op, *args, include_self=include_self).mismatches == []


@pytest.mark.parametrize(
    "name", ["take_along_dim", "nn.functional.pad", "nn.functional.pixel_shuffle"]
)
def test_torchs_own_samples(name: str) -> None:
    report = check_overloads(name, limit=2, only=lambda overload: "empty" not in overload)
    assert report.mismatches == []


def test_shapes_that_depend_on_values_are_refused() -> None:
    with pytest.raises(TypeError, match="depends on the mask's values"):
        index(jnp.zeros(3), [jnp.ones(3, bool)])
    with pytest.raises(TypeError, match="pass output_size"):
        repeat_interleave(jnp.array([1, 2]))
    with jax.enable_x64(True):
        repeated = repeat_interleave(jnp.array([1, 0, 2]), output_size=3)
    np.testing.assert_array_equal(repeated, [0, 2, 2])


@pytest.mark.parametrize("placements", [None, [Shard(0), Replicate()], [Shard(1), Shard(0)]])
def test_zeros_keep_their_sign_at_index_0(placements: Any, mesh_2x4: DeviceMesh) -> None:
    """XLA's scatters are repaired there, and what devices have was added up."""
    x = torch.randn(4, 4).abs() + 1
    given = x.to("xla") if placements is None else distribute_tensor(x, mesh_2x4, placements)

    def written(x: torch.Tensor) -> list[torch.Tensor]:
        at = torch.tensor([2, 0], device=x.device)
        minus = torch.full((2, 4), -0.0, device=x.device)
        by_index, by_mask = x.clone(), x.index_put((at, at), minus[:, 0])
        by_index[at] = minus
        return [x.clone().fill_diagonal_(-0.0), by_index, by_mask, x.index_copy(1, at, minus.T)]

    for run in (written, xd.compile(written)):
        for got, want in zip(run(given), written(x), strict=True):
            assert torch.equal(got.cpu().signbit(), want.signbit())
            assert torch.equal(got.cpu(), want)
