"""Checkpoints of torch DTensor programs of four processes load here, and ours there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.gloo_program import layouts_of, state, values
from tests.checkpoint.layouts import same, value_of
from tests.conftest import make_mesh

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.slow,  # four processes
]

TIMEOUT = 120  # seconds


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the gloo program has saved, after it has loaded what we saved, and compared it."""
    folder = tmp_path_factory.mktemp("gloo")
    meshes: Any = {(4,): make_mesh("4"), (2, 2): make_mesh("2x2")}
    dcp.save(state(meshes, True), checkpoint_id=folder / "ours", no_dist=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=4", "-m", "tests.checkpoint.gloo_program"]
    process = subprocess.Popen(
        [*command, folder / "ours", folder / "theirs"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed = process.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{process.communicate()[0]}\nno end after {TIMEOUT} s")
    assert process.returncode == 0 and printed.count("both ways") == 4, printed[-5000:]
    return folder / "theirs"


@pytest.mark.parametrize("meshes", ["4", "8", "5"])
def test_both_ways(theirs: Path, meshes: str) -> None:
    """Onto meshes of as many devices, of more and of fewer."""
    plane = {"4": "2x2", "8": "2x4", "5": "5x1"}[meshes]
    loaded = state({(4,): make_mesh(meshes), (2, 2): make_mesh(plane)}, False)
    dcp.load(loaded, checkpoint_id=theirs, no_dist=True)
    assert loaded["step"] == 7 and loaded["names"] == ["a", 1, None]
    for name, value in values().items():
        assert torch.equal(loaded["plain"][name], value)
        for layout in layouts_of(name):
            assert same(value_of(loaded[layout][name]), value), (layout, name)
