"""A Llama for TPUs that aren't here moves what the hand-written JAX step moves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plan.tpus import needs_libtpu

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pod_llama.py"
OF_THE_TESTS = ("XLA_FLAGS", "XLA_DTENSOR_CHECKS")  # which change the programs


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--fully-shard",), ("--sequence-parallel",)], ids=str)
def test_it_costs_what_jax_costs(options: tuple[str, ...]) -> None:
    arguments = ("--model", "tiny", "--seq", "1024", "--topology", "v5e:2x4", "--mesh", "dp=2,tp=4")
    process = subprocess.run(
        [sys.executable, SCRIPT, *arguments, *options],
        env={name: value for name, value in os.environ.items() if name not in OF_THE_TESTS},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr
    found = {}
    for line in process.stdout.splitlines():
        side, _, text = line.partition(" ")
        if side in ("ours", "jax") and text.startswith("{"):
            found[side] = json.loads(text)
    assert found["ours"]["total"] <= 1.02 * found["jax"]["total"]
