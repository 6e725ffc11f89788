"""A Llama for TPUs that aren't here moves what the hand-written JAX step moves."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks import scripts
from tests.planning.tpus import needs_libtpu


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--fully-shard",), ("--sequence-parallel",)], ids=str)
def test_it_costs_what_jax_costs(options: tuple[str, ...]) -> None:
    arguments = ("--model", "tiny", "--seq", "1024", "--topology", "v5e:2x4", "--mesh", "dp=2,tp=4")
    printed = scripts.output("pod_llama.py", *arguments, *options)
    found = {}
    for line in printed.splitlines():
        side, _, text = line.partition(" ")
        if side in ("ours", "jax") and text.startswith("{"):
            found[side] = json.loads(text)
    assert found["ours"]["total"] <= 1.02 * found["jax"]["total"]
