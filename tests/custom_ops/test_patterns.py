"""seeds/000's examples, with the import lines and the mesh's device type changed and nothing else.

(The document is HyperParallel's page on DFunction.) Each is checked against the same function on
unsharded tensors, all gradients included.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd
from xla_dtensor import (
    DFunction,
    DistributedOp,
    Layout,
    distribute_tensor,
    init_device_mesh,
)

# ── Quick start ──────────────────────────────────────────────────────────────


class MyAddDistOp(DistributedOp):
    def __init__(self):
        super().__init__("MyAdd")

    def infer_layout(self, layouts, extra_args=None):
        return layouts[0]  # element-wise: output layout = first input layout


MyAddDistOp()  # instantiation registers the op


class MyAdd(DFunction):
    _op_name = "MyAdd"

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


# ── Pattern 1: element-wise ──────────────────────────────────────────────────


class _ScaleDistOp(DistributedOp):
    def __init__(self):
        super().__init__("Scale")

    def infer_layout(self, layouts, extra_args=None):
        return layouts[0]  # scale is element-wise


_ScaleDistOp()


class ScaleFunc(DFunction):
    _op_name = "Scale"

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None  # None for the non-tensor scale


# ── Pattern 2: column-parallel Linear ────────────────────────────────────────


def _linear_output_layout(x_layout, w_layout):
    contract = x_layout.alias_tensor_map[-1]
    out = Layout.from_device_mesh(x_layout.mesh)(
        *x_layout.alias_tensor_map[:-1], w_layout.alias_tensor_map[0]
    )
    return out if contract == "None" else out.with_partial(contract)


class LinColDistOp(DistributedOp):
    def __init__(self):
        super().__init__("LinCol")

    def preprocess(self, args, kwargs):
        x, w = args[0], args[1]
        local_args = (x.to_local(), w.to_local())
        cache_values = [x.layout, w.layout]
        return local_args, {}, cache_values

    def infer_layout(self, cache_values):
        x_layout, w_layout = cache_values[0], cache_values[1]
        # derive output layout from x[.., in] and w[out, in] ...
        out_layout = _linear_output_layout(x_layout, w_layout)
        return ((out_layout,), None)

    def get_expand_impl(self, func, infer_result, cache_values):
        return None  # no bias → no scaling needed


LinColDistOp()


class LinColFunc(DFunction):
    _op_name = "LinCol"

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


# ── Pattern 3: row-parallel Linear with bias scaling ─────────────────────────


class LinRowDistOp(DistributedOp):
    def __init__(self):
        super().__init__("LinRow")

    def preprocess(self, args, kwargs):
        x, w, bias = args[0], args[1], args[2]
        local_args = (x.to_local(), w.to_local(), bias)
        cache_values = [x.layout, w.layout, bias is not None]
        return local_args, {}, cache_values

    def infer_layout(self, cache_values):
        x_layout, w_layout = cache_values[0], cache_values[1]
        out_layout = _linear_output_layout(x_layout, w_layout)
        return ((out_layout,), None)

    def get_expand_impl(self, func, infer_result, cache_values):
        x_layout = cache_values[0]
        bias_present = cache_values[2]
        contract = x_layout.alias_tensor_map[-1]
        if contract == "None" or not bias_present:
            return None
        # tp_size: number of TP ranks sharing the contracting dimension
        tp_size = x_layout.mesh.get_device_num_along_axis(contract)

        def expand_impl(x, w, bias):
            return func(x, w, bias / tp_size)  # scale bias down

        return expand_impl


LIN_ROW = LinRowDistOp()


class LinRowFunc(DFunction):
    _op_name = "LinRow"

    @staticmethod
    def forward(ctx, x, w, bias):
        ctx.save_for_backward(x, w, bias)
        return F.linear(x, w, bias)

    @staticmethod
    def backward(ctx, grad):
        x, w, bias = ctx.saved_tensors  # noqa: RUF059  (as in the document)
        return grad @ w, grad.t() @ x, grad.sum(0)


# ── The tests ────────────────────────────────────────────────────────────────


@pytest.fixture
def mesh():
    return init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def sharded(x, mesh, placements):
    return distribute_tensor(x.detach(), mesh, placements).requires_grad_()


def same(got, want):
    got = got.full_tensor() if isinstance(got, xd.XLAShardedTensor) else got
    torch.testing.assert_close(got.detach().cpu(), want.detach())


LAYOUTS = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Replicate(), Shard(0)),
    (Replicate(), Replicate()),
]


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_quick_start(mesh, placements):
    x, y = leaf(8, 16), leaf(8, 16)
    want = MyAdd.apply(x, y)
    (want**2).sum().backward()

    x_dist, y_dist = sharded(x, mesh, placements), sharded(y, mesh, placements)
    result_dist = MyAdd.apply(x_dist, y_dist)
    assert isinstance(result_dist, xd.XLAShardedTensor)
    assert result_dist.placements == placements
    same(result_dist, want)
    (result_dist**2).sum().backward()
    same(x_dist.grad, x.grad)
    same(y_dist.grad, y.grad)
    assert x_dist.grad.placements == placements


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
def test_element_wise(mesh, placements, by_name):
    x = leaf(8, 16)
    want = ScaleFunc.apply(x, 2.5)
    want.square().sum().backward()

    x_dist = sharded(x, mesh, placements)
    # The document forwards a number as a keyword argument alone on this path; here both work.
    result = ScaleFunc.apply(x_dist, scale=2.5) if by_name else ScaleFunc.apply(x_dist, 2.5)
    assert result.placements == placements
    same(result, want)
    result.square().sum().backward()
    same(x_dist.grad, x.grad)


@pytest.mark.parametrize("batch", [Shard(0), Replicate()], ids=str)
def test_column_parallel(mesh, batch):
    x, w = leaf(8, 16), leaf(12, 16)
    want = LinColFunc.apply(x, w)
    want.square().sum().backward()

    x_dist = sharded(x, mesh, (batch, Replicate()))
    w_dist = sharded(w, mesh, (Replicate(), Shard(0)))
    result = LinColFunc.apply(x_dist, w_dist)
    assert result.placements == (batch, Shard(1))
    same(result, want)
    result.square().sum().backward()
    # Every column of devices has contributed to x's gradient, every row to w's.
    same(x_dist.grad, x.grad)
    same(w_dist.grad, w.grad)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("batch", [Shard(0), Replicate()], ids=str)
def test_row_parallel(mesh, batch, on_device):
    x, w, bias = leaf(8, 16), leaf(12, 16), leaf(12)
    want = LinRowFunc.apply(x, w, bias)
    want.square().sum().backward()
    gradients = x.grad, w.grad, bias.grad

    x_dist = sharded(x, mesh, (batch, Shard(1)))
    w_dist = sharded(w, mesh, (Replicate(), Shard(1)))
    own = bias.detach().to("xla" if on_device else "cpu").requires_grad_()
    result = LinRowFunc.apply(x_dist, w_dist, own)
    # result is a partial DTensor; reduce before redistribution
    assert result.layout.partial == (None, "sum")
    output = result.reduce_partial()
    assert output.placements == (batch, Replicate())
    same(output, want)
    output.square().sum().backward()
    for got, expected in zip((x_dist.grad, w_dist.grad, own.grad), gradients, strict=True):
        same(got, expected)


def test_row_parallel_unscaled_bias_would_be_added_four_times(mesh):
    x, w, bias = leaf(8, 16), leaf(12, 16), leaf(12)
    x_dist = sharded(x, mesh, (Replicate(), Shard(1)))
    w_dist = sharded(w, mesh, (Replicate(), Shard(1)))

    class Unscaled(LinRowDistOp):
        def __init__(self):
            DistributedOp.__init__(self, "LinRow", override=True)

        def get_expand_impl(self, func, infer_result, cache_values):
            return None

    Unscaled()
    output = LinRowFunc.apply(x_dist, w_dist, bias.detach()).reduce_partial()
    same(output, F.linear(x, w) + 4 * bias)


@pytest.mark.parametrize("function", ["add", "scale", "column", "row"])
def test_compiled(mesh, function):
    x, w, bias = leaf(8, 16), leaf(12, 16), leaf(12)
    call, tensors, placements = {
        "add": (MyAdd.apply, (x, leaf(8, 16)), [(Shard(0), Shard(1))] * 2),
        "scale": (lambda x: ScaleFunc.apply(x, 2.5), (x,), [(Shard(0), Shard(1))]),
        "column": (LinColFunc.apply, (x, w), [(Shard(0), Replicate()), (Replicate(), Shard(0))]),
        "row": (
            lambda x, w, b: LinRowFunc.apply(x, w, b.to_local()).reduce_partial(),
            (x, w, bias),
            [(Shard(0), Shard(1)), (Replicate(), Shard(1)), (Replicate(), Replicate())],
        ),
    }[function]

    def plain():
        if function == "row":
            return LinRowFunc.apply(*tensors)
        return call(*tensors)

    want = plain()
    gradients = torch.autograd.grad(want.square().sum(), tensors)

    @xd.compile
    def step(*dist):
        out = call(*dist)
        return out, torch.autograd.grad(out.square().sum(), dist)

    dist = [sharded(t, mesh, p) for t, p in zip(tensors, placements, strict=True)]
    for _ in range(2):
        out, grads = step(*dist)
        same(out, want)
        for got, expected in zip(grads, gradients, strict=True):
            same(got, expected)


def test_gradient_of_a_local_tensor(mesh):
    x_leaf = leaf(8, 16)
    want = ScaleFunc.apply(x_leaf, 3.0)
    want.sum().backward()

    x_dist = distribute_tensor(x_leaf.detach(), mesh, (Shard(0), Shard(1))).requires_grad_()
    x_local = x_dist.to_local()  # returns the internal local tensor (non-leaf)
    x_local.retain_grad()  # allow grad accumulation on non-leaf
    assert x_dist.to_local() is x_local

    result = ScaleFunc.apply(x_dist, 3.0)
    result.to_local().sum().backward()

    values = x_local.grad.local_values()  # gradient available here
    assert len(values) == 8
    for value in values:
        torch.testing.assert_close(value, torch.full((4, 4), 3.0))
    same(x_dist.grad, x_leaf.grad)


def test_gradient_of_a_shared_local_tensor_is_complete(mesh):
    # x is the same on all columns of devices: its gradient is the sum of what they contribute.
    x, w = leaf(8, 16), leaf(12, 16)
    LinColFunc.apply(x, w).square().sum().backward()
    x_dist = sharded(x, mesh, (Replicate(), Replicate()))
    w_dist = sharded(w, mesh, (Replicate(), Shard(0)))
    x_local = x_dist.to_local()
    x_local.retain_grad()
    LinColFunc.apply(x_dist, w_dist).square().sum().backward()
    assert x_local.grad.varying == ()
    same(x_local.grad, x.grad)


def test_layouts_are_inferred_once(mesh):
    LIN_ROW.cache_clear()
    x_dist = sharded(leaf(8, 16), mesh, (Replicate(), Shard(1)))
    w_dist = sharded(leaf(12, 16), mesh, (Replicate(), Shard(1)))
    for _ in range(3):
        LinRowFunc.apply(x_dist, w_dist, torch.zeros(12))
    assert LIN_ROW.cache_info() == (2, 1, 1)
    other = sharded(leaf(8, 16), mesh, (Shard(0), Shard(1)))
    LinRowFunc.apply(other, w_dist, torch.zeros(12))
    assert LIN_ROW.cache_info() == (2, 2, 2)
