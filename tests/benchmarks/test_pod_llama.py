"""A model for devices that aren't here moves what the hand-written JAX step moves."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks import scripts
from tests.planning.gpus import needs_cudnn
from tests.planning.tpus import needs_libtpu


def ratio(*arguments: str) -> float:
    """Our bytes of those of JAX's."""
    printed = scripts.output("pod_llama.py", *arguments)
    found = {}
    for line in printed.splitlines():
        side, _, text = line.partition(" ")
        if side in ("ours", "jax") and text.startswith("{"):
            found[side] = json.loads(text)
    return found["ours"]["total"] / found["jax"]["total"]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--fully-shard",), ("--sequence-parallel",)], ids=str)
def test_it_costs_what_jax_costs(options: tuple[str, ...]) -> None:
    arguments = ("--model", "tiny", "--seq", "1024", "--topology", "v5e:2x4", "--mesh", "dp=2,tp=4")
    assert ratio(*arguments, *options) <= 1.02


@pytest.mark.slow
def test_so_do_experts() -> None:
    """With the layouts of "dp" chosen first, and no other order tried, that axis took the experts
    for itself, and this moved three times as much."""
    arguments = ("--model", "tiny-experts", "--topology", "cpu:8", "--mesh", "dp=2,ep=4")
    assert ratio(*arguments) <= 1.02


@needs_cudnn
@pytest.mark.slow
def test_so_does_mixtral() -> None:
    """Two layers of it. The gradients of logits were gathered, and it moved 1.9 times as much."""
    arguments = ("--model", "mixtral", "--layers", "2", "--topology", "h100:4x8")
    assert ratio(*arguments, "--mesh", "dp=4,ep=8") <= 1.03
