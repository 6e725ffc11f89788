"""Ray Train starts the processes, and starts them again when one is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, clean_environment
from tests.runtime.test_training import reference


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is an extra: pip install -e '.[ray]'"
)
def test_two_workers_of_which_one_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.ray_program", str(tmp_path)],
        cwd=ROOT,
        env=clean_environment()
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=400)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0 and "all of it" in output, output[-6000:]
    for name in ("attempt0.0", "attempt0.1", "attempt1.0", "attempt1.1"):
        count, devices, losses = json.loads((tmp_path / name).read_text())
        assert (count, devices) == (2, 8)
        assert losses == pytest.approx(reference(), abs=2e-6)
