"""What torchtitan has and an xla mesh hasn't is refused by name."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan isn't installed: make test-torchtitan")

from torchtitan.components import quantization
from torchtitan.config import CompileConfig
from torchtitan.distributed import minimal_async_ep
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC
from torchtitan.distributed.minimal_async_ep import kernels
from torchtitan.models import llama3
from torchtitan.tools.profiler import MemoryProfiler
from torchtitan.trainer import Trainer

import xla_dtensor as xd
from tests.torchtitan import harness
from tests.torchtitan.plan import Plan
from tests.torchtitan.releases import after_0_2, release


@pytest.mark.parametrize(
    "name",
    [name for name in quantization.__all__ if name.startswith(("F", "M", "N")) and "Conv" in name],
)
def test_converters(name: str) -> None:
    """By the converter's name, and before a model is built."""
    converter = getattr(quantization, name).Config()
    with pytest.raises(xd.UnsupportedOpError, match=f"{name}: .* bfloat16"):
        llama3.model_registry("debugmodel", converters=[converter])


def test_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before blocks are compiled."""
    monkeypatch.setattr(after_0_2, "CompileConfig", lambda: CompileConfig(enable=True))
    spec = release.debug_model("llama3", 1)
    with pytest.raises(xd.UnsupportedOpError, match=r"compile\.enable: torch\.compile makes no"):
        harness.on_mesh(spec, Plan(dp_shard=4), {}, 1, compiled=True)
    with pytest.raises(ValueError, match=r"compiled: set --compile\.enable"):  # torchtitan's own
        Trainer.Config(activation_checkpoint=MemoryBudgetAC.Config())


def test_picture_of_a_memory_budget() -> None:
    checkpointing = MemoryBudgetAC.Config(visualize_memory_budget_pareto=True).build(dump_folder="")
    with pytest.raises(xd.UnsupportedOpError, match="visualize_memory_budget_pareto"):
        checkpointing.apply(torch.nn.Linear(1, 1))


def test_memory_snapshots() -> None:
    with pytest.raises(xd.UnsupportedOpError, match="enable_memory_snapshot: the allocator is"):
        MemoryProfiler(0, 1, "", "", 0, 10)


def test_kernels_of_triton() -> None:
    """They are there to be imported, where there is no Triton."""
    assert minimal_async_ep.__file__
    with pytest.raises(xd.UnsupportedOpError, match="copy_rows_to_peers_kernel is a Triton kernel"):
        kernels.copy_rows_to_peers_kernel[(1,)](torch.zeros(1))
