"""Each factor of each primitive: computed on halves, the parts are those of the whole result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xla_dtensor.layouts.factors import SUM, Factor, factors, is_elementwise, reshaped_dims
from xla_dtensor.lowering.linalg.fft import fft_r2c
from xla_dtensor.lowering.partitioned.per_slice import per_slice

X = jnp.arange(4 * 6 * 8, dtype=jnp.float32).reshape(4, 6, 8) % 7 - 3
Y = jnp.arange(4 * 8 * 2, dtype=jnp.float32).reshape(4, 8, 2) % 5 - 2
ROWS = jnp.array([[3, 0], [1, 3]])
IN_BATCHES = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "transpose": (lambda x: x.transpose(2, 0, 1), (X,)),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (5, 4, 2), (1, 2)), (X[:, :1, 0],)),
    "split": (lambda x: x.reshape(4, 6, 2, 4), (X,)),
    "joined": (lambda x: x.reshape(24, 8), (X,)),
    "squeezed": (lambda x: x.reshape(4, 6, 4, 1, 2), (X,)),
    "sum": (lambda x: x.sum((0, 2)), (X,)),
    "max": (lambda x: lax.reduce_max_p.bind(x, axes=(1,), out_sharding=None), (X,)),
    "argmax": (lambda x: jnp.argmax(x, 1), (X,)),
    "batches": (lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), (X, Y)),
    "linear": (lambda x, w: jnp.einsum("bsi,oi->bso", x, w), (X, X[0])),
    "gather": (lambda t, i: t.at[i].get(mode="promise_in_bounds"), (X[:, :, 0], ROWS)),
    "gather in batches": (
        lambda t, i: lax.gather(t, i, IN_BATCHES, (1, 1), mode="promise_in_bounds"),
        (X[:, :, 0], jnp.array([[[3], [0]], [[1], [3]], [[2], [2]], [[5], [4]]])),
    ),
    "scatter-add": (lambda t, i, u: t.at[i].add(u), (jnp.zeros((4, 6)), ROWS, X[:2, :2, :6])),
    "scatter": (lambda t, i, u: t.at[i].set(u), (jnp.zeros((4, 6)), ROWS, X[:2, :2, :6])),
    "scatter-max": (lambda t, i, u: t.at[i].max(u), (jnp.zeros((4, 6)), ROWS, X[:2, :2, :6])),
    "concatenate": (lambda a, b: jnp.concatenate([a, b], 1), (X, X + 1)),
    "tile": (lambda x: lax.tile(x, (1, 3, 1)), (X,)),
    "stack": (lambda a, b: lax.concatenate([a[:, None], b[:, None]], 1), (X, X + 1)),
    "slice": (lambda x: x[:, 2:4], (X,)),
    "pad": (lambda x: lax.pad(x, jnp.float32(0), ((0, 0, 0), (1, 2, 0), (0, 0, 0))), (X,)),
    "cumsum": (lambda x: lax.cumsum(x, 1), (X,)),
    "transform": (lambda x: fft_r2c(x, [1, 2], 0, True), (X,)),
    "sort": (lambda x: lax.sort(x, dimension=2), (X,)),
    "iota": (lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1), ()),
    "convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME"),
        (X, jnp.ones((2, 6, 3))),
    ),
}


def equations(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """The equations, with the values of their operands."""
    closed = jax.make_jaxpr(function)(*args)
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known |= zip(closed.jaxpr.invars, args, strict=True)
    found = []
    for equation in closed.jaxpr.eqns:
        operands = [
            v.val if isinstance(v, jax.extend.core.Literal) else known[v] for v in equation.invars
        ]
        results = run(equation, operands)
        found.append((equation, operands, results))
        known |= zip(equation.outvars, results, strict=True)
    return found


def run(equation: Any, operands: list[Any], **changed: Any) -> list[Any]:
    parameters = equation.primitive.get_bind_params({**equation.params, **changed})
    if isinstance(parameters, tuple):  # until JAX 0.9.0, with functions before them
        parameters = parameters[-1]
    found = equation.primitive.bind(*operands, **parameters)
    return list(found) if equation.primitive.multiple_results else [found]


# What has a result's size among its parameters is computed whole, and cut.
SIZED = ("broadcast_in_dim", "reshape", "iota", "slice")


@pytest.mark.parametrize("name", CASES)
def test_halves_are_enough(name: str) -> None:
    function, args = CASES[name]
    checked = 0
    for equation, operands, results in equations(function, args):
        for factor in factors(equation) or []:
            if factor.behind_operand or factor.behind_result:
                continue  # for a second axis: below
            if factor.exchanges or not factor.results or _is_odd(factor, operands, results):
                continue
            if equation.primitive.name in SIZED or equation.primitive.name == "gather":
                checked += _keeps_positions(equation, factor, operands, results)
                continue
            halves = []
            for half in (0, 1):
                own = [
                    _half(x, factor.operands[i], half) if i in factor.operands else x
                    for i, x in enumerate(operands)
                ]
                changed: dict[str, Any] = {}
                if equation.primitive.name == "scatter-add" and SUM in factor.results.values():
                    own[0] = own[0] * (half == 0)
                elif equation.primitive.name == "scatter-add" and 2 not in factor.operands:
                    # The rows that it hasn't are out of its range.
                    own[1] = own[1] - half * own[0].shape[factor.operands[0]]
                    changed["mode"] = jax.lax.GatherScatterMode.FILL_OR_DROP
                halves.append(run(equation, own, **changed))
            for i, result in enumerate(results):
                left, right = halves[0][i], halves[1][i]
                dim = factor.results[i]
                if dim != SUM:
                    parts = np.concatenate([left, right], dim)
                elif equation.primitive.name == "argmax":
                    axis = equation.params["axes"][0]
                    best = [_half(operands[0], axis, half).max(axis) for half in (0, 1)]
                    other = right + operands[0].shape[axis] // 2
                    parts = np.where(best[0] >= best[1], left, other)
                elif "max" in equation.primitive.name:
                    parts = np.maximum(left, right)
                else:
                    parts = left + right
                np.testing.assert_allclose(parts, result, rtol=1e-6)
                checked += 1
    assert checked


def _is_odd(factor: Factor, operands: list[Any], results: list[Any]) -> bool:
    places = [(operands, factor.operands), (results, factor.results)]
    return any(d != SUM and xs[i].shape[d] % 2 for xs, dims in places for i, d in dims.items())


def _half(x: Any, dim: int, half: int) -> Any:
    n = x.shape[dim] // 2
    return lax.slice_in_dim(jnp.asarray(x), half * n, (half + 1) * n, axis=dim)


def _keeps_positions(equation: Any, factor: Factor, operands: list[Any], results: list[Any]) -> int:
    """A change of the other half of an operand doesn't reach a half of the result."""
    dim = factor.results[0]
    if dim == SUM:
        return 0
    for half in (0, 1):
        changed = [
            x
            if i not in factor.operands
            else jnp.concatenate(
                [
                    part if (part_half == half) else part[::-1] * 0
                    for part_half in (0, 1)
                    for part in [_half(x, factor.operands[i], part_half)]
                ],
                factor.operands[i],
            )
            for i, x in enumerate(operands)
        ]
        after = run(equation, changed)[0]
        np.testing.assert_array_equal(_half(after, dim, half), _half(results[0], dim, half))
    return 1


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((16, 128, 256), (16, 128, 8, 32), [((0,), (0,)), ((1,), (1,)), ((2,), (2, 3))]),
        ((16, 128, 256), (2048, 256), [((0, 1), (0,)), ((2,), (1,))]),
        ((1, 6, 4), (6, 1, 4), [((1,), (0,)), ((2,), (2,))]),
        ((24,), (1, 4, 6), [((0,), (1, 2))]),
        ((4, 6), (3, 8), [((0, 1), (0, 1))]),
        ((1,), (1, 1), []),
    ],
)
def test_reshaped_dims(before: Any, after: Any, expected: Any) -> None:
    assert reshaped_dims(before, after) == expected


@pytest.mark.parametrize(
    ("before", "after"), [((2, 6), (12,)), ((12,), (2, 6)), ((12,), (2, 1, 6))]
)
def test_a_second_axis_cuts_the_next_dim(before: Any, after: Any) -> None:
    """The first axis has cut one of the several dims to length 1; the part of each of its devices
    is cut into halves by the second."""
    x = np.arange(12.0).reshape(before)
    ((equation, _, (result,)),) = equations(lambda x: jnp.reshape(x, after), (x,))
    found = factors(equation)
    assert found is not None
    (factor,) = [f for f in found if f.behind_operand or f.behind_result]

    def part(array: Any, dim: int, behind: tuple[int, ...], first: int, half: int) -> Any:
        """What the device at ``first``, ``half`` has."""
        for d in behind:
            array = np.split(array, 2, d)[first]
        if not behind:
            array = np.split(array, 2, dim)[first]
        return np.split(array, 2, dim)[half].ravel()

    for first in range(2):
        for half in range(2):
            of_operand = part(x, factor.operands[0], factor.behind_operand, first, half)
            of_result = part(
                np.asarray(result), factor.results[0], factor.behind_result, first, half
            )
            np.testing.assert_array_equal(of_operand, of_result)


RARE = {
    *("bessel_i0e", "bessel_i1e", "clz", "igamma", "igamma_grad_a", "igammac", "mulhi"),
    *("polygamma", "population_count", "regularized_incomplete_beta", "zeta"),
}
"""Elementwise primitives that are left to XLA."""


def test_what_is_elementwise_is_known() -> None:
    """Of the functions of `jax.lax` that take arrays alone: versions of JAX make other primitives
    of the same functions (1 - tanh(x)**2 is one since 0.11)."""
    shape = (4, 6)
    known: set[str] = set()
    unknown: set[str] = set()
    for function in filter(callable, vars(lax).values()):
        for dtype, count in itertools.product((jnp.float32, jnp.int32), (1, 2, 3)):
            try:
                made = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, dtype)] * count)
            except Exception:
                continue  # it takes something else
            for each in made.jaxpr.eqns:
                shapes = {getattr(v.aval, "shape", None) for v in (*each.invars, *each.outvars)}
                if each.outvars and shapes == {shape}:
                    is_known = is_elementwise(each) or factors(each) is not None
                    (known if is_known else unknown).add(each.primitive.name)
    assert {"add", "select_n", "tanh"} <= known
    # Barriers are `graph.py`'s, and loops with a condition aren't looked into.
    assert unknown - {"optimization_barrier", "while"} <= RARE


@pytest.mark.skipif(not hasattr(lax, "polynomial"), reason="JAX has it since 0.12")
def test_a_polynomial_is_elementwise() -> None:
    ((equation, _, _),) = equations(lambda x, a: lax.polynomial(x, [1.0, a, 2.0]), (X, X[:, :1]))
    assert is_elementwise(equation)


def test_a_function_of_each_slice() -> None:
    """The dims before the slices; a matrix of which a number is made has none of its own then."""
    trace = lambda x: per_slice(lambda a: (a.sum((-2, -1)), a), 1, x)
    eqns = jax.make_jaxpr(trace)(X).jaxpr.eqns
    (call,) = [e for e in eqns if e.primitive.name == "custom_vmap_call"]
    assert factors(call) == [Factor({0: 0}, {0: 0, 1: 0})]
