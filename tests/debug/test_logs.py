"""The log lines, and how they are switched on."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import xla_dtensor as xd

R, S = Replicate(), Shard
LINE = (
    r"aten::mm\.default \(dp=2, tp=4\) \[dp, None\], \[None, tp\] -> \[dp, tp\]  "
    r'rule: family matmul "m k, k n -> m n"  at \S*{file}:{line}$'
)
ROOT = Path(__file__).parents[2]
PROGRAM = """\
import logging
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import xla_dtensor as xd

mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(0), Replicate()])
w = distribute_tensor(torch.randn(16, 8), mesh, [Replicate(), Shard(1)])
x @ w
logging.basicConfig(format="mine: %(message)s")
torch.relu(x)
xd.debug.set_logs(layouts=False)
x + 1
"""


def test_set_logs(sharded, caplog):
    x, w = sharded((8, 16), S(0), R), sharded((16, 8), R, S(1))
    xd.debug.set_logs(layouts=True)
    xd.debug.set_logs(layouts=True)  # twice is once
    try:
        x @ w
    finally:
        xd.debug.set_logs(layouts=False)
    x @ w
    assert [(each.name, each.levelname) for each in caplog.records] == [
        ("xla_dtensor.layouts", "INFO")
    ]
    line = LINE.format(file=Path(__file__).name, line=r"\d+")
    assert re.match(line, caplog.records[0].getMessage())
    assert logging.getLogger("xla_dtensor.layouts").level == logging.NOTSET


def test_moved_bytes_are_in_the_line(sharded, caplog):
    big, row = sharded((64, 16), R, S(0)), sharded((16,), R, S(0))
    xd.debug.set_logs(layouts=True)
    big + row
    xd.debug.set_logs(layouts=False)
    (record,) = caplog.records
    assert "  moves: other [tp] -> [None]: all-gather over tp, 48 B  at " in record.getMessage()


def test_explain_and_logs_together(sharded, caplog, capsys):
    x = sharded((8, 16), S(0), R)
    xd.debug.set_logs(layouts=True)
    xd.explain(torch.relu, x)
    x.relu()
    xd.debug.set_logs(layouts=False)
    assert [each.getMessage().split()[0] for each in caplog.records] == ["aten::relu.default"] * 2
    assert capsys.readouterr().out.count("aten::relu") == 1


def test_an_unknown_artifact():
    with pytest.raises(ValueError, match=r"'recompiles'; known are 'layouts'"):
        xd.debug.set_logs(recompiles=True)


@pytest.mark.slow
def test_the_environment_switch(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    environment = os.environ | {"XLA_DTENSOR_LOGS": "layouts", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "aten::" in line]
    assert re.match(r"\[xla_dtensor\.layouts\] " + LINE.format(file="train.py", line=9), lines[0])
    # The program's own handler takes over.
    assert lines[1].startswith("mine: aten::relu.default (dp=2, tp=4) [dp, None] -> [dp, None]  ")
    assert len(lines) == 2
