"""A few of `random_models`, and more of them slowly."""

from __future__ import annotations

import pytest

from tests.layouts.random_models import check


@pytest.mark.parametrize("seed", range(1, 3))
def test_right_and_never_more(seed: int) -> None:
    check(seed)


BATCH_BY_TP = pytest.mark.xfail(
    reason="all of the model's weights are smaller than what travels between them: torch's rules, "
    "operation by operation, come to cut the batch over both axes, which is chosen only where an "
    "input or a result lies so (`choose.py:_may_cut`)",
    raises=AssertionError,
    strict=True,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[BATCH_BY_TP] * (n == 18)) for n in (0, *range(3, 33))]
)
def test_more_of_them(seed: int) -> None:
    check(seed)
