"""Open MPI's mpirun starts the processes: JAX reads its variables."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.launch import ROOT, clean_environment

PROGRAM = """
import torch, xla_dtensor as xd
mesh = xd.init_device_mesh("xla", (8,))
x = xd.distribute_tensor(torch.arange(8.0), mesh, [xd.Shard(0)])
print("sum", x.sum().item(), "in", xd.distributed.process_count(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun isn't installed (openmpi-bin)")
def test_mpirun() -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    result = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 28.0 in 2") == 2
    assert "started by ompi" in result.stderr
