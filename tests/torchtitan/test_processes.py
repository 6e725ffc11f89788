"""The command under torchrun: two processes against one, and each going on where the other was."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan")

from tests.launch import ROOT, clean_environment
from tests.torchtitan import assets, metrics

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS, SAVED = 4, 2


def arguments(files: tuple[Path, Path], out: Path) -> list[str]:
    """torchtitan's, for dp4 x tp2."""
    return [
        "--module=tests.torchtitan.one_layer",
        "--config=llama3_one_layer",
        f"--hf_assets_path={files[0]}",
        f"--dataloader.dataset_path={files[1]}",
        f"--dump_folder={out}",
        "--parallelism.spmd_backend=partial_dtensor",
        "--parallelism.data_parallel_shard_degree=4",
        "--parallelism.tensor_parallel_degree=2",
        "--training.seq_len=32",
        "--training.local_batch_size=2",
        "--training.mixed_precision_param=float32",
        f"--training.steps={STEPS}",
        "--checkpoint.enable",
        f"--checkpoint.interval={SAVED}",
        "--debug.seed=1",
        "--debug.no-enable_structured_logging",
        "--metrics.enable_tensorboard",
    ]


def train(processes: int, files: tuple[Path, Path], out: Path) -> tuple[dict[int, float], str]:
    """Train with the command to the end, from the checkpoint in ``out`` if there is one.

    Returns:
        the loss by step, as torchtitan's metrics have it, and what was printed.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, "-W", "ignore", *(launch if processes > 1 else [])]
    command += ["-m", "xla_dtensor.torchtitan", *arguments(files, out)]
    environment = clean_environment() | {"NGPU": "8", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    return metrics.read(out, "loss_metrics/global_avg_loss"), printed


def readers(printed: str) -> dict[int, set[int]]:
    """Of each process, for which ranks it reads."""
    found: dict[int, set[int]] = {}
    for process, rank in re.findall(r"process (\d) reads for rank (\d)", printed):
        found.setdefault(int(process), set()).add(int(rank))
    return found


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """Each reads the data of its own ranks; a run of one goes on in two, and one of two in one."""
    files = assets.write(tmp_path)
    expected, printed = train(1, files, tmp_path / "one")
    assert readers(printed) == {0: {0, 1, 2, 3}}
    losses, printed = train(2, files, tmp_path / "two")
    assert readers(printed) == {0: {0, 1}, 1: {2, 3}}
    assert losses == pytest.approx(expected, abs=1e-5)
    for processes, other in ((1, "two"), (2, "one")):
        out = tmp_path / f"{processes} after {other}"
        saved = f"checkpoint/step-{SAVED}"
        shutil.copytree(tmp_path / other / saved, out / saved)
        after, _ = train(processes, files, out)
        assert after == pytest.approx({s: v for s, v in expected.items() if s > SAVED}, abs=1e-5)
