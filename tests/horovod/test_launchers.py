"""A Horovod script under each launcher. mpirun and Ray start it themselves; srun and horovodrun are
their variables (and horovodrun's server), which `tests.launch` sets: neither is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch

PROGRAM = ["-m", "tests.horovod.programs.launched"]
SECONDS = 150.0


def check(outputs: list[str]) -> None:
    """Every rank has come to its end."""
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of {len(outputs)}: all of it" in output, output


@pytest.mark.slow
def test_horovodruns_variables_and_server() -> None:
    with launch.horovods_server() as port:
        variables = [
            {
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": "2",
                "HOROVOD_LOCAL_RANK": str(rank),
                "HOROVOD_LOCAL_SIZE": "2",
                "HOROVOD_CROSS_RANK": "0",
                "HOROVOD_CROSS_SIZE": "1",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "localhost",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_HOSTNAME": "localhost",
            }
            for rank in range(2)
        ]
        outputs = launch.succeeded(launch.Processes(PROGRAM, variables).wait(SECONDS))
    check(outputs)
    assert "started by Horovod" in outputs[0]


@pytest.mark.slow
def test_sruns_variables() -> None:
    variables = [
        {
            "SLURM_JOB_ID": "4242",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "JAX_COORDINATOR_PORT": str(port),
        }
        for port in [launch.free_port()]
        for rank in range(2)
    ]
    outputs = launch.succeeded(launch.Processes(PROGRAM, variables).wait(SECONDS))
    check(outputs)
    assert "started by slurm" in outputs[0]


def _started(command: list[str], seconds: float = SECONDS) -> str:
    path = os.pathsep.join([str(launch.ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        command,
        cwd=launch.ROOT,
        env=launch.clean_environment() | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun isn't installed (openmpi-bin)")
def test_mpirun() -> None:
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    output = _started([*launcher, sys.executable, *PROGRAM])
    assert all(f"rank {rank} of 2: all of it" in output for rank in range(2))
    assert "started by ompi" in output


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is an extra: pip install -e '.[ray]'"
)
def test_ray(tmp_path: Path) -> None:
    """Which starts the workers again when one is killed, and they find what was committed."""
    _started([sys.executable, "-m", "tests.horovod.programs.in_ray", str(tmp_path)], 2 * SECONDS)
    found = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert (tmp_path / "killed").exists()
    assert found[0] == found[1] and found[0].endswith(" of 2") and not found[0].startswith("0")
