"""Finding a rule, and the rules that torch's DTensor has no counterpart of."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from xla_dtensor.rules import (
    Call,
    Merged,
    TensorInfo,
    find_rule,
    infer,
    infer_placements,
    register,
    register_rule,
    replicate_rule,
    rules,
)

aten = torch.ops.aten
R, P, S = Replicate(), Partial(), Shard
MESH = (2, 4)


def info(*shape, placements=(R, R), dtype=torch.float32):
    return TensorInfo(shape, placements, dtype)


def outputs(func, args, shapes, kwargs=None):
    return infer_placements(func, args, kwargs or {}, shapes, MESH)


def test_every_rule_is_of_an_op_that_torch_has():
    missing = []
    for name in rules():
        namespace, op = name.split("::")
        packet, _, overload = op.partition(".")
        found = getattr(getattr(torch.ops, namespace), packet, None)
        # In-place-only ops are registered by their functional name.
        found = found or getattr(getattr(torch.ops, namespace), packet + "_", None)
        if found is None or (overload and overload not in found.overloads()):
            missing.append(name)
    assert not missing


def test_an_unknown_op_has_no_rule():
    assert find_rule(aten.lstm.input) is None
    assert outputs(aten.lstm.input, (), []) is None


@pytest.mark.parametrize(
    "func",
    [
        aten.relu_.default,
        aten.add_.Tensor,
        aten.mm.out,
        aten.sum.IntList_out,
        aten.index_put_.default,
        aten.clamp_.Tensor,
        aten._foreach_addcdiv_.ScalarList,
        aten._fused_adamw_.default,
        aten.masked_fill_.Tensor,
        aten.permute_copy.default,
        aten.uniform_.default,
        aten.transpose_.default,
        torch.ops.prims.view_of.default,
    ],
    ids=str,
)
def test_other_forms_of_an_op_have_its_rule(func):
    assert find_rule(func) is not None


def test_a_written_result_stays_as_it_was():
    x = info(8, 16, placements=(R, S(1)))
    y = info(8, 16, placements=(S(0), R))
    assert outputs(aten.add_.Tensor, (x, y), [(8, 16)]) == [(R, S(1))]
    out = info(8, 16, placements=(S(1), R))
    assert outputs(aten.add.out, (x, y), [(8, 16)], {"out": out}) == [(S(1), R)]
    # The inputs' layouts still say how it is computed.
    merged = infer(aten.add.out, (x, y), {"out": out}, [(8, 16)], MESH)
    assert merged is not None and merged.inputs == ((S(0), S(1)), (S(0), S(1)))


def test_lists_go_element_by_element():
    xs = [info(8, 4, placements=(S(0), R)), info(6, placements=(R, P))]
    got = outputs(aten._foreach_mul.Scalar, (xs, 2.0), [(8, 4), (6,)])
    assert got == [(S(0), R), (R, P)]
    assert outputs(aten._foreach_add_.Scalar, (xs, 2.0), []) == []
    ys = [info(8, 4), info(6)]
    merged = infer(aten._foreach_addcdiv.Scalar, (xs, ys, ys), {}, [(8, 4), (6,)], MESH)
    assert merged is not None
    assert merged.outputs == ((S(0), R), (R, R))
    assert len(merged.inputs) == 6


def test_a_fused_step_follows_each_parameter():
    params = [info(8, 4, placements=(S(0), R)), info(6, placements=(R, S(0)))]
    grads = [info(8, 4, placements=(P, R)), info(6)]
    steps = [info(), info()]
    args = (params, grads, params, params, [], steps)
    merged = infer(aten._fused_adamw_.default, args, {}, [], MESH)
    assert merged is not None
    own = [p.placements for p in params]
    assert list(merged.inputs) == own * 4 + [(R, R)] * 2


@pytest.mark.parametrize("func", [aten.scaled_dot_product_attention.default])
def test_attention_keeps_batch_heads_and_queries(func):
    def result(*layouts):
        args = tuple(info(4, 8, 16, 8, placements=layout) for layout in layouts)
        return outputs(func, args, [(4, 8, 16, 8)])

    for dim in (0, 1):
        assert result(*[(S(dim), R)] * 3) == [(S(dim), R)]
    assert result((S(0), S(1)), (S(0), S(1)), (S(0), S(1))) == [(S(0), S(1))]
    assert result((R, S(2)), (R, R), (R, R)) == [(R, S(2))]
    assert result((R, S(2)), (R, S(2)), (R, S(2))) == [(R, S(2))]
    assert result((R, R), (R, S(3)), (R, S(3))) == [(R, R)]


def test_grouped_queries_shard_over_the_key_heads():
    q = info(4, 8, 16, 8, placements=(R, S(1)))
    kv = info(4, 4, 16, 8, placements=(R, S(1)))
    kwargs = {"enable_gqa": True}
    func = aten.scaled_dot_product_attention.default
    assert outputs(func, (q, kv, kv), [(4, 8, 16, 8)], kwargs) == [(R, S(1))]


def test_batch_norm_keeps_a_sharded_batch():
    x = info(8, 4, 6, 6, placements=(S(0), S(1)))
    channels = info(4)
    args = (x, channels, channels, channels, channels, True, 0.1, 1e-5)
    got = outputs(aten.native_batch_norm.default, args, [(8, 4, 6, 6), (4,), (4,)])
    assert got == [(S(0), S(1)), (R, S(0)), (R, S(0))]


CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


@pytest.mark.parametrize(
    ("x", "weight", "out"),
    [
        ((S(0), R), (R, R), (S(0), R)),
        ((R, R), (R, S(0)), (R, S(1))),
        ((R, S(1)), (R, S(1)), (R, P)),
        ((S(0), R), (R, S(0)), (S(0), S(1))),
        ((R, S(2)), (R, R), (R, S(2))),
    ],
)
def test_convolution(x, weight, out):
    args = (info(8, 4, 6, 6, placements=x), info(8, 4, 1, 1, placements=weight), None, *CONV)
    assert outputs(aten.convolution.default, args, [(8, 8, 6, 6)]) == [out]


def test_convolution_backward_sums_over_the_batch():
    batch = info(8, 4, 6, 6, placements=(S(0), R))
    args = (batch, batch, info(4, 4, 1, 1), [4], *CONV, [True, True, True])
    shapes = [(8, 4, 6, 6), (4, 4, 1, 1), (4,)]
    got = outputs(aten.convolution_backward.default, args, shapes)
    assert got == [(S(0), R), (P, R), (P, R)]


@pytest.mark.parametrize(
    ("func", "a", "b", "shapes", "out"),
    [
        (aten.matmul.default, (S(0), R), (R, S(1)), [(4, 8, 16), (16, 8)], (S(0), S(2))),
        (aten.matmul.default, (R, S(2)), (R, S(0)), [(4, 8, 16), (16, 8)], (R, P)),
        (aten.matmul.default, (S(0), R), (S(0), R), [(16,), (16,)], (P, R)),
        (aten.linear.default, (S(0), R), (R, S(0)), [(4, 8, 16), (8, 16)], (S(0), S(2))),
        (aten.linear.default, (S(0), S(2)), (R, S(1)), [(4, 8, 16), (8, 16)], (S(0), P)),
    ],
)
def test_composite_products(func, a, b, shapes, out):
    args = tuple(info(*s, placements=p) for s, p in zip(shapes, (a, b), strict=True))
    result = func(*(torch.empty(s, device="meta") for s in shapes))
    assert outputs(func, args, [tuple(result.shape)]) == [out]


def test_einsum_is_its_own_notation():
    a, b = info(4, 8, placements=(S(0), S(1))), info(8, 6, placements=(R, S(0)))
    assert outputs(aten.einsum.default, ("ij,jk->ik", [a, b]), [(4, 6)]) == [(S(0), P)]


def test_an_average_of_uneven_shards_is_taken_of_the_whole():
    assert outputs(aten.mean.default, (info(8, placements=(S(0), R)),), [()]) == [
        (Partial("avg"), R)
    ]
    assert outputs(aten.mean.default, (info(7, placements=(S(0), R)),), [()]) == [(R, R)]
    assert outputs(aten.sum.default, (info(7, placements=(S(0), R)),), [()]) == [(P, R)]


def test_an_uneven_shard_survives_what_does_not_reshape_it():
    x = info(7, 3, placements=(S(0), S(1)))
    assert outputs(aten.add.Tensor, (x, x), [(7, 3)]) == [(S(0), S(1))]
    assert outputs(aten.view.default, (x, [7, 1, 3]), [(7, 1, 3)]) == [(S(0), S(2))]
    assert outputs(aten.view.default, (x, [21]), [(21,)]) == [(R, R)]
    assert outputs(aten.relu.default, (info(1, placements=(S(0), R)),), [(1,)]) == [(S(0), R)]


def test_masks_leave_the_answer_to_the_compiler():
    mask = info(8, dtype=torch.bool)
    assert outputs(aten.index.Tensor, (info(8), [mask]), [(3,)]) is None


def test_a_result_that_is_no_tensor_is_skipped_over():
    x, w = info(8, 4, placements=(S(0), R)), info(4)
    stats = info(8, 1, placements=(S(0), R))
    args = (x, x, [4], stats, stats, w, w, [True, False, True])
    got = outputs(aten.native_layer_norm_backward.default, args, [(8, 4), None, (4,)])
    assert got is not None
    assert (got[0], got[2]) == ((S(0), R), (P, R))


def test_a_mesh_of_many_dims_is_merged_in_reasonable_time():
    mesh = (2,) * 6
    x = TensorInfo((64,) * 4, (S(0), S(1), S(2), S(3), R, R), torch.float32)
    y = TensorInfo((64,) * 4, (R, R, S(2), S(0), S(1), R), torch.float32)
    got = infer_placements(aten.add.Tensor, (x, y), {}, [x.shape], mesh)
    assert got is not None and got[0][2] == S(2)


# --- registering ---------------------------------------------------------------------------------


def test_a_rule_by_notation_by_name_and_by_function(scratch):
    register_rule("mylib::project", "b s h, h o -> b s o")
    register_rule("mylib::relu", "aten::_softmax")

    @register("everything", namespace="mylib")
    def everything(call: Call) -> Merged:
        """as it comes"""
        return call.follow([t.placements for t in call.tensors], call.tensors[0].placements)

    assert rules()["mylib::project"] == "b s h, h o -> b s o"
    assert rules()["mylib::everything"] == "as it comes"
    assert rules()["mylib::relu"] == rules()["aten::_softmax"]


def test_a_second_registration_is_an_error_unless_meant(scratch):
    with pytest.raises(ValueError, match=r"aten::mm already has a layout rule: m k, k n -> m n"):
        register_rule("aten::mm", "a b, b c -> a c")
    register_rule(aten.mm.default, replicate_rule, override=True)
    x = info(8, 8, placements=(S(0), R))
    assert outputs(aten.mm.default, (x, x), [(8, 8)]) == [(R, R)]


def test_a_reference_to_no_rule_is_an_error(scratch):
    with pytest.raises(ValueError, match="neither a notation nor the name of"):
        register_rule("mylib::other", "aten::no_such_op")


def test_a_rule_with_too_few_results_is_named(scratch):
    register_rule(aten.mm.default, "m k, k n -> m n, m", override=True)
    with pytest.raises(RuntimeError, match=r"aten.mm.default gave 2 output layouts for 1"):
        outputs(aten.mm.default, (info(8, 8), info(8, 8)), [(8, 8)])
