"""The example as a user runs it, against the golden loss curve that plain CPU torch gave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import clean_environment

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_llama"
GOLDEN = json.loads((EXAMPLE / "golden.json").read_text())


def losses_of(tmp_path: Path, *options: str, processes: int = 1) -> tuple[list[float], str]:
    """The losses of a run of train.py, and what it printed."""
    losses = tmp_path / "losses.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else ()), EXAMPLE / "train.py", *options]
    # One thread for CPU torch: more of them only wait for each other at this size.
    result = subprocess.run(
        [*command, "--out", tmp_path, "--losses", losses],
        cwd=ROOT,
        env=(clean_environment() if processes > 1 else os.environ) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(losses.read_text()), result.stdout + result.stderr


@pytest.mark.parametrize("mesh", ["2x4", pytest.param("8", marks=pytest.mark.slow)])
def test_golden_losses(tmp_path: Path, mesh: str) -> None:
    losses, printed = losses_of(tmp_path, *GOLDEN["args"], "--mesh", mesh)
    assert losses == pytest.approx(GOLDEN["losses"], abs=1e-3)
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert "tokens/s" in printed and "ms/step" in printed
    assert re.search(r"each device holds \d+\.\d MB .*; a step needs \d+\.\d MB beside it", printed)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_golden_losses_in_several_processes(tmp_path: Path, processes: int) -> None:
    losses, printed = losses_of(tmp_path, *GOLDEN["args"], processes=processes)
    assert losses == pytest.approx(GOLDEN["losses"], abs=1e-3)
    assert printed.count("parameters on mesh") == 1 == printed.count("Plot:")  # by process 0 alone
    assert f"in {processes} processes" in printed


def test_golden_losses_are_those_of_cpu_torch(tmp_path: Path) -> None:
    losses, _ = losses_of(tmp_path, *GOLDEN["args"], "--reference")
    assert losses == pytest.approx(GOLDEN["losses"], abs=1e-4)


@pytest.mark.slow
def test_fifty_steps_agree_with_the_reference(tmp_path: Path) -> None:
    """Of the default model, on the default mesh."""
    steps = ("--steps", "50", "--sample", "8")
    reference, _ = losses_of(tmp_path, *steps, "--reference")
    sharded, _ = losses_of(tmp_path, *steps)
    assert len(sharded) == 50
    assert sharded == pytest.approx(reference, abs=1e-3)


def run(tmp_path: Path, *options: str, stop_after: str | None = None) -> tuple[int, str]:
    """The exit status of train.py and what it printed; it gets a Ctrl-C when it prints
    ``stop_after``."""
    command = [sys.executable, "-u", EXAMPLE / "train.py", *GOLDEN["args"], "--out", tmp_path]
    process = subprocess.Popen(
        [*command, "--losses", tmp_path / "losses.json", *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    printed = b""
    with process:
        try:
            while part := os.read(process.stdout.fileno(), 4096):
                printed += part
                if stop_after is not None and stop_after.encode() in printed:
                    process.send_signal(signal.SIGINT)
                    stop_after = None
            return process.wait(120), printed.decode()
        finally:
            process.kill()


@pytest.mark.slow
def test_after_ctrl_c_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """With the losses of the run that nobody stopped, and weights that load."""
    status, printed = run(tmp_path, "--save-every", "100", stop_after="loss ")
    assert status == 0 and "stopped by SIGINT after step" in printed, printed
    assert not (tmp_path / "losses.json").exists()
    export = tmp_path / "weights"
    status, printed = run(tmp_path, "--resume", "--export", str(export))
    assert status == 0 and "going on after step" in printed, printed
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(
        GOLDEN["losses"], abs=1e-3
    )
    assert (export / "model.safetensors").stat().st_size > 10_000
    # It has come to its end: there is nothing more to do, and a new run begins anew.
    status, printed = run(tmp_path, "--resume")
    assert status == 0 and f"going on after step {len(GOLDEN['losses'])}" in printed, printed
    status, printed = run(tmp_path)
    assert status == 0 and "removing the checkpoints of an earlier run" in printed, printed


@pytest.mark.slow
def test_two_processes_go_on_where_one_stopped(tmp_path: Path) -> None:
    """With the losses of the run that nobody stopped."""
    assert run(tmp_path, "--save-every", "100", stop_after="loss ")[0] == 0
    options = "--resume", "--export", str(tmp_path / "w")
    losses, printed = losses_of(tmp_path, *GOLDEN["args"], *options, processes=2)
    assert printed.count("going on after step") == 1, printed
    assert losses == pytest.approx(GOLDEN["losses"], abs=1e-3)
    assert (tmp_path / "w" / "model.safetensors").stat().st_size > 10_000
