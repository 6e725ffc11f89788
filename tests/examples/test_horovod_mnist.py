"""`examples/horovod_mnist.py`, unchanged, with ranks of each kind: the same losses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import launch

SCRIPT = "examples/horovod_mnist.py"
SHORT = ["--images", "256", "--batch", "16", "--epochs", "2"]


def losses(output: str) -> list[float]:
    """Of each epoch, and the accuracy."""
    assert output.count("accuracy") == 1, output  # one rank prints
    return [float(x) for x in re.findall(r"(?:loss|accuracy) (\d\.\d+)", output)]


def alone(*arguments: str, devices: int = 2) -> list[float]:
    """In one process."""
    result = subprocess.run(
        [sys.executable, SCRIPT, *SHORT, *arguments],
        cwd=launch.ROOT,
        env=launch.clean_environment() | {"JAX_NUM_CPU_DEVICES": str(devices)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return losses(result.stdout)


@pytest.mark.slow
def test_the_modes_compute_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    found = {
        "devices": alone("--save", str(path)),
        "compiled": alone("--compile"),
        "threads": alone("--np", "2"),
    }
    for name, more in (("processes", []), ("processes, compiled", ["--compile"])):
        results = launch.run([SCRIPT, *SHORT, *more], 2, 300, {"JAX_PLATFORMS": "cpu"})
        found[name] = losses("".join(launch.succeeded(results)))
    for name, each in found.items():
        assert each == pytest.approx(found["devices"], abs=2e-2), name
    state = torch.load(path)
    assert len(state) == 8 and all(isinstance(p, torch.Tensor) for p in state.values())


@pytest.mark.slow
def test_it_learns() -> None:
    *_, last, accuracy = alone(
        "--compile", "--images", "2048", "--batch", "32", "--epochs", "6", devices=4
    )
    assert last < 0.6 and accuracy > 0.8
