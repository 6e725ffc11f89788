"""What is saved within a budget, of jaxprs made by hand: bytes, cost, values, effects."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from xla_dtensor.compilation.budget.again import within_budgets
from xla_dtensor.compilation.budget.choose import choose
from xla_dtensor.compilation.budget.cut import MinimumCut
from xla_dtensor.compilation.budget.forward import Forward
from xla_dtensor.compilation.budget.saving import Saving
from xla_dtensor.compilation.budget.shares import shares_of
from xla_dtensor.compilation.trace.backward_passes import spans_of

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)[::-1] / 2

LONG = np.ones((8, 4000), np.float32)

passes = jax.named_scope


def layers(depth: int) -> Any:
    """A chain of products with a narrow place after each, and its gradient by hand."""

    def step() -> Any:
        x, w = jnp.asarray(X), jnp.asarray(W)
        kept = []
        for _ in range(depth):
            wide = jnp.concatenate([x @ w, x @ w.T], 1)
            x = x + jnp.tanh(wide)[:, :8]
            kept.append((wide, x))
        with passes("backward_pass_0"):
            grad = jnp.ones_like(x)
            for wide, x in reversed(kept):
                grad = grad + jnp.cos(wide)[:, 8:] * x @ w.T * grad
        return grad

    return closed(step)


def closed(step: Any) -> Any:
    """A jaxpr of constants, as a trace's."""
    leaves = jax.tree.leaves
    return jax.make_jaxpr(lambda: leaves(step()))()


def forward_of(jaxpr: Any, number: int = 0) -> Forward:
    spans = spans_of(jaxpr.eqns)
    shares = shares_of(jaxpr, [None] * len(jaxpr.constvars))
    return Forward(jaxpr, spans[number], [*spans.values()], shares)


def run(made: Any, *budgets: float) -> list[Any]:
    found = within_budgets(made.jaxpr, budgets, [None] * len(made.consts))
    return jaxpr_as_fun(made.replace(jaxpr=found))()


def names(jaxpr: Any) -> list[str]:
    return [e.primitive.name for e in jaxpr.eqns]


@pytest.mark.parametrize("depth", [1, 4, 12])
def test_within_the_budget_at_the_least_cost(depth: int) -> None:
    made = layers(depth)
    forward = forward_of(made.jaxpr)
    everything = Saving(forward, forward.everything())
    assert everything.peak == depth * (8 * 16 + 8 * 8) * 4
    assert everything.cost == 0
    least = choose(forward, 0)
    costs = []
    for budget in np.linspace(1, 0, 11):
        plan = choose(forward, budget)
        assert plan.peak <= max(budget * everything.peak, least.peak)
        costs.append(plan.cost)
    assert costs == sorted(costs)
    if depth == 12:
        # A layer's own, and about as many narrow places as there are pieces.
        assert least.peak < 0.4 * everything.peak
        # Nothing runs more than once: each layer has two products.
        again = [i for equations in least.again.values() for i in equations]
        assert len(again) == len({*again})
        found = within_budgets(made.jaxpr, [0], [None] * len(made.consts))
        before = names(made.jaxpr).count("dot_general")
        assert before < names(found).count("dot_general") <= before + 2 * depth


@pytest.mark.parametrize("budget", [1, 0.7, 0.4, 0.1, 0])
def test_values(budget: float) -> None:
    made = layers(6)
    (expected,), (found,) = jaxpr_as_fun(made)(), run(made, budget)
    np.testing.assert_array_equal(found, expected)


def test_no_budget_no_change() -> None:
    jaxpr = layers(3).jaxpr
    assert within_budgets(jaxpr, [1], [None]) is jaxpr


def test_small_ones_of_which_large_ones_are_made() -> None:
    """The column is saved, not what is made of it by the way."""

    def step() -> Any:
        large = []
        for i in range(8):
            column = jnp.asarray(LONG) @ jnp.full((LONG.shape[1], 1), i, np.float32)
            large.append(jnp.exp(jnp.broadcast_to(column, (8, 800))))
        with passes("backward_pass_0"):
            return [jnp.sin(each).sum() for each in reversed(large)]

    forward = forward_of(closed(step).jaxpr)
    plan = choose(forward, 0.252)  # one of them in the making, and all columns
    again = {str(forward.equations[i].primitive) for some in plan.again.values() for i in some}
    assert "exp" in again
    assert "dot_general" not in again


def test_effects_happen_once() -> None:
    seen = []

    def step() -> Any:
        x = jnp.asarray(X) @ jnp.asarray(W)
        jax.debug.callback(lambda value: seen.append(value), x)
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct((8, 8), np.float32), x)
        with passes("backward_pass_0"):
            return jnp.cos(x) * y

    made = closed(step)
    (expected,) = jaxpr_as_fun(made)()
    (found,) = run(made, 0)
    jax.effects_barrier()
    np.testing.assert_array_equal(found, expected)
    assert len(seen) == 2  # once each


def test_keys_are_made_again() -> None:
    """Of random numbers neither the numbers nor their key: both follow from the generator's state
    behind a barrier."""

    def step() -> Any:
        key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(SEED)), 7)
        mask = jax.random.bernoulli(key, 0.5, (64, 64))
        x = jnp.where(mask, jnp.asarray(X)[0, 0], 0.0).sum()
        with passes("backward_pass_0"):
            return jnp.where(mask, x, 1.0)

    made = closed(step)
    forward = forward_of(made.jaxpr)
    plan = Saving(forward, MinimumCut(forward, ()).saved(1e7))
    assert all(v.aval.shape == () for v in plan.saved)
    (expected,), (found,) = jaxpr_as_fun(made)(), run(made, 0)
    np.testing.assert_array_equal(found, expected)


SEED = np.array([1, 2], np.uint32)


def test_what_is_there_anyway() -> None:
    """A value that the step returns, or computes with later, is in memory for that."""

    def step() -> Any:
        first = jnp.tanh(jnp.asarray(X) @ jnp.asarray(W))
        second = jnp.tanh(first @ jnp.asarray(W))
        third = jnp.tanh(second @ jnp.asarray(W))
        with passes("backward_pass_0"):
            grad = first * second * third
        return first, grad + second

    forward = forward_of(closed(step).jaxpr)
    assert len(forward.everything()) == 1
    assert choose(forward, 0).cost < 8 * 8 * 8 * 2 + 1e4


def test_passes_one_after_another() -> None:
    """Each makes its own again; what an earlier one has computed is taken as it is."""

    def step() -> Any:
        w = jnp.asarray(W)
        first = jnp.tanh(jnp.asarray(X) @ w)
        with passes("backward_pass_0"):
            grad = jnp.cos(first) @ w
        second = jnp.tanh(first @ w)
        with passes("backward_pass_1"):
            return jnp.cos(second) * jnp.sin(first) @ w + grad

    made = closed(step)
    (expected,) = jaxpr_as_fun(made)()
    for budgets in ((0, 0), (1, 0), (0, 1), (0.5, 0.5)):
        np.testing.assert_array_equal(run(made, *budgets)[0], expected)


def test_bytes_of_a_device() -> None:
    """A gathered weight has as many bytes on each device, a part of a batch fewer; and to gather it
    again takes longer than to compute elementwise."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    own, whole = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)) for spec in (("x",), ())
    )

    def step() -> Any:
        x, w = jnp.asarray(X), jnp.asarray(W)
        x = jax.lax.with_sharding_constraint(x, own)
        w = jax.lax.with_sharding_constraint(w, whole)
        y = jnp.sin(x)
        with passes("backward_pass_0"):
            return y @ w

    jaxpr = closed(step).jaxpr
    shares = shares_of(jaxpr, [own] * len(jaxpr.constvars))
    forward = Forward(jaxpr, spans_of(jaxpr.eqns)[0], [], shares)
    assert sorted(forward.size.values()) == [8 * 8 * 4 / 4, 8 * 8 * 4]
    costs = {str(jaxpr.eqns[i].primitive): [] for i in forward.made_of}
    for i in forward.made_of:
        costs[str(jaxpr.eqns[i].primitive)].append(forward.cost(i))
    (sin,), (free, gather) = costs["sin"], sorted(costs["sharding_constraint"])
    assert gather > 10 * sin > free == 0


def test_loops_are_kept() -> None:
    def step() -> Any:
        x, w = jnp.asarray(X), jnp.asarray(W)
        x, each = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), x), x, None, length=5)
        with passes("backward_pass_0"):
            return (jnp.cos(each) * x).sum(0)

    made = closed(step)
    found = within_budgets(made.jaxpr, [0], [None] * len(made.consts))
    assert names(found).count("scan") == 1
    np.testing.assert_array_equal(run(made, 0)[0], jaxpr_as_fun(made)()[0])
