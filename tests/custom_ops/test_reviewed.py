"""What a review found: arguments that are one tensor, writes that autograd must see, keys that
collide, recomputation inside of a backward."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from xla_dtensor import DFunction, DistributedOp, Layout, LayoutRuleError

R, S = Replicate(), Shard


def place(tensor, mesh, *placements):
    return distribute_tensor(tensor.detach(), mesh, placements).requires_grad_()


def same(got, want):
    torch.testing.assert_close(got.full_tensor().detach().cpu(), want.detach())


class Scores(DFunction):
    """Each of q's rows against all of k."""

    _op_name = "reviewed.Scores"

    @staticmethod
    def forward(ctx, k, q):
        ctx.save_for_backward(k, q)
        return q @ k.mT

    @staticmethod
    def backward(ctx, grad):
        k, q = ctx.saved_tensors
        return grad.mT @ q, grad @ k


@pytest.mark.parametrize("placements", [(S(0), S(1)), (S(1), S(0)), (S(0), R)], ids=str)
def test_one_tensor_as_two_arguments_in_two_layouts(mesh_2x4, placements):
    DistributedOp("reviewed.Scores", rule="t! h!, s h! -> s t!")
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    want = Scores.apply(x, x)
    want.square().sum().backward()
    d = place(x, mesh_2x4, *placements)
    got = Scores.apply(d, d)
    same(got, want)
    got.square().sum().backward()
    same(d.grad, x.grad)


def test_one_tensor_twice_with_preprocess(mesh_2x4):
    class Op(DistributedOp):
        def preprocess(self, args, kwargs):
            return tuple(a.to_local() for a in args), {}, [a.layout for a in args]

        def infer_layout(self, cache_values):
            empty = Layout.from_device_mesh(cache_values[0].mesh)
            return (empty("dp", "None"),), (empty("None", "None"), empty("dp", "None"))

    Op("reviewed.Scores")
    x = torch.randn(8, 8)
    d = place(x, mesh_2x4, S(0), S(1))
    same(Scores.apply(d, d), x @ x.mT)


class Exp(DFunction):
    _op_name = "reviewed.Exp"

    @staticmethod
    def forward(ctx, x):
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Square(DFunction):
    _op_name = "reviewed.Square"

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


@pytest.fixture
def x(mesh_2x4):
    DistributedOp("reviewed.Exp", rule="... -> ...")
    DistributedOp("reviewed.Square", rule="... -> ...")
    return place(torch.ones(8, 8), mesh_2x4, S(0), R)


def _write_result(x):
    out = Exp.apply(x)
    out.mul_(10)
    return out


def _write_argument(x):
    out = Square.apply(x)
    with torch.no_grad():
        x.add_(10)
    return out


def _write_behind_a_local_tensor(x):
    out = x.to_local().square()
    with torch.no_grad():
        x.add_(10)
    return out


def _write_through_a_local_tensor(x):
    out = x.square()
    with torch.no_grad():
        x.to_local().add_(10)
    return out


@pytest.mark.parametrize(
    "write",
    [_write_result, _write_argument, _write_behind_a_local_tensor, _write_through_a_local_tensor],
)
def test_writes_to_what_is_saved_are_refused(x, write):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        write(x).sum().backward()


def test_writes_to_what_is_not_saved_are_fine(x):
    out = Square.apply(x)
    out.mul_(10)
    out.sum().backward()
    same(x.grad, torch.full((8, 8), 20.0))


def test_recomputation_that_a_backward_starts(x):
    weight = torch.randn(8, 8)
    d = place(weight, x.device_mesh, R, R)
    for value in (x, torch.ones(8, 8, requires_grad=True)):
        w = d if value is x else weight.requires_grad_()
        checkpoint(lambda v, w=w: Square.apply(v @ w), value, use_reentrant=False).sum().backward()
    same(d.grad, weight.grad)


def test_layouts_of_equal_arguments_of_other_types(mesh_2x4, x):
    seen = []

    class Op(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):
            seen.append(extra_args[0])
            return layouts[0]

    class Take(DFunction):
        _op_name = "reviewed.Take"

        @staticmethod
        def forward(ctx, x, how):
            return x * 1

    Op("reviewed.Take")
    for how in (1, True, 1.0, 0.0, -0.0, 1, True):
        Take.apply(x.detach(), how)
    assert [repr(how) for how in seen] == ["1", "True", "1.0", "0.0", "-0.0"]


def test_the_global_view_refuses_per_device_arguments(x):
    class Op(DistributedOp):
        def preprocess(self, args, kwargs):
            return (args[0].to_local(),), {}, [args[0].layout]

        def infer_layout(self, cache_values):
            return (cache_values[0],), None

    class Global(Square):
        view = "global"

    Op("reviewed.Square", override=True)
    with pytest.raises(LayoutRuleError, match=r"preprocess gave a per-device .* give x in place"):
        Global.apply(x)


def test_jax_functions_have_jaxs_dtypes(x):
    ramp = xd.jax_function(lambda x: x * jnp.linspace(0, 1, x.shape[-1]))
    assert ramp(x).dtype == ramp(torch.ones(2, 8)).dtype == torch.float32
    assert ramp(torch.ones(2, 8, dtype=torch.float64)).dtype == torch.float64
    total = xd.jax_function(jnp.sum)(torch.tensor([2**40, 1]))
    assert total.dtype == torch.int64 and total.item() == 2**40 + 1
    sign = xd.jax_function(lambda x, s: jnp.copysign(x, s))
    assert sign(torch.ones(1), 0.0).item() == 1 and sign(torch.ones(1), -0.0).item() == -1


def test_jax_functions_name_arguments_that_cannot_be_keys():
    double = xd.jax_function(lambda x, y: 2 * x)
    with pytest.raises(TypeError, match=r"got an array of shape \(3,\) that is no torch tensor"):
        double(torch.ones(3), np.ones(3))
    with pytest.raises(TypeError, match="must be hashable"):
        double(torch.ones(3), {2})


@torch.library.custom_op("test_reviewed::host", mutates_args=())
def host(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.cpu().numpy() * 2).to(x.device)


@host.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_kernel_that_looks_at_values(x):
    """It may, as long as it isn't to be part of a program."""
    torch.testing.assert_close(host(x.detach()).cpu(), 2 * x.detach().cpu())
    with pytest.raises(xd.DataDependentError, match="while the step is compiled"):
        xd.compile(host)(x.detach())


@pytest.mark.parametrize(
    ("how", "times"),
    [("local", 1), ("computed", 2), ("placed", 2)],
    ids=["local", "computed", "placed"],
)
def test_preprocess_runs_once_where_the_rule_moves_an_input(mesh_2x4, own_ops, how, times):
    """But where it computes with what is moved, or says how its gradient lies."""
    calls = []

    class Op(DistributedOp):
        def preprocess(self, args, kwargs):
            calls.append([a.layout for a in args])
            x, y = args
            shown = x.to_local(grad_placements=x.placements) if how == "placed" else x.to_local()
            return (shown * 1 if how == "computed" else shown, y.to_local()), {}, calls[-1]

        def infer_layout(self, cache_values):
            empty = Layout.from_device_mesh(cache_values[0].mesh)
            return (empty("dp", "None"),), (empty("None", "None"), empty("dp", "None"))

    Op("reviewed.Scores")
    x, y = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    d, e = place(x, mesh_2x4, S(0), S(1)), place(y, mesh_2x4, R, R)
    out = Scores.apply(d, e)
    want = y @ x.mT
    same(out, want)
    assert len(calls) == times
    out.square().sum().backward()
    want.square().sum().backward()
    same(d.grad, x.grad)
