"""The examples of Paddle's guide to distributed operators (seeds/001), as it has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.rules.devices import devices, piece
from xla_dtensor.base.tables.registry import Registry
from xla_dtensor.rules import (
    Call,
    DimSharding,
    Merged,
    infer_forward,
    parse,
    register_rule,
    registry,
)
from xla_dtensor.rules.dim_transforms import Flatten, InputDim, Split, reshape
from xla_dtensor.rules.notation import alternatives
from xla_dtensor.rules.paddle import TensorSpec, spmd_rule
from xla_dtensor.rules.view_propagation import propagate

R, S = Replicate(), Shard

# --- 1: placements and dims_mapping --------------------------------------------------------------


def test_an_unmarked_operand_of_an_addition_follows_the_marked_one():
    """Tensor1 is marked Shard(0): Tensor2 is cut so too, and so is the result."""
    marked, unmarked = TensorSpec((4, 4), [0, -1]), TensorSpec((4, 4), [-1, -1])
    used, results = spmd_rule("add").infer_forward(marked, unmarked, mesh_shape=(2,))
    layouts = [spec.info((2,)).placements for spec in (*used, *results)]
    assert layouts == [(S(0),), (S(0),), (S(0),)]


@pytest.mark.parametrize(
    ("dims_mapping", "placements", "local"),
    [([-1, 1], (R, S(1)), (4, 2)), ([0, 1], (S(0), S(1)), (2, 2))],
)
def test_dims_mapping_and_placements_say_the_same(dims_mapping, placements, local):
    """A (4, 4) tensor on a [2, 2] mesh. (The guide gives shards of (2, 1) and (1, 1), which are
    those of a (2, 2) tensor.)"""
    mesh = (2, 2)
    sharding = DimSharding.from_dims_mapping(dims_mapping)
    assert sharding.placements(mesh) == placements
    assert DimSharding.from_placements(placements, 2, mesh).dims_mapping == dims_mapping
    assert {piece(torch.empty(4, 4), placements, mesh, at).shape for at in devices(mesh)} == {local}


# --- 2.2.1: computation ops ----------------------------------------------------------------------


def test_the_notation_of_matmul():
    """``ij, jk -> ik``: a letter in several terms is one dim, a letter that vanishes is reduced."""
    notation = parse("ij, jk -> ik")
    assert notation.inputs == (("i", "j"), ("j", "k"))
    assert notation.outputs == (("i", "k"),)
    shards = {
        tuple(option.inputs): option.outputs[0]
        for option in alternatives(notation, [(64, 32), (32, 48)])
    }
    assert shards[S(0), R] == S(0)
    assert shards[R, S(1)] == S(1)
    assert shards[S(1), S(0)].is_partial()


def test_the_steps_of_elementwise_binary():
    """Without broadcasting, of three dims: ``abc, abc -> abc``."""
    mesh = (2, 3)
    x = TensorSpec((8, 6, 4), [0, -1, -1]).info(mesh)
    y = TensorSpec((8, 6, 4), [-1, 1, -1]).info(mesh)
    # Step 1: the notation. Step 2.1: the letters' mesh dims, merged: a -> 0, b -> 1, c -> -1.
    merged = infer_forward(parse("abc, abc -> abc"), [x, y], mesh)

    def mapping(placements):
        return DimSharding.from_placements(placements, 3, mesh).dims_mapping

    # Step 2.2: the result's. Step 2.3: the inputs' where they need another.
    assert mapping(merged.outputs[0]) == [0, 1, -1]
    assert [mapping(p) for p in merged.inputs] == [[0, 1, -1]] * 2


def test_an_operand_whose_rank_and_dims_mapping_differ_is_refused():
    """Step 0."""
    with pytest.raises(ValueError, match="has 2 entries for the 3 dims"):
        TensorSpec((8, 6, 4), [0, -1])


# --- 2.2.2: ops that change the shape ------------------------------------------------------------


def test_the_transforms_of_a_reshape():
    """(6, 12, 24, 48) -> (72, 24, 6, 8)."""
    assert reshape((6, 12, 24, 48), (72, 24, 6, 8)) == (
        Flatten((InputDim(0), InputDim(1))),
        InputDim(2),
        Split(InputDim(3), (6, 8), 0),
        Split(InputDim(3), (6, 8), 1),
    )


@pytest.mark.parametrize(
    ("given", "used", "result"),
    [
        ([0, -1, 1, -1], [0, -1, 1, -1], [0, 1, -1, -1]),
        ([-1, -1, 0, 1], [-1, -1, 0, 1], [-1, 0, 1, -1]),
        ([0, -1, -1, 1], [0, -1, -1, 1], [0, -1, 1, -1]),
    ],
)
def test_a_sharding_through_those_transforms(given, used, result):
    mesh = (2, 3)
    transforms = reshape((6, 12, 24, 48), (72, 24, 6, 8))
    placements = DimSharding.from_dims_mapping(given).placements(mesh)
    inputs, outputs = propagate(transforms, placements, (6, 12, 24, 48), mesh)
    assert DimSharding.from_placements(inputs, 4, mesh).dims_mapping == used
    assert DimSharding.from_placements(outputs, 4, mesh).dims_mapping == result


def test_a_reshape_with_0_and_minus_1_in_the_target():
    """In Paddle 0 is "as in the source"; in torch it is a dim without elements, so it is resolved
    here as the guide's code does. -1, "what is left", means the same in both."""
    x, target = TensorSpec((6, 12, 24, 48), [0, -1, 1, -1]), [0, -1, 48]
    target = [size or x.shape[d] for d, size in enumerate(target)]
    assert target == [6, -1, 48]
    used, results = spmd_rule("reshape").infer_forward(x, target, mesh_shape=(2, 3))
    assert results[0].shape == (6, 288, 48)
    assert used[0].dims_mapping == [0, -1, 1, -1]
    # The shard of dim 2 is one of each group that dim 1 makes: strided.
    assert results[0].dims_mapping == [0, 1, -1]
    assert results[0].strided == ((1, 1, 12),)
    used, results = spmd_rule("reshape").infer_forward(
        TensorSpec((6, 12, 24, 48), [0, 1, -1, -1]), target, mesh_shape=(2, 3)
    )
    assert (used[0].dims_mapping, results[0].dims_mapping) == ([0, 1, -1, -1], [0, 1, -1])


# --- 2.4: the guide's unit tests -----------------------------------------------------------------


class TestElementwiseSPMDRule:
    def setup_method(self):
        self.unary_rule = spmd_rule("elementwise_unary")
        self.binary_rule = spmd_rule("add")

    def test_single_mesh_dim(self):
        process_mesh = (4,)
        # [0, -1], [-1, -1] --> [0, -1], [0, -1], [0, -1]
        x_dist_tensor_spec = TensorSpec((64, 36), [0, -1])
        y_dist_tensor_spec = TensorSpec((64, 36), [-1, -1])
        result_dist_attrs = self.binary_rule.infer_forward(
            x_dist_tensor_spec, y_dist_tensor_spec, mesh_shape=process_mesh
        )
        infered_input_dist_attrs = result_dist_attrs[0]
        infered_output_dist_attrs = result_dist_attrs[1]

        assert infered_input_dist_attrs[0].dims_mapping == [0, -1]
        assert infered_input_dist_attrs[1].dims_mapping == [0, -1]
        assert infered_output_dist_attrs[0].dims_mapping == [0, -1]

    def test_backward_multi_mesh_dim(self):
        process_mesh = (2, 3)
        x_dist_tensor_spec = TensorSpec((96, 24, 48), [-1, -1, -1])
        y_dist_tensor_spec = TensorSpec((96, 24, 48), [-1, -1, -1])
        # [0, 1, -1] --> [0, 1, -1], [0, 1, -1], [0, 1, -1] (output --> inputs, output)
        out_dist_tensor_spec = TensorSpec((96, 24, 48), [0, 1, -1])
        resulted_dist_attrs = self.binary_rule.infer_backward(
            x_dist_tensor_spec,
            y_dist_tensor_spec,
            out_dist_tensor_spec,
            mesh_shape=process_mesh,
        )
        infered_input_dist_attrs = resulted_dist_attrs[0]
        infered_output_dist_attrs = resulted_dist_attrs[1]

        assert len(resulted_dist_attrs) == 2
        assert len(infered_input_dist_attrs) == 2
        assert len(infered_output_dist_attrs) == 1

        assert infered_input_dist_attrs[0].dims_mapping == [0, 1, -1]
        assert infered_input_dist_attrs[1].dims_mapping == [0, 1, -1]
        assert infered_output_dist_attrs[0].dims_mapping == [0, 1, -1]


def test_the_attributes_of_a_rule_come_after_the_specs():
    """``matmul`` with ``transpose_x`` and ``transpose_y``."""
    rule = spmd_rule("matmul")
    x, y = TensorSpec((32, 64), [0, 1]), TensorSpec((48, 32), [-1, -1])
    used, results = rule.infer_forward(x, y, True, True, mesh_shape=(2, 4))
    assert [spec.dims_mapping for spec in used] == [[0, 1], [-1, 0]]
    assert (results[0].dims_mapping, results[0].partial) == ([1, -1], ((0, "sum"),))
    out = TensorSpec((64, 48), [1, 0])
    used, _ = rule.infer_backward(x, y, out, True, True, mesh_shape=(2, 4))
    assert [spec.dims_mapping for spec in used] == [[-1, 1], [0, -1]]


# --- 3: custom ops -------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.library.Library]:
    """Ops and rules that are forgotten after the test."""
    monkeypatch.setattr(registry, "_USER_RULES", Registry("layout rule", registry.changes))
    registry._find.cache_clear()
    with torch.library._scoped_library("seeds001", "DEF") as made:
        made.define("custom_relu(Tensor X) -> Tensor")
        made.impl("custom_relu", torch.empty_like, "Meta")
        made.define("custom_concat_with_attr(Tensor[] X, int axis) -> Tensor")
        made.impl("custom_concat_with_attr", lambda X, axis: torch.cat(X, axis), "Meta")
        yield made
    registry._find.cache_clear()


X, Y = TensorSpec((64, 36), [0, 1]), TensorSpec((32, 36), [-1, -1])


def test_a_custom_op_without_a_rule_has_none(library):
    with pytest.raises(ValueError, match="custom_relu has no layout rule"):
        spmd_rule("seeds001::custom_relu")


@pytest.mark.parametrize("name", ["elementwise_unary", "relu", "aten::relu"])
def test_a_custom_op_reuses_a_rule_by_name(library, name):
    register_rule("seeds001::custom_relu", name)
    used, results = spmd_rule("seeds001::custom_relu").infer_forward(X, mesh_shape=(2, 4))
    assert used[0].dims_mapping == results[0].dims_mapping == [0, 1]
    used, _ = spmd_rule("seeds001::custom_relu").infer_backward(
        Y, TensorSpec((32, 36), [1, 0]), mesh_shape=(2, 4)
    )
    assert used[0].dims_mapping == [1, 0]


def test_a_reused_rule_is_that_of_the_named_op(library):
    """A pending maximum passes through relu, but not through any elementwise function."""
    pending = TensorSpec((64, 36), [-1, -1], ((0, "max"),))
    register_rule("seeds001::custom_relu", "relu")
    _, (result,) = spmd_rule("seeds001::custom_relu").infer_forward(pending, mesh_shape=(4,))
    assert result.partial == ((0, "max"),)
    register_rule("seeds001::custom_relu", "elementwise_unary", override=True)
    _, (result,) = spmd_rule("seeds001::custom_relu").infer_forward(pending, mesh_shape=(4,))
    assert result.partial == ()


def test_an_elementwise_op_of_another_library_is_not_torchs_of_that_name(library):
    """A pending sum passes through torch's ``neg``; what this one does is not known."""
    library.define("neg(Tensor x) -> Tensor", tags=torch.Tag.pointwise)
    library.impl("neg", torch.empty_like, "Meta")
    pending = TensorSpec((64, 36), [-1, -1], ((0, "sum"),))
    for name, partial in (("aten::neg", ((0, "sum"),)), ("seeds001::neg", ())):
        _, (result,) = spmd_rule(name).infer_forward(pending, mesh_shape=(2, 4))
        assert (result.dims_mapping, result.partial) == ([-1, -1], partial)


def test_a_custom_op_has_a_rule_of_its_own(library):
    def custom_rule(call: Call) -> Merged:
        """the first tensor's layout, the joined dim gathered"""
        first, axis = call.tensors[0], call.args["axis"]
        used = tuple(R if p == S(axis) else p for p in first.placements)
        return call.follow([used] * len(call.tensors), used)

    register_rule("seeds001::custom_concat_with_attr", custom_rule)
    rule = spmd_rule("seeds001::custom_concat_with_attr")
    used, results = rule.infer_forward([X, Y], 0, mesh_shape=(2, 4))
    assert [spec.dims_mapping for spec in used] == [[-1, 1], [-1, 1]]
    assert (results[0].shape, results[0].dims_mapping) == ((96, 36), [-1, 1])
    out = TensorSpec((96, 36), [0, 1])
    used, (result,) = rule.infer_backward([X, Y], 0, out, mesh_shape=(2, 4))
    assert [spec.dims_mapping for spec in used] == [[-1, 1], [-1, 1]]
    assert result.dims_mapping == [-1, 1]


def test_a_reused_rule_takes_arguments_of_other_names_by_position(library):
    """``custom_concat_with_attr`` calls its tensors X and its dim axis; ``concat`` has defaults."""
    register_rule("seeds001::custom_concat_with_attr", "concat")
    rule = spmd_rule("seeds001::custom_concat_with_attr")
    used, results = rule.infer_forward([X, X], 1, mesh_shape=(2, 4))
    assert [spec.dims_mapping for spec in used] == [[0, -1], [0, -1]]
    assert results[0].dims_mapping == [0, -1]


def test_an_op_without_a_rule_can_be_given_the_fallback(library):
    register_rule("seeds001::custom_relu", "replicated")
    used, results = spmd_rule("seeds001::custom_relu").infer_forward(X, mesh_shape=(2, 4))
    assert used[0].dims_mapping == results[0].dims_mapping == [-1, -1]
