"""Which values lie alike, and which are known to lie somewhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from xla_dtensor.layouts.choose import choices
from xla_dtensor.layouts.graph import Graph

SIZES = {"dp": 2, "tp": 4}
X = jnp.zeros((8, 16))


def graph(function, *args) -> tuple[Graph, list]:  # type: ignore[no-untyped-def, type-arg]
    """The graph of a function, and its results."""
    jaxpr = jax.make_jaxpr(lambda: function(*args))().jaxpr
    return Graph(jaxpr, {}, [None] * len(jaxpr.outvars), SIZES), jaxpr.outvars


W = jnp.zeros((16, 16))


def loop(round_: Any, x: Any, w: Any) -> Any:
    return lax.scan(round_, x, w[None])


ADDED: dict[str, tuple[Any, list[int]]] = {
    "two": (lambda x, v, w: x @ v + x @ w, [2, 2]),
    "three": (lambda x, v, w: x @ v + (x @ w + w @ v), [3, 3, 3]),
    "casts": (lambda x, v, w: (x @ v).astype("bfloat16") + (x @ w).astype("bfloat16"), [2, 2]),
    "times one": (lambda x, v, w: x @ v + lax.mul(x @ w, jnp.float32(1.0)), [2, 2]),
    "times two": (lambda x, v, w: x @ v + lax.mul(x @ w, jnp.float32(2.0)), [0, 0]),
    "with something else": (lambda x, v, w: x @ v + jnp.sin(x), [0]),
    "one is wanted itself": (lambda x, v, w: ((y := x @ v) + x @ w, y.sum()), [0, 0]),
    "with itself": (lambda x, v, w: (y := x @ v) + y, [0]),
    "part of it is wanted": (lambda x, v, w: ((y := x @ v + x @ w) + x @ x, y), [2, 2, 0]),
    "a function of one": (lambda x, v, w: jnp.sin(x @ v) + x @ w, [0, 0]),
    "in a loop": (lambda x, v, w: loop(lambda y, u: (y @ v + y @ u, None), x, w), [2, 2]),
    "one given by a loop": (
        lambda x, v, w: loop(lambda y, u: (y @ v + (z := y @ u), z), x, w),
        [0, 0],
    ),
}


@pytest.mark.parametrize(("function", "counts"), ADDED.values(), ids=ADDED)
def test_products_that_are_only_added(function: Any, counts: list[int]) -> None:
    """XLA adds what devices have of each, and sums once."""
    jaxpr = jax.make_jaxpr(lambda: function(W, W + 1, W + 2))().jaxpr
    results = [None] * len(jaxpr.outvars)
    found = Graph(jaxpr, {}, results, SIZES, adds=True)
    products = [node for node in found.nodes if node.work]
    assert [len(node.added) for node in products] == counts
    assert all(any(node is each for each in node.added) for node in products if node.added)
    assert not any(node.added for node in Graph(jaxpr, {}, results, SIZES).nodes)


def test_two_calls_of_one_function_have_values_of_their_own() -> None:
    inner = jax.jit(lambda x: x * 2)
    found, (one, two) = graph(lambda x, y: (inner(x), inner(y).T), X, X + 1)
    assert found.group(one) is not None and found.group(one) is not found.group(two)


def test_a_barrier_goes_pair_by_pair() -> None:
    barrier = lambda x, y: lax.optimization_barrier((x, y))
    found, (one, two) = graph(barrier, X, jnp.zeros((4, 16)))
    assert found.group(one).shape == (8, 16) and found.group(two).shape == (4, 16)
    assert not found.nodes


def test_elementwise_values_lie_alike() -> None:
    found, (one, two, three) = graph(lambda x, y: (x + y, jnp.sin(x), x.T), X, X + 1)
    assert found.group(one) is found.group(two)
    assert found.group(three) is not found.group(one)


def test_what_is_unknown_is_left_to_xla() -> None:
    loop = lambda x: lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ y.T @ y, x)
    found, (one,) = graph(loop, X)
    assert found.group(one).is_free and found.unknown


def test_what_a_loop_carries_lies_alike_before_and_after() -> None:
    rows = jnp.zeros((3, 16, 16))
    loop = lambda x: lax.scan(lambda y, w: (y @ w, y.sum(1)), x, rows)
    found, (last, sums) = graph(loop, X)
    assert not found.unknown
    (body,) = found.bodies.values()
    assert found.group(last) is found.group(body.inputs[0]) is found.group(body.results[0])
    times = {node.equation.primitive.name: node.times for node in found.nodes if node.equation}
    assert times["dot_general"] == 3 and found.group(sums).shape == (3, 8)


def test_empty_values_have_no_layout() -> None:
    found, (one,) = graph(lambda x: x @ jnp.zeros((16, 0)), X)
    assert found.group(one) is None
    found, _ = graph(lambda x: x[:, :0].reshape(0).sum(), X)
    assert not found.unknown


def test_a_choice_keeps_what_is_known() -> None:
    jaxpr = jax.make_jaxpr(lambda: X @ X.T)().jaxpr
    (constant, *_), (result,) = jaxpr.constvars, jaxpr.outvars
    rows, whole = (("dp",), ()), ((), ())
    choice = next(choices(jaxpr, {constant: rows}, [whole], SIZES))
    assert choice.found and choice.of(constant) == rows
    # One move: of the product, which is smaller than what it is made of.
    assert [move.kind for move in choice.moves()] in (["all-gather"], ["all-gather"] * 2)
    assert choice.of(result) in (whole, rows)


def test_several_axes_cut_slices_in_the_order_in_which_they_cut_the_whole() -> None:
    """As `fully_shard` cuts what tensor parallelism has cut by rows."""
    weights = jnp.zeros((3, 32, 16))
    loop = lambda: lax.scan(lambda y, w: (y @ w.T @ w, None), jnp.zeros((256, 16)), weights)
    jaxpr = jax.make_jaxpr(loop)().jaxpr
    stacked = ((), ("tp", "dp"), ())
    known = {v: stacked for v in jaxpr.constvars if v.aval.shape == weights.shape}
    choice = next(choices(jaxpr, known, [None], SIZES))
    (body,) = choice.graph.bodies.values()
    assert choice.graph.group(body.inputs[1]).orders == {0: ("tp", "dp")}


def test_numbers_that_a_loop_takes_one_by_one_lie_nowhere() -> None:
    numbers = jnp.arange(4.0)
    loop = lambda x: lax.scan(lambda y, n: (y * n, n + 1), x, numbers)
    found, (last, after) = graph(loop, X)
    assert found.group(last) is not None and found.group(after) is not None
    assert all(found.group(v) is not None for node in found.nodes for v in node.operands)
