"""Random lowerings: ranges and moments, and that the key alone decides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import xla_dtensor.lowering.ops.random  # noqa: F401  registers
from tests.lowering.harness import check_call
from xla_dtensor.lowering import find_lowering
from xla_dtensor.lowering.registry import qualified_name

N = 40_000
ZEROS = np.zeros(N, np.float32)


def draw(name: str, *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    lowering = find_lowering(qualified_name(name))
    assert lowering is not None
    assert lowering.random
    with jax.enable_x64(True):
        call = jax.jit(lambda key: lowering.function(key, *args, **kwargs))
        return jax.tree.map(np.asarray, call(jax.random.key(seed)))


# name, arguments, mean, standard deviation, a predicate for every value
Case = tuple[str, tuple[Any, ...], float, float, Callable[[np.ndarray], np.ndarray]]
inside = lambda low, high: lambda x: (x >= low) & (x < high)
integers = lambda low, high: lambda x: inside(low, high)(x) & (x == np.floor(x))
CASES: list[Case] = [
    ("rand", ([N],), 0.5, math.sqrt(1 / 12), inside(0, 1)),
    ("rand_like", (ZEROS,), 0.5, math.sqrt(1 / 12), inside(0, 1)),
    ("uniform", (ZEROS, -1.0, 3.0), 1.0, 4 * math.sqrt(1 / 12), inside(-1, 3)),
    ("randn", ([N],), 0, 1, np.isfinite),
    ("randn_like", (ZEROS,), 0, 1, np.isfinite),
    ("normal_functional", (ZEROS, 2.0, 0.5), 2, 0.5, np.isfinite),
    ("normal.float_float", (2.0, 0.5, [N]), 2, 0.5, np.isfinite),
    ("normal.Tensor_float", (ZEROS + 2, 0.5), 2, 0.5, np.isfinite),
    ("normal.float_Tensor", (2.0, ZEROS + 0.5), 2, 0.5, np.isfinite),
    ("normal.Tensor_Tensor", (ZEROS + 2, np.float32(0.5)), 2, 0.5, np.isfinite),
    ("exponential", (ZEROS, 2.0), 0.5, 0.5, lambda x: x >= 0),
    ("log_normal", (ZEROS, 0.0, 0.25), math.exp(1 / 32), 0.2621, lambda x: x > 0),
    ("geometric", (ZEROS, 0.25), 4, math.sqrt(12), integers(1, 200)),
    ("randint", (10, [N]), 4.5, math.sqrt(99 / 12), integers(0, 10)),
    ("randint.low", (-3, 7, [N]), 1.5, math.sqrt(99 / 12), integers(-3, 7)),
    ("randint_like", (ZEROS, 10), 4.5, math.sqrt(99 / 12), integers(0, 10)),
    ("randint_like.low_dtype", (ZEROS, -3, 7), 1.5, math.sqrt(99 / 12), integers(-3, 7)),
    ("randint_like.Tensor", (ZEROS, np.int64(10)), 4.5, math.sqrt(99 / 12), integers(0, 10)),
    ("random.from", (ZEROS, -3, 7), 1.5, math.sqrt(99 / 12), integers(-3, 7)),
    ("random.to", (ZEROS, 10), 4.5, math.sqrt(99 / 12), integers(0, 10)),
    ("random", (np.zeros(N, np.uint8),), 127.5, math.sqrt((2**16 - 1) / 12), integers(0, 256)),
    ("random", (np.zeros(N, bool),), 0.5, 0.5, integers(0, 2)),
    ("bernoulli", (ZEROS + 0.3,), 0.3, math.sqrt(0.21), integers(0, 2)),
    ("bernoulli.p", (ZEROS, 0.3), 0.3, math.sqrt(0.21), integers(0, 2)),
    ("bernoulli.Tensor", (ZEROS, np.float32(0.3)), 0.3, math.sqrt(0.21), integers(0, 2)),
    ("poisson", (ZEROS + 3,), 3, math.sqrt(3), integers(0, 40)),
    ("binomial", (ZEROS + 10, ZEROS + 0.5), 5, math.sqrt(2.5), integers(0, 11)),
    ("_standard_gamma", (ZEROS + 2,), 2, math.sqrt(2), lambda x: x > 0),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_distribution(case: Case) -> None:
    name, args, mean, deviation, valid = case
    x = draw(name, *args)
    assert x.shape == (N,)
    assert np.all(valid(x))
    # Five standard errors; wider for the deviation, whose error depends on the fourth moment.
    assert abs(x.mean(dtype=np.float64) - mean) < 5 * deviation / math.sqrt(N)
    assert abs(x.std(dtype=np.float64) / deviation - 1) < 0.05


def test_cauchy_has_its_quartiles() -> None:
    quartiles = np.quantile(draw("cauchy", ZEROS, 1.0, 2.0), [0.25, 0.5, 0.75])
    np.testing.assert_allclose(quartiles, [-1, 1, 3], atol=0.15)


def test_wide_integers() -> None:
    zeros = np.zeros(N, np.int64)
    x = draw("random", zeros)
    assert x.min() >= 0
    assert x.max() > 2**62
    x = draw("random.from", zeros, -(2**63), None)
    assert x.min() < -(2**62)
    assert x.max() > 2**62


def test_the_key_decides() -> None:
    first, again, other = (draw("randn", [100], seed=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.any(first == other)


def test_half_precision_stays_below_one() -> None:
    x = draw("uniform", jnp.zeros(N, jnp.bfloat16))
    assert x.dtype == jnp.bfloat16
    assert float(x.max()) < 1


def test_dropout() -> None:
    out, mask = draw("native_dropout", ZEROS + 1, 0.25, True)
    assert abs(mask.mean() - 0.75) < 0.02
    np.testing.assert_allclose(out, mask / 0.75, rtol=1e-6)
    for p, train, kept in ((0.5, False, True), (0.0, True, True), (1.0, True, False)):
        out, mask = draw("native_dropout", ZEROS + 1, p, train)
        assert np.all(mask == kept)
        assert np.all(out == kept)
    grad, mask = torch.randn(8), torch.rand(8) > 0.5
    backward = torch.ops.aten.native_dropout_backward.default
    assert check_call(backward, grad, mask, 1.25).mismatches == []


def test_permutations_and_draws() -> None:
    np.testing.assert_array_equal(np.sort(draw("randperm", 50)), np.arange(50))
    weights = np.asarray([[0.0, 1.0, 3.0], [2.0, 0.0, 2.0]], np.float32)
    drawn = draw("multinomial", weights, N, True)
    assert drawn.shape == (2, N)
    for row, p in zip(drawn, weights / weights.sum(1, keepdims=True), strict=True):
        np.testing.assert_allclose(np.bincount(row, minlength=3) / N, p, atol=0.02)
    pair = draw("multinomial", weights, 2)
    np.testing.assert_array_equal(np.sort(pair, axis=1), [[1, 2], [0, 2]])


@pytest.mark.parametrize("shapes", [((300, 8), (300, 8)), ((300, 1), (8,)), ((300, 8), ())])
def test_binomial_of_tensors(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    count, prob = torch.full(shapes[0], 10.0), torch.full(shapes[1], 0.3)
    torch.manual_seed(0)
    found = torch.binomial(count.to("xla"), prob.to("xla")).cpu()
    assert found.shape == torch.binomial(*torch.broadcast_tensors(count, prob)).shape
    assert found.dtype == torch.float32 and found.min() >= 0 and found.max() <= 10
    assert abs(found.mean() - 3) < 5 * math.sqrt(10 * 0.3 * 0.7 / found.numel())
    drawn = torch.distributions.Binomial(10, torch.full((9,), 0.5, device="xla")).sample((4,))
    assert drawn.shape == (4, 9) and drawn.device.type == "xla"
