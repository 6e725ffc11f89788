"""What the tables of chips say, and whose chips they are."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import xla_dtensor as xd
from xla_dtensor.planning.collectives import HloCollective, Part
from xla_dtensor.planning.links import links
from xla_dtensor.planning.program_text import Shaped
from xla_dtensor.planning.rows import rows
from xla_dtensor.runtime.chips import CHIPS, GPUS, chip_of
from xla_dtensor.runtime.gpus import described
from xla_dtensor.runtime.memory import memory_of

V5E = CHIPS["v5e"]
MB = 10**6


def test_gpus_are_known_by_what_jax_calls_them() -> None:
    stats = {"bytes_limit": 105 * 10**9}
    h200 = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: stats, process_index=0
    )
    chip = chip_of("gpu", h200)
    assert chip is not None and (chip.name, chip.memory) == ("h200", 105e9)
    other = SimpleNamespace(device_kind="Quadro", memory_stats=lambda: None)
    assert chip_of("gpu", other) is None and chip_of("cpu", other) is None
    assert chip_of("v5e", other) is V5E
    # 900 GB/s of NVLink in both directions: each of four devices lacks three quarters.
    gather = HloCollective(
        "all-gather",
        1,
        (Part(Shaped("f32", (10**6,)), ()),),
        ("tp",),
        4,
        ((0, 1, 2, 3), (4, 5, 6, 7)),
    )
    over = links(chip, np.array([h200] * 8).reshape(2, 4), ("dp", "tp"))
    (row,) = rows([gather], [], over, {})
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


def _of(kind: str) -> str | None:
    device = SimpleNamespace(device_kind=kind, memory_stats=lambda: None)
    chip = chip_of("gpu", device)
    return None if chip is None else chip.name


def test_names_within_names() -> None:
    assert [_of(kind) for kind in ("NVIDIA GB200", "NVIDIA B200")] == ["gb200", "b200"]
    assert _of("NVIDIA H100 PCIe") == "h100_pcie" and _of("NVIDIA H100 80GB HBM3") == "h100"


# XLA's own descriptions of GPUs (xla/backends/gpu/target_config/specs/*.txtpb at 4336d12 and later,
# read on 2026-11-26): cores, GHz, bytes of memory, of the second cache, shared by a core, GB/s, and
# operations of a core's units per clock in bfloat16 and float8, and the clock of those.
XLA_HAS = {
    "a100": (108, 1.41, 85_100_068_864, 41_943_040, 167_936, 2039, None),
    "a100_40": (108, 1.41, 42_331_013_120, 41_943_040, 167_936, 1555, None),
    "h100": (132, 1.98, 84_942_979_072, 52_428_800, 233_472, 3352, (4 * 512, 4 * 1024, 1.82952)),
    "h100_pcie": (
        *(114, 1.755, 84_942_979_072, 52_428_800, 233_472, 2039),
        (4 * 512, 4 * 1024, 1.62162),
    ),
    "h200": (132, 1.98, 151_397_597_184, 52_428_800, 233_472, 4800, (4 * 512, 4 * 1024, 1.82952)),
    "b200": (
        *(148, 1.965, 191_514_411_008, 132_644_864, 233_472, 7672),
        (4 * 1024, 4 * 2048, 1.83531),
    ),
    "gb200": (
        *(152, 2.062, 197_897_748_480, 135_528_448, 233_472, 7928),
        (4 * 1024, 4 * 2048, 1.925908),
    ),
    "gb300": (
        *(152, 2.07, 297_021_079_552, 135_528_448, 233_472, 7928),
        (4 * 1024, 4 * 2048, 1.93338),
    ),
    "rtx6000pro": (188, 2.6, 103_079_215_104, 134_217_728, 131_072, 1792, None),
}


@pytest.mark.parametrize("name", XLA_HAS)
def test_gpus_are_what_xla_has_them_for(name: str) -> None:
    cores, clock, memory, cache, shared, bandwidth, products = XLA_HAS[name]
    chip = GPUS[name]
    text = described(name)
    for words in (
        f"core_count: {cores} ",
        f"clock_rate_ghz: {clock} ",
        f"device_memory_size: {memory} ",
        f"l2_cache_size: {cache} ",
        f"shared_memory_per_core: {shared} ",
        f"shared_memory_per_block_optin: {shared - 1024} ",
    ):
        assert words in text
    assert chip.memory_bandwidth == pytest.approx(bandwidth * 1e9, rel=0.05)
    if products is not None:
        bf16, fp8, products_clock = products
        peaks = dict(chip.peaks)
        assert peaks["bf16"] == pytest.approx(2 * cores * bf16 * products_clock * 1e9, rel=0.05)
        assert peaks["fp8"] == pytest.approx(2 * cores * fp8 * products_clock * 1e9, rel=0.05)


def test_what_jax_leaves_programs_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    chip = chip_of("h100", None)
    assert chip is not None and chip.memory == 0.75 * 84_942_979_072
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
    assert chip_of("h100", None).memory == 0.5 * 84_942_979_072  # type: ignore[union-attr]
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")  # JAX's newer name of it
    assert chip_of("h100", None).memory == 0.9 * 84_942_979_072  # type: ignore[union-attr]


def test_time_of_operations_by_dtype() -> None:
    h100 = GPUS["h100"]
    assert h100.seconds({"bf16": 989.5e12, "fp8": 1979e12}) == pytest.approx(2)
    assert h100.seconds({"tf32": 494.5e12, "fp32": 67e12}) == pytest.approx(2)
    # TPUs multiply float32 in the units for bfloat16; a tpu7x is two devices.
    assert V5E.seconds({"tf32": 197e12, "int8": 394e12}) == pytest.approx(2)
    assert CHIPS["tpu7x"].seconds({"bf16": 2307e12}) == pytest.approx(2)
