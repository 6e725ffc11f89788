"""Bounds of collectives, counted by hand from the table of links."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import xla_dtensor as xd
from xla_dtensor.planning.collectives import Collective, Part
from xla_dtensor.planning.program_text import Shaped
from xla_dtensor.planning.rows import rows
from xla_dtensor.runtime.chips import CHIPS, Lane, chip_of, memory_of, seconds

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


def test_gpus_are_known_by_what_jax_calls_them() -> None:
    stats = {"bytes_limit": 105 * 10**9}
    h200 = SimpleNamespace(device_kind="NVIDIA H200", memory_stats=lambda: stats)
    chip = chip_of("gpu", h200)
    assert chip is not None and (chip.name, chip.memory) == ("H200", 105e9)
    other = SimpleNamespace(device_kind="Quadro", memory_stats=lambda: None)
    assert chip_of("gpu", other) is None and chip_of("cpu", other) is None
    assert chip_of("v5e", other) is V5E
    # 900 GB/s of NVLink in both directions: each of four devices lacks three quarters.
    gather = Collective(
        "all-gather",
        1,
        (Part(Shaped("f32", (10**6,)), ()),),
        ("tp",),
        4,
        ((0, 1, 2, 3), (4, 5, 6, 7)),
    )
    (row,) = rows([gather], [], chip, np.array([h200] * 8).reshape(2, 4), ("dp", "tp"))
    assert row.seconds == pytest.approx(0.75 * 4 * MB / 450e9)


def test_how_much_a_device_has() -> None:
    of_gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 59_412_345_678})
    silent = SimpleNamespace(platform="tpu", memory_stats=lambda: None)
    assert memory_of(of_gpu) == 59e9  # what else is on it differs from one to the other
    assert memory_of(silent) is None and memory_of(jax.devices("cpu")[0]) is None
    with xd.config.override(device_memory=2e9):
        assert memory_of(of_gpu) == memory_of(silent) == 2e9
    with xd.abstract("cpu:8"):
        assert memory_of(of_gpu) is None
    assert CHIPS["v5e"].memory == 15.75 * 2**30
