"""Rules of overloads, in ``dims_mapping``, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial

from xla_dtensor.rules import DimSharding, TensorInfo, infer
from xla_dtensor.rules.paddle import infer_arguments

aten = torch.ops.aten
ONE_D, TWO_D = (4,), (2, 4)


class T:
    """A tensor argument: its shape, and its dims_mapping forwards and (wanted) backwards."""

    def __init__(self, *shape, given=None, back=None):
        self.shape = shape
        self.given = given or [-1] * len(shape)
        self.back = back or self.given

    def info(self, mesh):
        placements = DimSharding.from_dims_mapping(self.given).placements(mesh)
        return TensorInfo(self.shape, placements, torch.float32)


def fill(tree, mesh):
    if isinstance(tree, T):
        return tree.info(mesh)
    if isinstance(tree, (list, tuple)):
        return type(tree)(fill(item, mesh) for item in tree)
    return tree


def tensors(tree):
    if isinstance(tree, T):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [t for item in tree for t in tensors(item)]
    return []


def mapping(placements, ndim, mesh):
    return DimSharding.from_placements(placements, ndim, mesh).dims_mapping


def sums(placements):
    return [m for m, p in enumerate(placements) if isinstance(p, Partial)]


# overload, mesh, arguments, results (shape, dims_mapping, partial mesh dims)
TABLE = [
    (aten.relu, ONE_D, (T(64, 36, given=[0, -1]),), [((64, 36), [0, -1], [])]),
    (aten.relu, TWO_D, (T(64, 36, given=[1, 0]),), [((64, 36), [1, 0], [])]),
    (aten.relu, TWO_D, (T(64, 36, given=[[0, 1], -1]),), [((64, 36), [[0, 1], -1], [])]),
    (aten.mul.Tensor, TWO_D, (T(64, 36, given=[0, 1]), T(36, back=[1])), [((64, 36), [0, 1], [])]),
    (aten.where.self, ONE_D, (T(8, 8, given=[0, -1]), T(8, 8, back=[0, -1]), T(8, back=[-1])),
     [((8, 8), [0, -1], [])]),
    (aten.mm, TWO_D, (T(64, 32, given=[0, -1]), T(32, 48, given=[-1, 1])),
     [((64, 48), [0, 1], [])]),
    (aten.mm, TWO_D,
     (T(64, 32, given=[0, 1], back=[0, -1]), T(32, 48, given=[1, -1], back=[-1, -1])),
     [((64, 48), [0, -1], [1])]),
    (aten.bmm, TWO_D, (T(8, 64, 32, given=[0, 1, -1]), T(8, 32, 48, given=[0, -1, -1])),
     [((8, 64, 48), [0, 1, -1], [])]),
    (aten.addmm, ONE_D, (T(48, given=[0]), T(64, 32), T(32, 48, given=[-1, 0])),
     [((64, 48), [-1, 0], [])]),
    (aten.sum.dim_IntList, TWO_D, (T(64, 32, given=[0, 1], back=[0, -1]), [1]),
     [((64,), [0], [1])]),
    (aten.sum.dim_IntList, TWO_D, (T(64, 32, given=[0, 1], back=[0, -1]), [1], True),
     [((64, 1), [0, -1], [1])]),
    (aten.argmax, TWO_D, (T(64, 32, given=[0, -1]), 1), [((64,), [0], [])]),
    (aten.max.dim, TWO_D, (T(64, 32, given=[0, -1]), 1), [((64,), [0], []), ((64,), [0], [])]),
    (aten.var.correction, ONE_D, (T(8, 4, given=[0, -1]), [1]), [((8,), [0], [])]),
    (aten._softmax, TWO_D, (T(8, 16, 32, given=[0, 1, -1]), -1, False),
     [((8, 16, 32), [0, 1, -1], [])]),
    (aten.native_layer_norm, TWO_D, (T(8, 16, 32, given=[0, 1, -1]), [32], T(32), T(32), 1e-5),
     [((8, 16, 32), [0, 1, -1], []), ((8, 16, 1), [0, 1, -1], []), ((8, 16, 1), [0, 1, -1], [])]),
    (aten.embedding, TWO_D, (T(32, 16, given=[-1, 1]), T(8, 4, given=[0, -1])),
     [((8, 4, 16), [0, -1, 1], [])]),
    (aten.embedding, ONE_D, (T(32, 16, given=[0, -1], back=[-1, -1]), T(8, 4)),
     [((8, 4, 16), [-1, -1, -1], [0])]),
    (aten.gather, ONE_D, (T(8, 16, given=[0, -1]), 1, T(8, 16, given=[0, -1])),
     [((8, 16), [0, -1], [])]),
    (aten.index_select, ONE_D, (T(8, 16, given=[-1, 0]), 0, T(4)), [((4, 16), [-1, 0], [])]),
    (aten.scatter_add, ONE_D, (T(8, 4, given=[0, -1]), 1, T(8, 4, given=[0, -1]),
     T(8, 4, given=[0, -1])), [((8, 4), [0, -1], [])]),
    (aten.view, TWO_D, (T(8, 16, 4, given=[0, -1, 1]), [128, 4]), [((128, 4), [0, 1], [])]),
    (aten.view, TWO_D, (T(64, 4, given=[0, 1]), [8, 8, 4]), [((8, 8, 4), [0, -1, 1], [])]),
    (aten.permute, TWO_D, (T(8, 16, 4, given=[0, 1, -1]), [1, 2, 0]),
     [((16, 4, 8), [1, -1, 0], [])]),
    (aten.transpose.int, TWO_D, (T(8, 16, given=[0, 1]), 0, 1), [((16, 8), [1, 0], [])]),
    (aten.unsqueeze, TWO_D, (T(8, 16, given=[0, 1]), 1), [((8, 1, 16), [0, -1, 1], [])]),
    (aten.squeeze.dim, TWO_D, (T(8, 1, 16, given=[0, -1, 1]), 1), [((8, 16), [0, 1], [])]),
    (aten.expand, ONE_D, (T(1, 16, given=[-1, 0]), [8, 16]), [((8, 16), [-1, 0], [])]),
    (aten.repeat, ONE_D, (T(8, 16, given=[0, -1]), [1, 3]), [((8, 48), [0, -1], [])]),
    (aten.select.int, TWO_D, (T(8, 4, 16, given=[0, -1, 1]), 1, 0), [((8, 16), [0, 1], [])]),
    (aten.slice.Tensor, ONE_D, (T(8, 4, given=[-1, 0]), 0, 0, 2), [((2, 4), [-1, 0], [])]),
    (aten.cat, ONE_D, ([T(8, 4, given=[-1, 0]), T(4, 4, given=[-1, 0])], 0),
     [((12, 4), [-1, 0], [])]),
    (aten.stack, ONE_D, ([T(8, 4, given=[-1, 0]), T(8, 4, given=[-1, 0])], 0),
     [((2, 8, 4), [-1, -1, 0], [])]),
    (aten.split.Tensor, ONE_D, (T(8, 4, given=[-1, 0]), 4), [((4, 4), [-1, 0], [])] * 2),
    (aten.unbind.int, ONE_D, (T(2, 4, given=[-1, 0]), 0), [((4,), [0], [])] * 2),
    (aten.cumsum, ONE_D, (T(8, 4, given=[0, -1]), 1), [((8, 4), [0, -1], [])]),
    (aten.topk, ONE_D, (T(8, 4, given=[0, -1]), 2), [((8, 2), [0, -1], [])] * 2),
    (aten.constant_pad_nd, ONE_D, (T(8, 4, given=[0, -1]), [1, 1]), [((8, 6), [0, -1], [])]),
    (aten.roll, ONE_D, (T(8, 4, given=[0, -1]), [1], [1]), [((8, 4), [0, -1], [])]),
    (aten.triu, TWO_D, (T(2, 8, 8, given=[0, 1, -1]),), [((2, 8, 8), [0, 1, -1], [])]),
    (aten.zeros_like, TWO_D, (T(8, 4, given=[0, 1]),), [((8, 4), [0, 1], [])]),
    (aten.convolution, TWO_D,
     (T(8, 4, 6, 6, given=[0, -1, -1, -1]), T(8, 4, 3, 3, given=[1, -1, -1, -1]), None,
      [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
     [((8, 8, 6, 6), [0, 1, -1, -1], [])]),
    (aten.scaled_dot_product_attention, TWO_D, (*[T(2, 4, 8, 8, given=[0, 1, -1, -1])] * 3,),
     [((2, 4, 8, 8), [0, 1, -1, -1], [])]),
]  # fmt: skip


def overload(op):
    return op if isinstance(op, torch._ops.OpOverload) else op.default


ids = [str(overload(op)).removeprefix("aten.") for op, *_ in TABLE]


@pytest.mark.parametrize(("op", "mesh", "args", "results"), TABLE, ids=ids)
def test_forward(op, mesh, args, results):
    shapes = [shape for shape, _, _ in results]
    merged = infer(overload(op), fill(args, mesh), {}, shapes, mesh)
    assert merged is not None
    got = [
        (s, mapping(p, len(s), mesh), sums(p)) for s, p in zip(shapes, merged.outputs, strict=True)
    ]
    assert got == results


@pytest.mark.parametrize(("op", "mesh", "args", "results"), TABLE, ids=ids)
def test_backward(op, mesh, args, results):
    wanted = [T(*shape, given=m).info(mesh) for shape, m, _ in results]
    merged = infer_arguments(overload(op), fill(args, mesh), {}, wanted, mesh)
    assert merged is not None
    expected = [t.back for t in tensors(args)]
    shapes = [t.shape for t in tensors(args)]
    got = [mapping(p, len(s), mesh) for p, s in zip(merged.inputs, shapes, strict=True)]
    assert got == expected


def test_what_no_argument_layout_gives_is_replicated():
    wanted = T(8, 16, given=[0, 1]).info(TWO_D)
    x = T(8, 16).info(TWO_D)
    merged = infer_arguments(aten._softmax.default, (x, 1, False), {}, [wanted], TWO_D)
    assert merged is not None
    assert mapping(merged.inputs[0], 2, TWO_D) == [0, -1]
