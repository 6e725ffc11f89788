"""Notations, in ``dims_mapping``: inputs to outputs, and back."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

from xla_dtensor.rules import (
    DimSharding,
    TensorInfo,
    infer_forward,
    parse,
)
from xla_dtensor.rules.notation import expand_ellipsis

ONE_D, TWO_D = (4,), (2, 4)


def info(shape, mapping, mesh, partial=()):
    placements = DimSharding.from_dims_mapping(mapping, partial).placements(mesh)
    return TensorInfo(tuple(shape), placements, torch.float32)


def mapping(placements, ndim, mesh):
    return DimSharding.from_placements(placements, ndim, mesh).dims_mapping


def partial(placements, mesh):
    return [(m, p.reduce_op) for m, p in enumerate(placements) if isinstance(p, Partial)]


MM = "m k, k n -> m n"
ADD = "a b, a b -> a b"
# notation, mesh, shapes, input mappings, merged input mappings, output mapping, partial
FORWARD = [
    (ADD, ONE_D, [(64, 36)] * 2, [[0, -1], [-1, -1]], [[0, -1], [0, -1]], [0, -1], []),
    (ADD, ONE_D, [(64, 36)] * 2, [[-1, 0], [-1, 0]], [[-1, 0], [-1, 0]], [-1, 0], []),
    (ADD, TWO_D, [(64, 36)] * 2, [[0, -1], [-1, 1]], [[0, 1], [0, 1]], [0, 1], []),
    (ADD, TWO_D, [(64, 36)] * 2, [[[0, 1], -1], [-1, -1]], [[[0, 1], -1]] * 2, [[0, 1], -1], []),
    # A conflict: the larger stays; a tie goes to the first operand.
    ("a b, b -> a b", ONE_D, [(64, 36), (36,)], [[0, -1], [0]], [[0, -1], [-1]], [0, -1], []),
    ("b, a b -> a b", ONE_D, [(36,), (64, 36)], [[0], [0, -1]], [[-1], [0, -1]], [0, -1], []),
    (ADD, ONE_D, [(64, 36)] * 2, [[0, -1], [-1, 0]], [[0, -1], [0, -1]], [0, -1], []),
    # Broadcasting: a dim of size one is whole.
    (ADD, ONE_D, [(64, 36), (1, 36)], [[0, -1], [-1, -1]], [[0, -1], [-1, -1]], [0, -1], []),
    # Matrix product: rows, columns, and the contraction, which leaves a sum.
    (MM, ONE_D, [(64, 32), (32, 48)], [[0, -1], [-1, -1]], [[0, -1], [-1, -1]], [0, -1], []),
    (MM, ONE_D, [(64, 32), (32, 48)], [[-1, -1], [-1, 0]], [[-1, -1], [-1, 0]], [-1, 0], []),
    (MM, ONE_D, [(64, 32), (32, 48)], [[-1, 0], [0, -1]], [[-1, 0], [0, -1]], [-1, -1], [0]),
    (MM, ONE_D, [(64, 32), (32, 48)], [[-1, 0], [-1, -1]], [[-1, 0], [0, -1]], [-1, -1], [0]),
    (MM, TWO_D, [(64, 32), (32, 48)], [[0, 1], [1, -1]], [[0, 1], [1, -1]], [0, -1], [1]),
    (MM, TWO_D, [(64, 32), (32, 48)], [[0, -1], [-1, 1]], [[0, -1], [-1, 1]], [0, 1], []),
    # A letter that must not be sharded is gathered.
    ("b h! -> b h!", TWO_D, [(64, 32)], [[0, 1]], [[0, -1]], [0, -1], []),
    # An ellipsis is any number of leading dims.
    ("... h, h o -> ... o", TWO_D, [(8, 4, 6), (6, 8)], [[0, -1, -1], [-1, 1]],
     [[0, -1, -1], [-1, 1]], [0, -1, 1], []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "mesh", "shapes", "given", "used", "out", "sums"), FORWARD)
def test_forward(text, mesh, shapes, given, used, out, sums):
    inputs = [info(shape, m, mesh) for shape, m in zip(shapes, given, strict=True)]
    notation = parse(expand_ellipsis(text, [len(s) for s in shapes]))
    merged = infer_forward(notation, inputs, mesh)
    got = [mapping(p, len(s), mesh) for p, s in zip(merged.inputs, shapes, strict=True)]
    assert got == used
    assert mapping(merged.outputs[0], len(out), mesh) == out
    assert partial(merged.outputs[0], mesh) == [(m, "sum") for m in sums]


def test_a_product_is_linear_in_each_factor_but_not_in_both():
    notation = parse(MM, multilinear=True)
    one = info((64, 32), [-1, -1], ONE_D, partial=[(0, "sum")])
    whole = info((32, 48), [-1, -1], ONE_D)
    assert infer_forward(notation, [one, whole], ONE_D).outputs == ((Partial(),),)
    two = info((32, 48), [-1, -1], ONE_D, partial=[(0, "sum")])
    merged = infer_forward(notation, [one, two], ONE_D)
    assert merged.inputs[0] != merged.inputs[1]


def test_an_uneven_shard_is_kept():
    x = info((5, 3), [0, -1], ONE_D)
    merged = infer_forward(parse("a b, b -> a b"), [x, info((3,), [-1], ONE_D)], ONE_D)
    assert merged.outputs == ((Shard(0),),)


def test_the_reduction_of_a_reduced_letter():
    x = info((8, 4), [-1, 0], ONE_D)
    assert infer_forward(parse("a b -> a", "max"), [x], ONE_D).outputs == ((Partial("max"),),)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("m k, k n", [(1, 1), (1, 1)], "one '->'"),
        ("m m -> m", [(2, 2)], "names two dims"),
        (MM, [(4, 8), (6, 2)], "letter 'k' .* is bound to 8 and to 6"),
        (MM, [(4, 8)], "has 2 inputs, not 1"),
        (MM, [(4, 8), (8,)], "does not fit shape"),
    ],
)
def test_bad_notations_say_what_is_wrong(text, shapes, message):
    with pytest.raises(ValueError, match=message):
        infer_forward(parse(text), [info(s, [-1] * len(s), ONE_D) for s in shapes], ONE_D)


def test_single_characters_need_no_spaces():
    assert parse("mk,kn->mn") == parse(MM)


@pytest.mark.parametrize(
    ("text", "ndims", "named"),
    [
        ("... h, h o -> ... o", [3, 2], "_2 _1 h, h o -> _2 _1 o"),
        ("...h,ho->...o", [3, 2], "_2 _1 h, h o -> _2 _1 o"),
        ("b ...! -> b", [3], "b _2! _1! -> b"),
        ("..., ... -> ...", [2, 1], "_2 _1, _1 -> _2 _1"),
        # One letter to a term needs no space, and is then one character.
        ("... -> ...", [1], "a -> a"),
        ("... batch! -> ... batch!", [1], "a! -> a!"),
        ("... -> ", [1], "a -> "),
        ("... -> ...", [0], " -> "),
    ],
)
def test_an_ellipsis_is_named_by_the_ranks(text, ndims, named):
    assert expand_ellipsis(text, ndims) == named
    inputs = parse(named).inputs
    assert [len(term) for term in inputs] == ndims


def test_an_ellipsis_that_does_not_fit_says_so():
    with pytest.raises(ValueError, match=r"'\.\.\. a b' of .* does not fit 1 dims"):
        expand_ellipsis("... a b -> ...", [1])
    with pytest.raises(ValueError, match="has 1 inputs, not 2"):
        expand_ellipsis("... -> ...", [1, 1])
    with pytest.raises(ValueError, match="depends on the inputs"):
        parse("... h -> ... h")


def test_an_average_is_no_reduction_of_a_notation():
    with pytest.raises(ValueError, match="do not combine by 'avg'"):
        parse("a b -> a", "avg")


@pytest.mark.parametrize(
    ("shapes", "given", "used"),
    [
        # Two of the same size: the first stays. Else what moves fewer bytes, wherever it stands.
        ([(64, 64), (64, 64)], [[0, -1], [-1, 0]], [[0, -1], [0, -1]]),
        ([(1, 64), (64, 64)], [[-1, 0], [0, -1]], [[-1, -1], [0, -1]]),
        ([(64, 64), (64, 1)], [[-1, 0], [0, -1]], [[-1, 0], [-1, -1]]),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
def test_of_two_that_conflict_the_larger_stays(shapes, given, used, swap):
    if swap and shapes[0] != shapes[1]:
        shapes, given, used = shapes[::-1], given[::-1], used[::-1]
    inputs = [info(s, m, ONE_D) for s, m in zip(shapes, given, strict=True)]
    merged = infer_forward(parse(ADD), inputs, ONE_D)
    assert [mapping(p, 2, ONE_D) for p in merged.inputs] == used
