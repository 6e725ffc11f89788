"""Rules that users register: found, asked of XLA, and refused where they can't be true."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

import xla_dtensor as xd
from tests.programs import constraints
from xla_dtensor import LayoutRuleError, register_rule
from xla_dtensor.debug.communication import collectives
from xla_dtensor.rules import Merged, find_registration, replicate_rule

R, S, P = Replicate(), Shard, Partial()


@torch.library.custom_op("test_user_rules::project", mutates_args=())
def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bsh,ho->bso", x, w)


@project.register_fake
def _(x, w):
    return x.new_empty(*x.shape[:-1], w.shape[-1])


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    x, w = ctx.saved_tensors
    return project(grad, w.mT.contiguous()), torch.einsum("bsh,bso->ho", x, grad)


project.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("test_user_rules::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half].clone(), x[..., half:].clone()


@halves.register_fake
def _(x):
    half = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return half, torch.empty_like(half)


PROJECT = "b s h, h o -> b s o"


@pytest.fixture
def tensors():
    x, w = torch.randn(4, 8, 16).double(), torch.randn(16, 32).double()
    return x.requires_grad_(), w.requires_grad_()


def place(tensor, mesh, *placements):
    return distribute_tensor(tensor.detach(), mesh, placements).requires_grad_()


def same(got, want):
    torch.testing.assert_close(got.full_tensor().detach().cpu(), want.detach())


OPS = {
    "definition": project,
    "packet": torch.ops.test_user_rules.project,
    "overload": torch.ops.test_user_rules.project.default,
    "name": "test_user_rules::project",
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_ways_to_name_an_op(scratch, op):
    register_rule(op, PROJECT)
    found = find_registration(torch.ops.test_user_rules.project.default)
    assert found.text == PROJECT and found.kind == "user"
    assert re.match(rf"{re.escape(__file__)}:\d+", found.where)


@pytest.mark.parametrize(
    ("x_placements", "w_placements", "out"),
    [
        ((S(0), R), (R, S(1)), (S(0), S(2))),
        ((S(0), S(2)), (R, S(0)), (S(0), P)),
        ((S(1), R), (R, R), (S(1), R)),
        # A conflict over the second mesh dim: the smaller tensor moves.
        ((R, S(0)), (R, S(1)), (R, S(0))),
    ],
    ids=str,
)
def test_a_notation_on_a_custom_op(scratch, mesh_2x4, tensors, x_placements, w_placements, out):
    register_rule(project, PROJECT)
    x, w = tensors
    dx, dw = place(x, mesh_2x4, *x_placements), place(w, mesh_2x4, *w_placements)
    got, want = project(dx, dw), project(x, w)
    assert got.placements == out
    same(got, want)
    got.square().sum().backward()
    want.square().sum().backward()
    same(dx.grad, x.grad)
    same(dw.grad, w.grad)


def test_without_a_rule_the_compiler_chooses(scratch, mesh_2x4, tensors):
    x, w = tensors
    assert find_registration(torch.ops.test_user_rules.project.default) is None
    got = project(place(x, mesh_2x4, S(0), R), place(w, mesh_2x4, R, S(1)))
    assert got.placements == (S(0), S(2))
    same(got, project(x, w))


def test_replication_if_the_user_prefers_it(scratch, mesh_2x4, tensors):
    register_rule(project, replicate_rule)
    x, w = tensors
    got = project(place(x, mesh_2x4, S(0), R), place(w, mesh_2x4, R, S(1)))
    assert got.placements == (R, R)
    same(got, project(x, w))


def test_a_new_rule_serves_calls_made_before(scratch, mesh_2x4, tensors):
    x, w = tensors
    dx, dw = place(x, mesh_2x4, S(0), R), place(w, mesh_2x4, R, S(1))
    assert project(dx, dw).placements == (S(0), S(2))
    register_rule(project, "b s h, h o! -> b s o")
    assert project(dx, dw).placements == (S(0), R)
    register_rule(project, "b! s h, h o -> b s o", override=True)
    assert project(dx, dw).placements == (R, S(2))


def test_the_rule_is_an_annotation_of_the_compiled_program(scratch, lowered, mesh_2x4, tensors):
    register_rule(project, "b s h!, h! o -> b s o")
    x, w = tensors
    step = xd.compile(lambda a, b: project(a, b))
    with torch.no_grad():  # or the program also returns what its backward pass needs
        got = step(place(x, mesh_2x4, S(0), S(2)), place(w, mesh_2x4, R, S(1)))
    same(got, project(x, w))
    # x is gathered over tp, and the result asked for in the rule's layout.
    assert '[{"dp"}, {}, {}]' in constraints(lowered[-1])
    assert '[{"dp"}, {}, {"tp"}]' in constraints(lowered[-1])
    assert collectives(step.compiled_programs()[-1].as_text()) == {"all-gather": 1}


def test_the_rule_of_a_torch_op(scratch, mesh_2x4):
    with pytest.raises(LayoutRuleError, match=r"aten::mm already has .* override=True"):
        register_rule(torch.ops.aten.mm, "m k, k n! -> m n")
    register_rule(torch.ops.aten.mm, "m k, k n! -> m n", override=True)
    x, w = torch.randn(8, 16), torch.randn(16, 4)
    got = place(x, mesh_2x4, S(0), R) @ place(w, mesh_2x4, R, S(1))
    assert got.placements == (S(0), R)
    same(got, x @ w)


def test_the_rule_of_another_op(scratch, mesh_2x4):
    register_rule(torch.ops.aten.erfinv, "aten::_softmax")
    assert xd.rules.rules()["aten::erfinv"] == xd.rules.rules()["aten::_softmax"]
    with pytest.raises(LayoutRuleError, match="'no_such_rule' is neither a notation nor"):
        register_rule(torch.ops.aten.erf, "no_such_rule")


def test_a_function(scratch, mesh_2x4):
    calls = []

    def rule(call):
        """first half, second half"""
        calls.append(call)
        (x,) = call.tensors
        kept = tuple(R if p == S(x.ndim - 1) else p for p in x.placements)
        return call.follow([kept], kept)

    register_rule(halves, rule)
    x = torch.randn(4, 8)
    for got, want in zip(halves(place(x, mesh_2x4, S(0), S(1))), halves(x), strict=True):
        assert got.placements == (S(0), R)
        same(got, want)
    assert calls[0].mesh == mesh_2x4 and calls[0].out_shapes == ((4, 4), (4, 4))


def test_a_function_may_return_a_notation_or_leave_it_to_the_compiler(scratch, mesh_2x4, tensors):
    register_rule(project, lambda call: PROJECT if call.tensors[1].shape == (16, 32) else None)
    x, w = tensors
    dx = place(x, mesh_2x4, S(0), S(2))
    assert project(dx, place(w, mesh_2x4, R, S(0))).placements == (S(0), P)
    other = torch.randn(16, 8).double()
    got = project(dx, place(other, mesh_2x4, R, S(0)))
    assert not got.layout.is_partial()  # XLA has no such sharding
    same(got, project(x, other))


BAD = {
    "layouts": (lambda call: Merged(((R, R),) * 2, ((R, R),) * 2), "2 output layouts for 1 out"),
    "inputs": (lambda call: Merged(((R, R),), ((R, R),)), "1 input layouts for 2 tensors"),
    "rank": (lambda call: call.follow([(R, R)] * 2, (S(3), R)), r"\[4, 8, 32\], which has 3 dims"),
    "mesh": (lambda call: call.follow([(R, R)] * 2, (R,)), "one placement per mesh dim"),
    "kind": (lambda call: [(R, R)], "it returns Merged layouts"),
    "notation": ("b s h, h o -> b s o, o", "2 output layouts for 1 out"),
    "letter": ("b s h, s o -> b s o", "letter 's' .* bound to 8 and to 16"),
    "terms": ("b s h -> b s h", "has 1 inputs, not 2"),
}


@pytest.mark.parametrize(("rule", "message"), BAD.values(), ids=BAD)
def test_rules_that_cannot_be_true(scratch, mesh_2x4, tensors, rule, message):
    register_rule(project, rule)
    x, w = tensors
    with pytest.raises(LayoutRuleError, match=message) as caught:
        project(place(x, mesh_2x4, R, R), place(w, mesh_2x4, R, R))
    text = str(caught.value)
    assert "test_user_rules.project" in text and "[[4, 8, 16], [16, 32]]" in text


def test_register_twice(scratch):
    register_rule(project, PROJECT)
    with pytest.raises(LayoutRuleError, match=rf"already has .*registered at {__file__}:\d+"):
        register_rule(project, PROJECT)


@pytest.mark.parametrize("text", ["... n n -> n", "... a -> ... a ... b", "... a, b"])
def test_a_malformed_notation_with_an_ellipsis(scratch, text):
    with pytest.raises(LayoutRuleError, match="test_user_rules::project: "):
        register_rule(project, text)


@torch.library.custom_op("test_user_rules::join", mutates_args=())
def join(parts: list[torch.Tensor], axis: int) -> torch.Tensor:
    return torch.cat(parts, axis)


@join.register_fake
def _(parts, axis):
    return torch.cat(parts, axis)


def test_a_reused_rule_knows_the_arguments_of_its_own_op(scratch, mesh_2x4):
    register_rule(join, "aten::cat")
    parts = [torch.randn(8, 8), torch.randn(8, 8)]
    for axis, placements in ((1, (S(0), R)), (0, (R, S(1)))):
        got = join([place(t, mesh_2x4, S(0), S(1)).detach() for t in parts], axis)
        assert got.placements == placements
        same(got, torch.cat(parts, axis))


def test_no_op(scratch):
    with pytest.raises(LayoutRuleError, match="is no op: give an overload"):
        register_rule(torch.relu, "aten::relu")


@pytest.fixture
def torch_registry():
    """What torch's propagator knows is put back, too."""
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    known = dict(propagator.op_strategy_funcs)
    yield
    propagator.op_strategy_funcs.clear()
    propagator.op_strategy_funcs.update(known)


def test_torchs_register_sharding(scratch, torch_registry, mesh_2x4, tensors):
    # The decorator was imported before the hook was installed: it is seen all the same.
    @register_sharding(torch.ops.test_user_rules.project.default)
    def sharding(x, w):
        assert x.ndim == 3 and w.shape == (16, 32)
        return [
            ([R], [R, R]),
            ([S(0)], [S(0), R]),
            ([P], [S(2), S(0)]),
        ]

    x, w = tensors
    dx, dw = place(x, mesh_2x4, S(0), S(2)), place(w, mesh_2x4, R, R)
    got = project(dx, dw)
    assert got.placements == (S(0), P)
    same(got, project(x, w))
    got = project(dx, place(w, mesh_2x4, R, S(1)))  # not among the acceptable ones
    assert S(2) not in got.placements
    same(got, project(x, w))
    assert find_registration(torch.ops.test_user_rules.project.default).kind == "torch"


def test_torchs_own_example(scratch, torch_registry, mesh_2x4):
    @register_sharding(torch.ops.aten._softmax.default)
    def custom_softmax_sharding(x, dim, half_to_float):
        softmax_dim = dim if dim >= 0 else dim + x.ndim
        acceptable_shardings = []

        all_replicate = ([Replicate()], [Replicate(), None, None])
        acceptable_shardings.append(all_replicate)

        for sharding_dim in range(x.ndim):
            if sharding_dim != softmax_dim:
                all_sharded = (
                    [Shard(sharding_dim)],
                    [Shard(sharding_dim), None, None],
                )
                acceptable_shardings.append(all_sharded)

        return acceptable_shardings

    x = torch.randn(8, 8)
    got = place(x, mesh_2x4, S(0), S(1)).softmax(1)
    assert got.placements == (S(0), R)
    same(got, x.softmax(1))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_rule_of_attention_says_where_tensors_lie(is_causal, scratch, mesh_2x4):
    """Not that a device's shards are enough: queries see the keys of all positions."""

    def by_position(call):
        return Merged(((S(2), R),) * 3, ((S(2), R),))

    register_rule("aten::scaled_dot_product_attention", by_position, override=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    tensors = [torch.randn(2, 4, 8, 8) for _ in range(3)]
    found = attend(*(place(t, mesh_2x4, S(2), R) for t in tensors), is_causal=is_causal)
    assert found.placements == (S(2), R)
    same(found, attend(*tensors, is_causal=is_causal))
