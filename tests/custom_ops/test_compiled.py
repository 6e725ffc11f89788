"""A `DFunction`'s layouts in the compiled program: what is asked of XLA, and what it does."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.programs import constraints
from xla_dtensor import DFunction, DistributedOp
from xla_dtensor.debug.communication import collectives

R, S = Replicate(), Shard


class Product(DFunction):
    _op_name = "compiled.Product"

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.mT, x.mT @ grad


class GlobalProduct(Product):
    view = "global"


@pytest.fixture(autouse=True)
def _op():
    DistributedOp("compiled.Product", rule="n i, i o -> n o")


def place(tensor, mesh, *placements):
    return distribute_tensor(tensor, mesh, placements)


@pytest.mark.parametrize("function", [Product, GlobalProduct])
@pytest.mark.parametrize(
    ("x_placements", "w_placements", "asked", "moved"),
    [
        # Nothing moves.
        ((S(0), R), (R, S(1)), ['[{"dp"}, {"tp"}]'], {}),
        # The larger, w, stays: x's inner dim is gathered.
        ((S(0), S(1)), (R, S(1)), ['[{"dp"}, {}]', '[{"dp"}, {"tp"}]'], {"all-gather": 1}),
        # A sum over tp, which the loss below wants reduced.
        ((S(0), S(1)), (R, S(0)), ['[{"dp"}, {}]'], {"all-reduce": 1}),
    ],
    ids=["in place", "gathered", "reduced"],
)
def test_constraints_and_collectives(
    mesh_2x4, lowered, function, x_placements, w_placements, asked, moved
):
    x, w = torch.randn(8, 16), torch.randn(16, 64)

    @xd.compile
    def step(x, w):
        return function.apply(x, w).reduce_partial()

    got = step(place(x, mesh_2x4, *x_placements), place(w, mesh_2x4, *w_placements))
    torch.testing.assert_close(got.full_tensor().cpu(), x @ w, atol=1e-4, rtol=1e-5)
    found = constraints(lowered[-1])
    assert all(each in found for each in asked), lowered[-1]
    assert collectives(step.compiled_programs()[-1].as_text()) == moved


def test_an_unreduced_result_has_a_leading_axis(mesh_2x4, lowered):
    # Each device's part of the sum: the program asks for them as such, and reduces nothing.
    step = xd.compile(lambda x, w: Product.apply(x, w).to_local())
    x, w = torch.randn(8, 16), torch.randn(16, 64)
    got = step(place(x, mesh_2x4, R, S(1)), place(w, mesh_2x4, R, S(0)))
    assert got.varying == ("tp",)
    torch.testing.assert_close(sum(got.local_values()[:4]), x @ w, atol=1e-4, rtol=1e-5)
    assert '[{"tp"}, {}, {}]' in constraints(lowered[-1])
    assert collectives(step.compiled_programs()[-1].as_text()) == {}


def test_gradients_of_shared_inputs_are_one_all_reduce_each(mesh_2x4):
    @xd.compile
    def step(x, w):
        x, w = x.requires_grad_(), w.requires_grad_()
        return torch.autograd.grad(Product.apply(x, w).square().sum(), (x, w))

    x, w = torch.randn(8, 16), torch.randn(16, 64)
    got = step(place(x, mesh_2x4, S(0), R), place(w, mesh_2x4, R, S(1)))
    x, w = x.requires_grad_(), w.requires_grad_()
    want = torch.autograd.grad((x @ w).square().sum(), (x, w))
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g.full_tensor().cpu(), e, atol=1e-3, rtol=1e-5)
    # x's over tp, w's over dp; XLA may merge them.
    assert collectives(step.compiled_programs()[-1].as_text())["all-reduce"] <= 2
