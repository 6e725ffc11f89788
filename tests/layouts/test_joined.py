"""Dims that reshapes join are kept apart: values are the same, and nothing is joined in vain."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xla_dtensor.layouts import kept_apart
from xla_dtensor.layouts.apart import common


def apart(function: Callable[..., Any], *arrays: Any) -> tuple[Any, Any]:
    """The jaxpr of a function of constants, with dims kept apart; and what it gives."""
    closed = jax.make_jaxpr(lambda: function(*arrays))()
    found = kept_apart(closed.jaxpr, (2, 4))[0]
    return found, jaxpr_as_fun(ClosedJaxpr(found, closed.consts))()


def joins(jaxpr: Any) -> list[tuple[int, ...]]:
    """The shapes that reshapes make of which a dim consists of several."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "reshape":
            before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            parts = common(before, after)
            if parts is None or any(len([n for n in p if n > 1]) > 1 for p in parts):
                found.append(after)
    return found


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        ((6, 4), (24,), ((6, 4),)),
        ((6, 4, 8), (24, 2, 4), ((6, 4), (2,), (4,))),
        ((4, 1, 6), (1, 24), ((), (4, 6))),
        ((4, 8, 32), (32, 32), ((4, 8), (32,))),
        ((2, 16, 256), (2, 128, 32), ((2,), (16, 8), (32,))),
        ((4, 6), (6, 4), None),
        ((0, 4), (4, 0), None),
        ((), (1, 1), ((), ())),
    ],
)
def test_common_parts(before: Any, after: Any, parts: Any) -> None:
    assert common(before, after) == parts


def attention(q: Any, k: Any, v: Any) -> Any:
    """In one batch of batch and heads, as `torch.matmul` and `bmm` compute it."""
    b, h, n, d = q.shape
    q, k, v = (x.reshape(b * h, n, d) for x in (q * 1, k * 1, v * 1))
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / math.sqrt(d)
    scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -1e9)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return jnp.einsum("bqk,bkd->bqd", weights, v).reshape(b, h, n, d)


def heads_first(x: Any) -> Any:
    """[length, batch, heads * dim], as `nn.MultiheadAttention` has them."""
    length, batch, wide = x.shape
    heads = (x * 2).reshape(length, batch * 4, wide // 4).transpose(1, 0, 2)
    return heads.reshape(batch, 4, length, wide // 4)


def halves(x: Any) -> Any:
    """As rotary embeddings do it."""
    joined = (x + 1).reshape(-1, *x.shape[2:])
    one, other = joined[..., : x.shape[-1] // 2], joined[..., x.shape[-1] // 2 :]
    return jnp.concatenate([-other, one], -1).reshape(x.shape)


def in_a_call(x: Any) -> Any:
    return jax.jit(lambda y: jnp.maximum(y, 0) * 2)((x + 1).reshape(-1, x.shape[-1])).reshape(
        x.shape
    )


def in_a_loop(x: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        joined = jnp.sin(carry).reshape(-1, carry.shape[-1])
        return (joined * 2).reshape(carry.shape), joined.sum()

    return lax.scan(body, x, None, length=3)


FREED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention": (attention, tuple(numbers(2, 4, 6, 8, seed=i) for i in range(3))),
    "heads_first": (heads_first, (numbers(6, 2, 32),)),
    "halves": (halves, (numbers(2, 3, 8),)),
    "in_a_call": (in_a_call, (numbers(2, 3, 8),)),
    "gradient": (
        lambda *x: jax.grad(lambda *y: attention(*y).sum(), argnums=(0, 1, 2))(*x),
        tuple(numbers(2, 4, 6, 8, seed=i) for i in range(3)),
    ),
}


@pytest.mark.parametrize("case", FREED.values(), ids=FREED)
def test_nothing_is_joined_any_more(case: Any) -> None:
    function, arrays = case
    before = jax.make_jaxpr(lambda: function(*arrays))().jaxpr
    assert joins(before) or function is in_a_call
    jaxpr, got = apart(function, *arrays)
    assert joins(jaxpr) == []
    for one, other in zip(got, jax.tree.leaves(function(*arrays)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_in_the_body_of_a_loop() -> None:
    x = numbers(2, 3, 8)
    jaxpr, got = apart(in_a_loop, x)
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    assert joins(scan.params["jaxpr"].jaxpr) == []
    for one, other in zip(got, jax.tree.leaves(in_a_loop(x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_weight_is_not_taken_apart() -> None:
    """It may be sharded as its parts can't be: six columns over two devices, in three heads."""
    x, weight = numbers(4, 5, 3, 2), numbers(6, 7, seed=1)
    product = lambda x, w: (x * 2).reshape(4, 5, 6) @ w
    jaxpr, (got,) = apart(product, x, weight)
    assert joins(jaxpr) == [(4, 5, 6)]
    np.testing.assert_allclose(got, product(x, weight), rtol=1e-5)


@pytest.mark.parametrize(
    ("devices", "shapes"),
    [
        ((2,), [[]]),
        ((5,), [[]]),
        ((2, 4), [[], [(4, 5, 192)]]),
        ((12,), [[(4, 5, 192)]]),
    ],
)
def test_what_axes_can_cut(devices: tuple[int, ...], shapes: Any) -> None:
    """Six heads of 32: two devices can cut the heads; four only 32, which may be of no use; twelve
    neither, but 192."""
    x = numbers(4, 5, 6, 32)

    def product(x: Any) -> Any:
        joined = (x + 1).reshape(4, 5, 192)
        return jnp.einsum("abc,abd->cd", joined, x[..., 0, :] * 2).reshape(6, 32, 32)

    closed = jax.make_jaxpr(lambda: product(x))()
    assert [joins(jaxpr) for jaxpr in kept_apart(closed.jaxpr, devices)] == shapes


# Of joined dims and a second array.
EMPTY: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "broadcast": (lambda x, y: jnp.broadcast_to((x * 2)[None], (0, *x.shape)), ()),
    "product": (lambda x, y: lax.batch_matmul(x, y), (8, 5, 0)),
    "contracted": (
        lambda x, y: lax.dot_general(x[:, :, :0], y, (((2,), (1,)), ((0,), (0,)))),
        (8, 0),
    ),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y)), (0, 3)),
    "elementwise": (lambda x, y: x[:, :, :0] * y, (8, 3, 0)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_dims_without_elements(name: str) -> None:
    operation, shape = EMPTY[name]
    function = lambda x, y: operation((x + 1).reshape(8, 3, 5), y + 1)
    arrays = numbers(2, 4, 3, 5), numbers(*shape)
    wanted = jax.tree.leaves(function(*arrays))
    _, got = apart(function, *arrays)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_program_without_reshapes_is_the_same_object() -> None:
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(numbers(2, 3))
    assert kept_apart(closed.jaxpr, (2,))[0] is closed.jaxpr


def drawn(rng: random.Random) -> Callable[[Any, Any], list[Any]]:
    """A function of an array [2, 3, 4, 6] and one of the same shape, of a few random operations."""
    seeds = [rng.random() for _ in range(rng.randint(3, 9))]

    def function(x: Any, y: Any) -> list[Any]:
        values = [x * 1, y]
        for seed in seeds:
            own = random.Random(seed)
            a, b = own.choice(values), own.choice(values)
            values.append(own.choice(OPERATIONS)(own, a, b))
        return values[2:]

    return function


def _reshape(rng: random.Random, a: Any, b: Any) -> Any:
    """Neighbours joined, dims split, ones put in."""
    shape = [*a.shape]
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(shape) + 1)
        if rng.random() < 0.5 and at + 1 < len(shape):
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        elif at < len(shape) and shape[at] % 2 == 0 and shape[at] > 2:
            shape[at : at + 1] = rng.choice([[2, shape[at] // 2], [shape[at] // 2, 2]])
        elif rng.random() < 0.5 and len(shape) < 6:
            shape.insert(at, 1)
    return a.reshape(shape)


def _product(rng: random.Random, a: Any, b: Any) -> Any:
    """Over a dim that both have, with as many others in batches as they have alike."""
    pairs = [(i, j) for i, n in enumerate(a.shape) for j, m in enumerate(b.shape) if n == m]
    rng.shuffle(pairs)
    chosen: list[tuple[int, int]] = []
    for i, j in pairs:
        taken = any(i == one or j == other for one, other in chosen)
        if not taken and len(chosen) < rng.randint(1, 3):
            chosen.append((i, j))
    if not chosen or math.prod(a.shape) * math.prod(b.shape) > 50_000:
        return a
    cut = rng.randint(0, len(chosen))
    split = lambda some: (tuple(i for i, _ in some), tuple(j for _, j in some))
    out = lax.dot_general(a, b, (split(chosen[:cut]), split(chosen[cut:])))
    return out / 4 if math.prod(out.shape) < 2_000 else a


def _alike(rng: random.Random, a: Any, b: Any) -> Any:
    if a.size == b.size:
        return a + b.reshape(a.shape)
    return jnp.where(a > 0, a, -a)


def _reduced(rng: random.Random, a: Any, b: Any) -> Any:
    if a.ndim < 2:
        return a * 2
    axis = rng.randrange(a.ndim)
    return a - rng.choice([jnp.sum, jnp.max])(a, axis, keepdims=rng.random() < 2)


def _cut(rng: random.Random, a: Any, b: Any) -> Any:
    d = rng.randrange(a.ndim) if a.ndim else 0
    if a.ndim == 0 or a.shape[d] < 4:
        return a
    return jnp.concatenate([lax.slice_in_dim(a, 2, a.shape[d], axis=d), a * 2], d)[:24]


OPERATIONS = [
    _reshape,
    _reshape,
    _reshape,
    _product,
    _alike,
    _reduced,
    _cut,
    lambda rng, a, b: jnp.transpose(a, rng.sample(range(a.ndim), a.ndim)),
    lambda rng, a, b: lax.optimization_barrier((a, b))[0],
    lambda rng, a, b: jnp.broadcast_to(a[None], (2, *a.shape)) if a.size < 500 else a,
    lambda rng, a, b: jnp.cumsum(a, rng.randrange(a.ndim)) / 2 if a.ndim else a,
    lambda rng, a, b: lax.squeeze(a, [d for d, n in enumerate(a.shape) if n == 1]),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_programs(first: int) -> None:
    for seed in range(first, first + 50):
        function = drawn(random.Random(seed))
        x, y = numbers(2, 3, 4, 6, seed=seed), numbers(2, 3, 4, 6, seed=seed + 1)
        closed = jax.make_jaxpr(lambda x=x, y=y, function=function: function(x, y))()
        wanted = jax.jit(jaxpr_as_fun(closed))()
        for jaxpr in kept_apart(closed.jaxpr, (2, 3)):
            found = jax.jit(jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts)))()
            for one, other in zip(found, wanted, strict=True):
                assert one.shape == other.shape
                np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4, err_msg=str(seed))
