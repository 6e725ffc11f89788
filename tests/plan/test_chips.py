"""Bounds of collectives, counted by hand from the table of links."""

from __future__ import annotations

import pytest

from xla_dtensor.plan.chips import CHIPS, Lane, seconds

V5E = CHIPS["v5e"]
LINE, RING = Lane((False,), V5E), Lane((True,), V5E)
MB = 10**6


def test_the_links_are_the_tables() -> None:
    # 400 GB/s over four links in both directions; 1200 over six.
    assert V5E.link == 50e9 and CHIPS["v5p"].link == 100e9
    assert RING.bandwidth == 100e9 and LINE.bandwidth == 50e9
    assert Lane((True, True), V5E).bandwidth == 200e9


@pytest.mark.parametrize(
    ("kind", "lanes", "expected"),
    [
        # Each of four devices lacks three quarters of the result.
        ("all-gather", [RING], 0.75 * 4 * MB / 100e9),
        ("all-gather", [LINE], 0.75 * 4 * MB / 50e9),
        ("all-gather", [RING, RING], 0.75 * 4 * MB / 200e9),
        # What is reduced is four times the result.
        ("reduce-scatter", [RING], 0.75 * 16 * MB / 100e9),
        ("all-reduce", [RING], 2 * 0.75 * 4 * MB / 100e9),
        ("collective-permute", [RING], 4 * MB / 50e9),
    ],
)
def test_seconds(kind: str, lanes: list[Lane], expected: float) -> None:
    assert seconds(kind, 4 * MB, 4, lanes) == pytest.approx(expected)


def test_nothing_moves_in_a_group_of_one() -> None:
    assert seconds("all-reduce", MB, 1, [RING]) == 0 == seconds("all-reduce", MB, 4, [])
