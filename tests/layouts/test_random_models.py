"""A few of `random_models`, and more of them slowly."""

from __future__ import annotations

import pytest

from tests.layouts.random_models import check


@pytest.mark.parametrize("seed", range(3))
def test_right_and_never_more(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 33))
def test_more_of_them(seed: int) -> None:
    check(seed)
