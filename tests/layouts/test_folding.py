"""Equal layers are chosen once, and as they would be one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from xla_dtensor.layouts import folding
from xla_dtensor.layouts.choice import Choice
from xla_dtensor.layouts.choose import choices

SIZES = {"dp": 2, "tp": 4}
DIM = 16


def choice(hidden: Sequence[int], rows: int = 256) -> Choice:
    """Of layers ``x + tanh(x @ up) @ down``, by columns and rows, and their gradients."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (rows, DIM))
    weights = [(jnp.ones((DIM, n)), jnp.ones((n, DIM))) for n in hidden]

    def loss(weights: Any) -> Any:
        y = x
        for up, down in weights:
            y = y + jnp.tanh(y @ up) @ down
        return (y * y).sum()

    jaxpr = jax.make_jaxpr(lambda: jax.grad(loss)(weights))().jaxpr
    shapes = {(DIM, n): ((), ("tp",)) for n in hidden} | {(n, DIM): (("tp",), ()) for n in hidden}
    shapes[rows, DIM] = (("dp",), ())
    known = {v: shapes.get(v.aval.shape) for v in jaxpr.constvars}
    required = [shapes[v.aval.shape] for v in jaxpr.outvars]
    arguments = [v for v in jaxpr.constvars if v.aval.shape == (rows, DIM)]
    return next(choices(jaxpr, known, required, SIZES, arguments))


def moves(found: Choice) -> list[tuple[Any, ...]]:
    return sorted((move.kind, move.axes, move.shape, move.nbytes) for move in found.moves())


def test_many_layers_are_as_many_kinds_as_few() -> None:
    few, many = choice([32] * 4).graph.folds, choice([32] * 9).graph.folds
    assert len(few.nodes) == len(many.nodes)
    assert sum(count for _, count in many.nodes) > 2 * sum(count for _, count in few.nodes)


def test_what_a_loop_stacks_is_as_many_kinds_for_many_layers_as_for_few() -> None:
    """80 parameters that one concatenation takes differ in their place alone; so do their
    gradients, which are slices of one stack."""

    def kinds(layers: int) -> int:
        weights = [jnp.ones((DIM, DIM)) for _ in range(layers)]
        x = jnp.ones((256, DIM))

        def loss(weights: Any) -> Any:
            stack = jnp.stack([w.T for w in weights])
            y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, stack)
            return (y * y).sum()

        jaxpr = jax.make_jaxpr(lambda: jax.grad(loss)(weights))().jaxpr
        known = {v: (("dp",), ()) if v.aval.shape == x.shape else None for v in jaxpr.constvars}
        required = [((), ("tp",)) for _ in jaxpr.outvars]
        return len(next(choices(jaxpr, known, required, SIZES)).graph.folds.nodes)

    assert kinds(4) == kinds(9)


def test_layers_of_other_sizes_are_other_kinds() -> None:
    equal, others = choice([32] * 3).graph.folds, choice([32, 64, 128]).graph.folds
    assert len(others.nodes) > len(equal.nodes)


@pytest.mark.parametrize("hidden", [[32] * 3, [32, 64] * 3])
def test_they_are_chosen_as_one_by_one(hidden: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    folded = choice(hidden)
    monkeypatch.setattr(
        folding._Colours, "_seen_from_nodes", lambda self: [*range(len(self._nodes))]
    )
    apart = choice(hidden)
    assert len(apart.graph.folds.nodes) == len(apart.graph.nodes) > len(folded.graph.folds.nodes)
    assert moves(folded) == moves(apart)
    # Each layer: the sums of row-wise products forward, of column-wise ones backward, and gradients
    # over dp.
    axes = [move.axes for move in folded.moves()]
    assert axes.count(("dp",)) == 2 * len(hidden)
    assert len(hidden) <= axes.count(("tp",)) <= 2 * len(hidden)


def test_a_long_chain_stays_small() -> None:
    """Each time step is another number of steps from the end."""
    w = jnp.ones((DIM, DIM))

    def kinds(steps: int) -> int:
        def run() -> Any:
            y = jnp.ones((8, DIM))
            for _ in range(steps):
                y = jnp.tanh(y @ w)
            return y

        jaxpr = jax.make_jaxpr(run)().jaxpr
        return len(next(choices(jaxpr, {}, [None], SIZES)).graph.folds.nodes)

    assert kinds(80) == kinds(40)
