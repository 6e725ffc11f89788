"""`jax_function`: JAX inside of torch, on every kind of tensor, differentiable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor import DFunction, DistributedOp, LayoutRuleError, jax_function

R, S = Replicate(), Shard


def leaf(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def place(tensor, mesh, *placements):
    return distribute_tensor(tensor.detach(), mesh, placements).requires_grad_()


def same(got, want):
    got = got.full_tensor() if isinstance(got, xd.XLAShardedTensor) else got
    torch.testing.assert_close(got.detach().cpu(), want.detach())


@jax_function
def layer(x, w, *, scale=1.0, activate="tanh"):
    y = x @ w * scale
    return {"y": jnp.tanh(y) if activate == "tanh" else y, "top": jnp.argmax(x, -1)}


def torch_layer(x, w, scale=1.0):
    return torch.tanh(x @ w * scale)


def test_of_host_tensors():
    x, w = leaf(8, 4), leaf(4, 6)
    out = layer(x, w, scale=0.5)
    assert out["y"].device.type == "cpu"
    same(out["y"], torch_layer(x, w, 0.5))
    same(out["top"], x.argmax(-1).int())  # JAX's default integer
    assert not out["top"].requires_grad
    got = torch.autograd.grad(out["y"].square().sum(), (x, w))
    want = torch.autograd.grad(torch_layer(x, w, 0.5).square().sum(), (x, w))
    torch.testing.assert_close(got, want)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "placements", [((S(0), R), (R, S(1))), ((S(0), S(1)), (R, S(0))), ((R, R), (R, R))], ids=str
)
def test_of_sharded_tensors(mesh_2x4, placements, compiled):
    x, w = leaf(8, 4), leaf(4, 8)

    def step(x, w):
        out = layer(x, w)["y"]
        first = torch.autograd.grad(out.square().sum(), (x, w), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), (x, w))
        return out, *first, *second

    def torch_step(x, w):
        out = torch_layer(x, w)
        first = torch.autograd.grad(out.square().sum(), (x, w), create_graph=True)
        return out, *first, *torch.autograd.grad(first[0].square().sum(), (x, w))

    dist = [place(t, mesh_2x4, *p) for t, p in zip((x, w), placements, strict=True)]
    for got, want in zip(
        (xd.compile(step) if compiled else step)(*dist), torch_step(x, w), strict=True
    ):
        same(got, want)


def test_of_per_device_tensors(mesh_2x4):
    values = torch.randn(8, 3, 4, dtype=torch.float64)
    w = leaf(4, 5)
    local = xd.from_device_values(list(values), mesh_2x4)
    out = layer(local, w.detach().to("xla"))["y"]
    for got, value in zip(out.local_values(), values, strict=True):
        torch.testing.assert_close(got, torch_layer(value, w.detach()))


def test_some_results_unused_and_some_inputs_without_gradient(mesh_2x4):
    @jax_function
    def several(x, n, y):
        return x * y, (y**2, n + 1)

    x, y = leaf(8), leaf(8)
    n = torch.arange(8)
    dx, dy = place(x, mesh_2x4, S(0), R), place(y, mesh_2x4, R, S(0))
    _, (squared, count) = several(dx.detach(), distribute_tensor(n, mesh_2x4, (S(0), R)), dy)
    same(count, n + 1)
    squared.sum().backward()
    same(dy.grad, 2 * y)
    assert dx.grad is None


def test_a_rule(mesh_2x4):
    x, w = leaf(8, 4), leaf(4, 8)
    product = jax_function(lambda x, w: x @ w, rule="n i!, i! o -> n o")
    got = product(place(x, mesh_2x4, S(0), S(1)), place(w, mesh_2x4, R, S(1)))
    assert got.placements == (S(0), S(1))
    same(got, x @ w)
    with pytest.raises(LayoutRuleError, match=r"'n i!, i! o -> n o' of .*has 2 inputs, not 1"):
        jax_function(lambda x: x, rule="n i!, i! o -> n o")(place(x, mesh_2x4, R, R))
    with pytest.raises(ValueError, match="one '->'"):
        jax_function(lambda x: x, rule="n")


def test_other_arguments_compile_once_each():
    traced = []

    @jax_function
    def scaled(x, by):
        traced.append(by)
        return x * by

    x = torch.ones(3, device="xla")
    for by in (2, 2.0, True, 2, 2.0):
        scaled(x, by)
    types = [type(by) for by in traced]
    assert {int, float, bool} == set(types)
    count = len(traced)
    scaled(x, 2.0)
    assert len(traced) == count


def test_custom_vjp():
    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    x = leaf(5)
    (jax_function(clip)(x) * 3).sum().backward()
    same(x.grad, torch.full((5,), 0.1, dtype=torch.float64))


def own_gradients(arrays, out, cotangent):
    x, y = arrays
    return cotangent * jnp.cos(x) * y, cotangent * jnp.sin(x)


@pytest.mark.parametrize("vjp", [None, own_gradients])
def test_complex_numbers(vjp):
    """Gradients are torch's, which are the conjugates of JAX's."""
    x, y, weight = (torch.randn(4, dtype=torch.complex128, requires_grad=True) for _ in range(3))
    found = []
    for function in (
        lambda x, y: torch.sin(x) * y,
        jax_function(lambda x, y: jnp.sin(x) * y, vjp=vjp),
    ):
        loss = torch.view_as_real(function(x, y) * weight).pow(3).sum()
        once = torch.autograd.grad(loss, (x, y), create_graph=True)
        twice = torch.autograd.grad(sum(g.abs().square().sum() for g in once), (x, y))
        found.append([*once, *twice])
    for got, want in zip(found[1], found[0], strict=True):
        same(got, want)


def test_mistakes():
    x = leaf(3)
    with pytest.raises(TypeError, match=r"jax_function\(layer\) was called without a tensor"):
        layer(1.0, 2.0)
    with pytest.raises(ValueError, match="returned 2 gradients for 1 arrays"):
        jax_function(jnp.sin, vjp=lambda a, o, g: (g, g))(x).sum().backward()
    with pytest.raises(ValueError, match=r"gradient of shape \(2,\) for an array of shape \(3,\)"):
        jax_function(jnp.sin, vjp=lambda a, o, g: (g[:2],))(x).sum().backward()
    with pytest.raises(NotImplementedError, match=r"shape \[3\] on meta; it takes xla and CPU"):
        layer(torch.empty(3, device="meta"))


# ── A Pallas kernel ──────────────────────────────────────────────────────────


def swish_kernel(x_ref, out_ref):
    x = x_ref[...]
    out_ref[...] = x / (1 + jnp.exp(-x))


def swish_rows(x):
    """x[n, h] * sigmoid(x), a row at a time."""
    row = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        swish_kernel,
        out_shape=shape,
        grid=(x.shape[0],),
        in_specs=[row],
        out_specs=row,
        interpret=True,
    )(x)


def swish_gradient(arrays, out, cotangent):
    (x,) = arrays
    s = jax.nn.sigmoid(x)
    return (cotangent * (s + out * (1 - s)),)


swish = jax_function(swish_rows, vjp=swish_gradient)


class Swish(DFunction):
    _op_name = "jax.Swish"

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return swish(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            return torch.autograd.grad(swish(own), own, grad)[0]


DistributedOp("jax.Swish", rule="n h -> n h")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("view", ["itself", "local", "global"])
def test_a_pallas_kernel(mesh_2x4, view, compiled):
    x = leaf(8, 16)
    want = torch.nn.functional.silu(x)
    gradient = torch.autograd.grad(want.square().sum(), x)[0]

    class Viewed(Swish):
        pass

    Viewed.view = view
    function = swish if view == "itself" else Viewed.apply

    def step(x):
        out = function(x)
        return out, torch.autograd.grad(out.square().sum(), x)[0]

    dist = place(x, mesh_2x4, S(0), S(1))
    out, grad = (xd.compile(step) if compiled else step)(dist)
    same(out, want)
    same(grad, gradient)
    if view != "itself":
        assert out.placements == (S(0), S(1))


def test_a_pallas_kernel_on_plain_tensors():
    x = leaf(4, 8)
    out = Swish.apply(x)
    same(out, torch.nn.functional.silu(x))
    got = torch.autograd.grad(out.sum(), x)[0]
    same(got, torch.autograd.grad(torch.nn.functional.silu(x).sum(), x)[0])
