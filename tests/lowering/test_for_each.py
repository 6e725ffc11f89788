"""The same computation with many groups of arrays: what each would give alone, as one equation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_dtensor.lowering.ops.for_each import for_each

Arrays = Sequence[jax.Array]


def row(*shape: int, seed: int = 0, dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for _ in range(2)]


ROWS = [row(3, seed=1), row(2, 4, seed=2), row(3, seed=3), row(3, seed=4), row(2, 4, seed=5)]
FACTOR = np.float32(3)


def moved(arrays: Arrays, shared: Arrays) -> list[jax.Array]:
    value, other = arrays
    return [value * shared[0] + other, other, jnp.zeros(())]


def expected(value: np.ndarray, other: np.ndarray) -> list[np.ndarray]:
    return [value * FACTOR + other, other, np.zeros(())]


def check(found: Any, rows: list[list[np.ndarray]]) -> None:
    assert len(found) == len(rows)
    for results, arrays in zip(found, rows, strict=True):
        for result, wanted in zip(results, expected(*arrays), strict=True):
            # A product that is added to is rounded with less effort alone (make test-optimized).
            np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)


def on_all(rows: Any) -> Any:
    return for_each(moved, rows, [jnp.asarray(FACTOR)])


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eagerly", "compiled"])
def test_each_is_computed(how: Callable[..., Any]) -> None:
    check(how(on_all)([list(map(jnp.asarray, arrays)) for arrays in ROWS]), ROWS)


def test_a_group_is_one_equation_and_one_function() -> None:
    def counted(count: int) -> tuple[int, int, int]:
        rows = [[jnp.ones(3), jnp.ones(3)]] * count + [[jnp.ones(4), jnp.ones(4)]] * count
        jaxpr = jax.make_jaxpr(on_all)(rows)
        text = jax.jit(on_all).lower(rows).as_text()
        functions = len(re.findall(r"func private @for_each", text))
        return len(jaxpr.eqns), functions, len(re.findall(r"call @for_each", text))

    assert counted(2) == (2, 2, 4)
    assert counted(5) == (2, 2, 10)


def test_what_differs_in_dtype_is_another_group() -> None:
    rows = [[jnp.ones(3, dtype), jnp.ones(3, dtype)] for dtype in (jnp.float32, jnp.bfloat16)]
    (first, *_), (second, *_) = for_each(lambda r, _: [r[0] + r[1]], rows)
    assert (first.dtype, second.dtype) == (jnp.float32, jnp.bfloat16)


def test_over_a_batch() -> None:
    """Of some arguments of some rows: per-device tensors."""
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    given = jnp.asarray(value), jnp.ones(3), jnp.full(3, 2.0)

    def rows(a: Any, b: Any, c: Any) -> Any:
        (first, *_), (second, *_) = for_each(moved, [[a, b], [c, b]], [jnp.asarray(FACTOR)])
        return first, second

    first, second = jax.vmap(rows, in_axes=(0, None, None))(*given)
    np.testing.assert_allclose(first, value * 3 + 1, rtol=1e-6)
    np.testing.assert_array_equal(second, np.full((2, 3), 7.0))


def test_a_function_that_reads_what_is_traced() -> None:
    def step(rows: Any, factor: Any) -> Any:
        return for_each(lambda r, _: [r[0] * factor + r[1], r[1], jnp.zeros(())], rows)

    check(jax.jit(step)(ROWS, FACTOR), ROWS)


def test_with_a_key_it_is_traced_once() -> None:
    traces = []

    def function(arrays: Arrays, shared: Arrays) -> list[jax.Array]:
        traces.append(len(shared))
        return moved(arrays, shared)

    def step(rows: Any) -> Any:
        return for_each(function, rows, [jnp.asarray(FACTOR)], key="test_for_each")

    for count in (2, 3):  # two programs
        check(jax.jit(step)([ROWS[0]] * count), [ROWS[0]] * count)
    assert len(traces) == 1
    check(jax.jit(step)([ROWS[1]]), [ROWS[1]])
    assert len(traces) == 2


def test_no_rows() -> None:
    assert for_each(moved, []) == []
