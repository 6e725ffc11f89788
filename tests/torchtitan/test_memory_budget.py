"""torchtitan's memory budget of activation checkpointing, in its trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan")

import torch._functorch.config as functorch

import xla_dtensor as xd
from tests.torchtitan.test_trainer import ON_8_DEVICES, _environment, files, train, trainer

__all__ = ["_environment", "files"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torchtitan and what it imports

COMMON = [
    *ON_8_DEVICES,
    "--parallelism.spmd_backend=partial_dtensor",
    "--training.steps=3",
]


def within(budget: float) -> list[str]:
    """torchtitan's own arguments: it wants its models compiled for a budget."""
    return [
        "--compile.enable",
        "activation_checkpoint:memory-budget",
        f"--activation_checkpoint.memory_budget={budget}",
    ]


@pytest.fixture(autouse=True)
def _setting() -> Iterator[None]:
    before = functorch.activation_memory_budget
    yield
    functorch.activation_memory_budget = before


@pytest.mark.parametrize("step", ["parts", "whole"])
def test_trainer(step: str, files: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The same losses, and part of the forward pass is computed again."""
    monkeypatch.setattr(xd.config, "torchtitan_step", step)
    losses, products = [], []
    for more in (["activation_checkpoint:none"], within(0.3)):
        made = trainer(files, tmp_path, *COMMON, *more)
        losses.append(train(made))
        compiled = made.xla_step if step == "whole" else made.fwd_bwd_fn
        products.append([p.as_text().count("exponential") for p in compiled.compiled_programs()])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert min(products[1]) > max(products[0])


def test_eager(files: Any, tmp_path: Path) -> None:
    """Nothing would go by it."""
    made = trainer(files, tmp_path, *COMMON, "--training.disable_cuda_graphs", *within(0.5))
    with pytest.raises(xd.UnsupportedOpError, match=r"memory budget .* with .*disable_cuda_graphs"):
        train(made)
