"""Every mistake has an error of its own, with the op, the rule and the shapes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor import DFunction, DistributedOp, Layout, LayoutRuleError

R, S = Replicate(), Shard


class Same(DFunction):
    _op_name = "err.Same"

    @staticmethod
    def forward(ctx, x, *others):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.fixture
def x(mesh_2x4):
    return distribute_tensor(torch.randn(8, 4), mesh_2x4, (S(0), R)).requires_grad_()


def op_of(infer, *, values=None, **kwargs):
    """An op whose infer_layout is ``infer``, with ``values`` of its arguments for cache values."""

    class Op(DistributedOp):
        def preprocess(self, args, kwargs):
            return None if values is None else values(*args)

        def infer_layout(self, layouts_or_cache, extra_args=None):
            return infer(layouts_or_cache)

    return Op("err.Same", **kwargs)


def test_no_op_name(x):
    class Nameless(Same):
        _op_name = None

    with pytest.raises(ValueError, match=r"Nameless\.apply got a sharded .* register one with"):
        Nameless.apply(x)


def test_unknown_op_name(x):
    DistributedOp("err.Other", rule="n -> n")
    with pytest.raises(
        ValueError, match=r"Same\._op_name = 'err.Same' \(registered: .*err.Other.*register one"
    ):
        Same.apply(x)


def test_registered_twice():
    DistributedOp("err.Same", rule="n -> n")
    with pytest.raises(LayoutRuleError, match=rf"'err.Same' is registered already: .*{__file__}:"):
        DistributedOp("err.Same", rule="n -> n")
    replaced = DistributedOp("err.Same", rule="n m -> n m", override=True)
    assert replaced.rule == "n m -> n m"


@pytest.mark.parametrize(
    ("rule", "message"), [("n n -> n", "names two dims"), ("n, n", "one '->'")]
)
def test_malformed_notation(rule, message):
    with pytest.raises(LayoutRuleError, match=f"'err.Same': .*{message}"):
        DistributedOp("err.Same", rule=rule)


def test_no_rule_at_all(x):
    DistributedOp("err.Same")
    with pytest.raises(LayoutRuleError, match=r"'err.Same'.*implement infer_layout, or pass rule="):
        Same.apply(x)


@pytest.mark.parametrize("outputs", [0, 2])
def test_wrong_number_of_layouts(x, outputs):
    op_of(lambda layouts: (layouts[0],) * outputs)
    with pytest.raises(
        LayoutRuleError,
        match=rf"Op.infer_layout of 'err.Same' gave {outputs} layouts .* 1 tensors.*\[\[4, 4\]\]",
    ):
        Same.apply(x)


def test_wrong_number_of_results_by_notation(x):
    DistributedOp("err.Same", rule="n m -> n m, n")
    with pytest.raises(LayoutRuleError, match=r"'n m -> n m, n' of 'err.Same' gave 2 layouts"):
        Same.apply(x)


def test_another_mesh(x):
    op_of(lambda layouts: Layout((8,), ("all",))("all", "None"))
    with pytest.raises(
        LayoutRuleError,
        match=r"'err.Same' gave a layout on another mesh, Layout\(all=8.*\[\[8, 4\]\].*dp=2",
    ):
        Same.apply(x)


@pytest.mark.parametrize("wrong", ["dp", None, (R, R)])
def test_no_layout(x, wrong):
    op_of(lambda layouts: [wrong])
    with pytest.raises(LayoutRuleError, match=r"of 'err.Same' gave .* \[\[8, 4\]\]; a rule gives"):
        Same.apply(x)


def test_an_empty_layout(x):
    op_of(lambda layouts: Layout.from_device_mesh(layouts[0].mesh))
    with pytest.raises(LayoutRuleError, match=r"gave Layout\(dp=2, tp=4\) for .*concrete"):
        Same.apply(x)


def test_rank_mismatch(x):
    op_of(lambda layouts: Layout.from_device_mesh(layouts[0].mesh)("dp", "None", "None"))
    with pytest.raises(LayoutRuleError, match=r"a tensor of 3 dims, for result 0 of shape \[4, 4"):
        Same.apply(x)


def test_a_mesh_dim_used_twice(x):
    op_of(lambda layouts: Layout.from_device_mesh(layouts[0].mesh)("dp", "dp"))
    with pytest.raises(
        LayoutRuleError,
        match=r"of 'err.Same' failed on .*\[\[8, 4\]\].*uses mesh dim 'dp'.* dim 0 and again",
    ):
        Same.apply(x)


def test_a_letter_bound_to_two_sizes(x, mesh_2x4):
    DistributedOp("err.Same", rule="n m, m k -> n k")
    y = distribute_tensor(torch.randn(6, 2), mesh_2x4, (R, R))
    with pytest.raises(
        LayoutRuleError,
        match=r"'n m, m k -> n k' of 'err.Same' .*\[\[8, 4\], \[6, 2\]\].*'m' .* 4 and to 6",
    ):
        Same.apply(x, y)


def test_a_term_of_another_rank(x):
    DistributedOp("err.Same", rule="n -> n")
    with pytest.raises(LayoutRuleError, match=r"\[\[8, 4\]\].*does not fit shape \(8, 4\)"):
        Same.apply(x)


def test_forward_returns_a_sharded_tensor(x):
    class Sharded(Same):
        @staticmethod
        def forward(ctx, local):
            return x * 1

    DistributedOp("err.Same", rule="n m -> n m")
    with pytest.raises(
        LayoutRuleError,
        match=r'forward returned a sharded tensor of shape \[8, 4\].*view = "global"',
    ):
        Sharded.apply(x)


def test_a_result_that_contradicts_the_rule(x):
    class Short(Same):
        @staticmethod
        def forward(ctx, x):
            return x[:2] * 1

    DistributedOp("err.Same", rule="n m -> n m")
    with pytest.raises(
        LayoutRuleError,
        match=r"'n m -> n m' of 'err.Same' makes result 0 a tensor of shape \[8, 4\] .*holds "
        r"\[4, 4\]; forward returned \[2, 4\]",
    ):
        Short.apply(x)


def test_a_global_result_that_contradicts_the_rule(x):
    class Short(Same):
        view = "global"

        @staticmethod
        def forward(ctx, x):
            return x[:2] * 1

    DistributedOp("err.Same", rule="n m -> n m")
    with pytest.raises(LayoutRuleError, match=r"shape \[8, 4\]; forward returned \[2, 4\]"):
        Short.apply(x)


def test_a_result_that_differs_where_the_rule_replicates(x):
    op_of(lambda layouts: Layout.from_device_mesh(layouts[0].mesh)("None", "None"))
    with pytest.raises(LayoutRuleError, match=r"replicated over mesh dim 'dp', but .*\[4, 4\]"):
        Same.apply(x)


def test_sharded_tensors_inside_of_forward(x):
    class Nested(Same):
        @staticmethod
        def forward(ctx, local):
            return Same.apply(x).to_local()

    DistributedOp("err.Same", rule="n m -> n m")
    with pytest.raises(NotImplementedError, match=r"Same.apply got .* inside .*Nested.fo"):
        Nested.apply(x)
    Same.apply(x)  # and nothing is left behind


def test_sharded_tensors_inside_of_backward(x):
    class Nested(Same):
        @staticmethod
        def backward(ctx, grad):
            return Same.apply(x).to_local()

    DistributedOp("err.Same", rule="n m -> n m")
    out = Nested.apply(x)
    with pytest.raises(NotImplementedError, match=r"Same.apply got a sharded .*Nested.backward"):
        out.sum().backward()
    Same.apply(x)


def test_functions_on_per_device_tensors_nest(x):
    class Nested(Same):
        @staticmethod
        def forward(ctx, local):
            return Same.apply(local)

    DistributedOp("err.Same", rule="n m -> n m")
    torch.testing.assert_close(Nested.apply(x).full_tensor().cpu(), x.detach().full_tensor().cpu())


def test_in_place(x):
    class InPlace(Same):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

    DistributedOp("err.Same", rule="n m -> n m")
    with pytest.raises(NotImplementedError, match=r"'err.Same': forward marked an argument"):
        InPlace.apply(x * 1)


def test_two_meshes(x):
    other = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("a", "b"))
    y = distribute_tensor(torch.randn(8, 4), other, (R, R))
    DistributedOp("err.Same", rule="n m, n m -> n m")
    with pytest.raises(xd.MeshMismatchError, match=r"'err.Same': one tensor is on .* bring them"):
        Same.apply(x, y)


def test_uneven_shards(mesh_2x4):
    x = distribute_tensor(torch.randn(7, 4), mesh_2x4, (S(0), R))
    DistributedOp("err.Same", rule="n m -> n m")
    with pytest.raises(NotImplementedError, match="dim 0 of size 7 doesn't divide by 2"):
        Same.apply(x)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda x: (x.to_local(),), "returns None or .local_args, local_kwargs, cache_values."),
        (lambda x: ((x.to_local(),), {}, [x]), "put a tensor into cache_values"),
        (lambda x: ((x.to_local(),), {}, [{1}]), "must be hashable"),
        (lambda x: ((x,), {}, [x.layout]), "argument 0 of forward is a sharded tensor"),
    ],
)
def test_preprocess(x, values, message):
    op_of(lambda cache: ((cache[0],), None), values=values)
    with pytest.raises(LayoutRuleError, match=f"'err.Same'.*{message}"):
        Same.apply(x)


@pytest.mark.parametrize(
    ("infer", "message"),
    [
        (lambda cache: cache[0], "returns .layouts of the results, None or"),
        (lambda cache: ((cache[0],), (cache[0], None)), "gave 2 input layouts for 1 sharded"),
        (lambda cache: ((cache[0],), (Layout((8,), ("a",))("a"),)), "on another mesh"),
        (
            lambda cache: ((cache[0],), (Layout.from_device_mesh(cache[0].mesh)("dp"),)),
            r"of 1 dims, for an argument of shape \[8, 4\]",
        ),
    ],
)
def test_infer_layout_of_cache_values(x, infer, message):
    op_of(infer, values=lambda x: ((x.to_local(),), {}, [x.layout]))
    with pytest.raises(LayoutRuleError, match=f"'err.Same'.*{message}"):
        Same.apply(x)


def test_wrong_view(x):
    class Wrong(Same):
        view = "both"

    DistributedOp("err.Same", rule="n m -> n m")
    with pytest.raises(ValueError, match=r'Wrong.view is "local" or "global", not \'both\''):
        Wrong.apply(x)


def test_mixed_contributions(mesh_2x4):
    """w's gradient from a sharded and from a replicated result can't be told apart."""

    class Mixed(DFunction):
        _op_name = "err.Mixed"

        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x)
            return x * w, w * 1

        @staticmethod
        def backward(ctx, grad, other):
            (x,) = ctx.saved_tensors
            return None, (grad * x).sum() + other

    class Op(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):
            return layouts[0], layouts[1]

    Op("err.Mixed")
    x = distribute_tensor(torch.randn(8), mesh_2x4, (S(0), R))
    w = distribute_tensor(torch.tensor(2.0), mesh_2x4, (R, R)).requires_grad_()
    one, two = Mixed.apply(x, w)
    one.sum().backward(retain_graph=True)  # one of them alone is clear
    torch.testing.assert_close(w.grad.full_tensor().cpu(), x.full_tensor().cpu().sum())
    with pytest.raises(NotImplementedError, match=r"argument 1 of 'err.Mixed' .*\['dp'\].*apart"):
        (one.sum() + two).backward()


def test_the_gradient_of_a_maximum(mesh_2x4):
    class Largest(DFunction):
        _op_name = "err.Largest"

        @staticmethod
        def forward(ctx, x):
            return x.amax()

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Op(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):
            return Layout.from_device_mesh(mesh_2x4)().with_partial("dp", "max")

    Op("err.Largest")
    x = distribute_tensor(torch.randn(8), mesh_2x4, (S(0), R)).requires_grad_()
    out = Largest.apply(x)
    torch.testing.assert_close(out.full_tensor().cpu(), x.detach().full_tensor().cpu().max())
    with pytest.raises(NotImplementedError, match="depends on which device's value was the max"):
        out.reduce_partial().backward()
