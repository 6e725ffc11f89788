"""`DFunction` and `DistributedOp` beyond the three patterns: arguments, results, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor import DFunction, DistributedOp, Layout
from xla_dtensor.movement.collectives import all_reduce

R, S, P = Replicate(), Shard, Partial()


def leaf(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def sharded(x, mesh, *placements):
    return distribute_tensor(x.detach(), mesh, placements).requires_grad_(x.requires_grad)


def whole(x):
    return (x.full_tensor() if isinstance(x, xd.XLAShardedTensor) else x).detach().cpu()


def same(got, want):
    torch.testing.assert_close(whole(got), want.detach())


class Linear(DFunction):
    """x[n, i], w[o, i], b[o] or None, and whether to negate."""

    _op_name = "test.Linear"

    @staticmethod
    def forward(ctx, x, w, b=None, *, negate=False):
        ctx.save_for_backward(x, w)
        ctx.sign = -1 if negate else 1
        ctx.has_bias = b is not None
        return ctx.sign * F.linear(x, w, b)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = ctx.sign * grad
        gx = grad @ w if ctx.needs_input_grad[0] else None
        gw = grad.mT @ x if ctx.needs_input_grad[1] else None
        return (gx, gw, grad.sum(0)) if ctx.has_bias else (gx, gw)


# The bias is added to the products' sum, not to each device's part of it: `i` stays whole.
BIASED = "n i!, o i!, o -> n o"


@pytest.fixture
def linear():
    return DistributedOp("test.Linear", rule=BIASED)


@pytest.mark.parametrize(
    ("x_placements", "w_placements", "b_placements", "out"),
    [
        ((S(0), R), (R, R), (R, R), (S(0), R)),
        ((S(0), R), (R, S(0)), (R, R), (S(0), S(1))),
        ((R, R), (S(0), S(0)), (S(0), S(0)), (S(1), S(1))),
        ((S(1), R), (R, S(0)), (R, R), (R, S(1))),
        ((R, R), (R, R), (R, R), (R, R)),
    ],
    ids=str,
)
def test_a_notation(mesh_2x4, linear, x_placements, w_placements, b_placements, out):
    x, w, b = leaf(8, 16), leaf(24, 16), leaf(24)
    want = Linear.apply(x, w, b)
    want.square().sum().backward()
    dist = [
        sharded(x, mesh_2x4, *x_placements),
        sharded(w, mesh_2x4, *w_placements),
        sharded(b, mesh_2x4, *b_placements),
    ]
    got = Linear.apply(*dist)
    same(got, want)
    assert got.placements == out
    got.square().sum().backward()
    for d, t in zip(dist, (x, w, b), strict=True):
        same(d.grad, t.grad)
        assert d.grad.placements == d.placements


def test_a_plain_tensor_is_cut_as_the_rule_wants(mesh_2x4, linear):
    x, w, b = leaf(8, 16), leaf(24, 16), leaf(24)
    want = Linear.apply(x, w, b)
    want.square().sum().backward()
    w_dist, own = sharded(w, mesh_2x4, R, S(0)), b.detach().clone().requires_grad_()
    x_dist = sharded(x, mesh_2x4, R, R)
    got = Linear.apply(x_dist, w_dist, own)
    assert got.placements == (R, S(1))
    got.square().sum().backward()
    same(got, want)
    torch.testing.assert_close(own.grad, b.grad)


@pytest.mark.parametrize("gradient_of", ["x", "w", "neither"])
def test_needs_input_grad(mesh_2x4, gradient_of):
    DistributedOp("test.Linear", rule="n i, o i -> n o")
    x, w = leaf(8, 16), leaf(24, 16)
    x.requires_grad_(gradient_of == "x")
    w.requires_grad_(gradient_of == "w")
    dx, dw = sharded(x, mesh_2x4, S(0), R), sharded(w, mesh_2x4, R, S(0))
    got, want = Linear.apply(dx, dw), Linear.apply(x, w)
    assert got.requires_grad == want.requires_grad == (gradient_of != "neither")
    if want.requires_grad:
        want.square().sum().backward()
        got.square().sum().backward()
    for d, t in ((dx, x), (dw, w)):
        assert (d.grad is None) == (t.grad is None)
        if t.grad is not None:
            same(d.grad, t.grad)


@pytest.mark.parametrize("plain", [False, True])
def test_keyword_arguments(mesh_2x4, plain):
    DistributedOp("test.Linear", rule=BIASED)
    x, w, b = leaf(8, 16), leaf(24, 16), leaf(24)
    want = -F.linear(x, w, b)
    gradients = torch.autograd.grad(want.square().sum(), (x, w, b))
    place = (lambda t: t) if plain else (lambda t: sharded(t, mesh_2x4, R, R))
    args = [place(t) for t in (x, w, b)]
    got = Linear.apply(args[0], b=args[2], w=args[1], negate=True)
    same(got, want)
    for g, e in zip(torch.autograd.grad(got.square().sum(), args), gradients, strict=True):
        same(g, e)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: Linear.apply(x, bias=x), "unexpected keyword argument 'bias'|missing"),
        (lambda x: Linear.apply(x, b=x), "missing its argument 'w'"),
        (lambda x: Linear.apply(x, x, x=x), "unexpected keyword argument 'x'"),
    ],
)
def test_wrong_keyword_arguments(call, message):
    with pytest.raises(TypeError, match=message):
        call(leaf(4, 4))


def test_a_keyword_only_tensor_has_no_gradient():
    class Shifted(DFunction):
        @staticmethod
        def forward(ctx, x, *, by):
            return x + by

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = leaf(3)
    same(Shifted.apply(x, by=torch.ones(3)), x + 1)
    with pytest.raises(TypeError, match="'by' is keyword-only and requires grad"):
        Shifted.apply(x, by=leaf(3))


class MinMax(DFunction):
    """Of the last dim: the minimum, where it is, the maximum, and a word."""

    _op_name = "test.MinMax"

    @staticmethod
    def forward(ctx, x):
        low, where = x.min(-1)
        high = x.amax(-1)
        ctx.save_for_backward(x, where, high)
        ctx.mark_non_differentiable(where)
        return low, where, high, "done"

    @staticmethod
    def backward(ctx, g_low, g_where, g_high, _):
        x, where, high = ctx.saved_tensors
        at_low = F.one_hot(where, x.shape[-1])
        return g_low[..., None] * at_low + g_high[..., None] * (x == high[..., None])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("used", ["low", "high", "both"])
@pytest.mark.parametrize("placements", [(S(0), R), (R, S(0)), (S(1), S(0))], ids=str)
def test_several_results(mesh_2x4, placements, used):
    DistributedOp("test.MinMax", rule="... h! -> ..., ..., ...")
    x = leaf(8, 2, 5)

    def loss(low, high):
        parts = {"low": low.sum(), "high": (high**2).sum()}
        return parts["low"] + parts["high"] if used == "both" else parts[used]

    low, where, high, _ = MinMax.apply(x)
    loss(low, high).backward()
    d = sharded(x, mesh_2x4, *placements)
    got = MinMax.apply(d)
    assert isinstance(got, tuple) and got[3] == "done"
    assert not got[1].requires_grad and got[1].dtype == torch.int64
    for g, e in zip(got, (low, where, high), strict=False):
        same(g, e)
        assert g.placements == placements
    loss(got[0], got[2]).backward()
    same(d.grad, x.grad)


class Cube(DFunction):
    _op_name = "test.Cube"

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x**3 * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * 3 * x**2 * w, (grad * x**3).sum(0)


@pytest.mark.parametrize("placements", [(S(0), R), (S(0), S(1)), (R, S(1))], ids=str)
def test_double_backward(mesh_2x4, placements):
    DistributedOp("test.Cube", rule="n h, h -> n h")

    def second(x, w):
        out = Cube.apply(x, w)
        gx, gw = torch.autograd.grad((out**2).sum(), (x, w), create_graph=True)
        return torch.autograd.grad((gx**2).sum() + (gw**3).sum(), (x, w))

    x, w = leaf(8, 4), leaf(4)
    want = second(x, w)
    got = second(sharded(x, mesh_2x4, *placements), sharded(w, mesh_2x4, R, R))
    for g, e in zip(got, want, strict=True):
        same(g, e)


def test_gradient_through_a_collective_in_forward(mesh_2x4):
    """Normalised by a sum over all shards; the result is sharded, what it was divided by isn't."""

    class Normalise(DFunction):
        _op_name = "test.Normalise"

        @staticmethod
        def forward(ctx, x):
            total = x.sum()
            if isinstance(x, xd.XLATensor):
                total = all_reduce(total, (mesh_2x4, "tp"))
            ctx.save_for_backward(x, total)
            return x / total

        @staticmethod
        def backward(ctx, grad):
            x, total = ctx.saved_tensors
            inner = (grad * x).sum()
            if isinstance(x, xd.XLATensor):
                inner = all_reduce(inner, (mesh_2x4, "tp"))
            return grad / total - inner / total**2

    DistributedOp("test.Normalise", rule="n -> n")
    x = torch.rand(8, dtype=torch.float64, requires_grad=True)
    d = sharded(x, mesh_2x4, R, S(0))
    Normalise.apply(x).square().sum().backward()
    Normalise.apply(d).square().sum().backward()
    same(d.grad, x.grad)


def test_a_gradient_summed_in_backward_is_not_summed_again(mesh_2x4):
    class Scale(DFunction):
        """x[n, h] * w[h], with w's gradient summed by hand as under torchrun."""

        _op_name = "test.ScaleByHand"

        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            own = (grad * x).sum(0)
            if isinstance(own, xd.XLATensor):
                own = all_reduce(own, (mesh_2x4, "dp"))
            return grad * w, own

    DistributedOp("test.ScaleByHand", rule="n h, h -> n h")
    x, w = leaf(8, 4), leaf(4)
    Scale.apply(x, w).square().sum().backward()
    d = sharded(x, mesh_2x4, S(0), R), sharded(w, mesh_2x4, R, R)
    Scale.apply(*d).square().sum().backward()
    same(d[0].grad, x.grad)
    same(d[1].grad, w.grad)


class Squares(DFunction):
    """Sums each device's squares, times a weight: a part of the whole sum per device."""

    _op_name = "test.Squares"

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x**2).sum() * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * 2 * x * w, grad * (x**2).sum()


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_partial_results(mesh_2x4, reduce_op):
    class Op(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):
            return Layout.from_device_mesh(mesh_2x4)().with_partial("tp", reduce_op)

    Op("test.Squares")
    x, w = leaf(8), leaf()
    share = 1 if reduce_op == "sum" else 1 / 4
    want = share * (x**2).sum() * w
    (want**2).backward()
    d = sharded(x, mesh_2x4, R, S(0)), sharded(w, mesh_2x4, R, R)
    got = Squares.apply(*d)
    assert got.layout.partial == (None, reduce_op)
    same(got, want)
    (got.reduce_partial() ** 2).backward()
    same(d[0].grad, x.grad)
    same(d[1].grad, w.grad)


def test_partial_inputs(mesh_2x4):
    class Double(DFunction):
        _op_name = "test.Double"

        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    class Op(DistributedOp):
        def infer_layout(self, layouts, extra_args=None):
            return layouts[0]

    Op("test.Double")
    parts = torch.randn(8, 5, dtype=torch.float64)
    local = xd.from_device_values(list(parts), mesh_2x4).requires_grad_()
    x = xd.XLAShardedTensor.from_local(local, mesh_2x4, (P, P))
    with pytest.raises(
        NotImplementedError, match=r"'test.Double' got a partial tensor .*reduce_partial"
    ):
        Double.apply(x)

    class LinearOp(Op):
        allow_partial_inputs = True

    LinearOp("test.Double", override=True)
    out = Double.apply(x)
    assert out.placements == (P, P)
    same(out, 2 * parts.sum(0))
    (out.reduce_partial() ** 2).sum().backward()
    # Every part has the gradient of the sum.
    for value in local.grad.local_values():
        torch.testing.assert_close(value, 8 * parts.sum(0))


def test_infer_layout_may_ask_for_inputs_elsewhere(mesh_2x4):
    class Softmax(DFunction):
        _op_name = "test.Softmax"

        @staticmethod
        def forward(ctx, x):
            out = x.softmax(-1)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad):
            (out,) = ctx.saved_tensors
            return out * (grad - (grad * out).sum(-1, keepdim=True))

    class Op(DistributedOp):
        def preprocess(self, args, kwargs):
            return (args[0].to_local(),), {}, [args[0].layout]

        def infer_layout(self, cache_values):
            layout = cache_values[0]
            free = Layout.from_device_mesh(layout.mesh)(*layout.alias_tensor_map[:-1], "None")
            return (free,), (free,)

    Op("test.Softmax")
    x = leaf(8, 4)
    want = Softmax.apply(x)
    (want**2).sum().backward()
    d = sharded(x, mesh_2x4, S(0), S(1))
    got = Softmax.apply(d)
    assert got.placements == (S(0), R)
    same(got, want)
    (got**2).sum().backward()
    same(d.grad, x.grad)
    assert d.grad.placements == (S(0), S(1))


def test_tensors_in_containers(mesh_2x4):
    class Total(DFunction):
        _op_name = "test.Total"

        @staticmethod
        def forward(ctx, x, others):
            return x + sum(others["all"])

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    DistributedOp("test.Total", rule="n, n, n -> n")
    x, y = leaf(8), torch.randn(8, dtype=torch.float64)
    d, e = sharded(x, mesh_2x4, S(0), R), sharded(y, mesh_2x4, R, S(0))
    got = Total.apply(d, {"all": [e, e]})
    same(got, x + 2 * y)
    with pytest.raises(TypeError, match="requires grad inside a list or dict"):
        Total.apply(e, {"all": [d, d]})


def test_setup_context(mesh_2x4):
    class Exp(DFunction):
        _op_name = "test.Exp"

        @staticmethod
        def forward(x, scale):
            return (scale * x).exp()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)
            ctx.scale = inputs[1]

        @staticmethod
        def backward(ctx, grad):
            (out,) = ctx.saved_tensors
            return grad * out * ctx.scale, None

    DistributedOp("test.Exp", rule="... -> ...")
    x = leaf(8, 4)
    d = sharded(x, mesh_2x4, S(0), S(1))
    for tensor in (x, d):
        Exp.apply(tensor, scale=0.5).sum().backward()
    same(d.grad, x.grad)


def test_no_grad(mesh_2x4, linear):
    x, w, b = leaf(8, 16), leaf(24, 16), leaf(24)
    with torch.no_grad():
        got = Linear.apply(*(sharded(t, mesh_2x4, R, R) for t in (x, w, b)))
    assert not got.requires_grad
    same(got, F.linear(x, w, b))


class Centre(DFunction):
    """Minus the mean over the first dim: needs every shard, which the global view sees."""

    _op_name = "test.Centre"
    view = "global"

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x - x.mean(0)) * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        scaled = grad * w
        return scaled - scaled.mean(0), (grad * (x - x.mean(0))).sum(0)


@pytest.mark.parametrize("shape", [(8, 4), (7, 5)], ids=["even", "uneven"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_global_view(mesh_2x4, compiled, shape):
    DistributedOp("test.Centre", rule="n h, h -> n h")
    x, w = leaf(*shape), leaf(shape[1])

    def step(x, w):
        out = Centre.apply(x, w)
        return out, *torch.autograd.grad((out**2).sum(), (x, w))

    want = step(x, w)
    d = sharded(x, mesh_2x4, S(0), R), sharded(w, mesh_2x4, R, S(0))
    got = (xd.compile(step) if compiled else step)(*d)
    assert got[0].placements == (S(0), S(1))
    for g, e in zip(got, want, strict=True):
        same(g, e)


def test_the_global_view_of_a_partial_result(mesh_2x4):
    class Total(DFunction):
        _op_name = "test.GlobalTotal"
        view = "global"

        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            return x.sum(0)

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(ctx.shape)

    DistributedOp("test.GlobalTotal", rule="n h -> h")
    x = leaf(8, 4)
    d = sharded(x, mesh_2x4, S(0), R)
    got = Total.apply(d)
    assert got.placements == (P, R)
    same(got, x.sum(0))
    (got**2).sum().backward()
    (x.sum(0) ** 2).sum().backward()
    same(d.grad, x.grad)


def test_on_a_submesh():
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    DistributedOp("test.Linear", rule="n i, o i -> n o")
    x, w = leaf(4, 16), leaf(24, 16)
    d, e = sharded(x, mesh["tp"], R), sharded(w, mesh["tp"], S(0))
    want = Linear.apply(x, w)
    want.square().sum().backward()
    got = Linear.apply(d, e)
    assert got.layout == Layout.from_device_mesh(mesh["tp"])("None", "tp")
    got.square().sum().backward()
    same(got, want)
    same(d.grad, x.grad)
    same(e.grad, w.grad)


def test_under_data_parallelism(mesh_2x4):
    """Each row of devices has a batch of its own: gradients are summed over tp, not over dp."""
    DistributedOp("test.Linear", rule=BIASED)
    tp = mesh_2x4["tp"]
    w, b = leaf(24, 16), leaf(24)
    batches = [leaf(4, 16) for _ in range(2)]
    values = [batches[i // 4].detach() for i in range(8)]
    local = xd.from_device_values(values, mesh_2x4, vary=["dp"]).requires_grad_()
    dx = xd.XLAShardedTensor.from_local(local, tp, [R])
    dw, db = sharded(w, tp, S(0)), sharded(b, tp, R)
    got = Linear.apply(dx, dw, db)
    got.square().sum().backward()
    for i, x in enumerate(batches):
        w.grad = b.grad = None
        want = Linear.apply(x, w, b)
        want.square().sum().backward()
        own = slice(4 * i, 4 * i + 4)
        out = got.full_tensor().detach().local_values()[own]
        torch.testing.assert_close(out[0], want.detach())
        torch.testing.assert_close(local.grad.local_values()[own][0], x.grad)
        torch.testing.assert_close(db.grad.full_tensor().local_values()[own][0], b.grad)
        torch.testing.assert_close(dw.grad.full_tensor().local_values()[own][0], w.grad)


def test_plain_per_device_tensors_take_torchs_own_way(mesh_2x4):
    # Without a sharded tensor nobody looks for an op.
    class Square(DFunction):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    values = torch.randn(8, 3)
    local = xd.from_device_values(list(values), mesh_2x4).requires_grad_()
    out = Square.apply(local)
    out.sum().backward()
    for value, own in zip(local.grad.local_values(), values, strict=True):
        torch.testing.assert_close(value, 2 * own)
