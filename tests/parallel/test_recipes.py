"""docs/parallel.md: its blocks run, its recipes compute and communicate what the page says."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

import xla_dtensor as xd
from tests.parallel.harness import EPS, Model, collectives, full, loss_of, reference, sizes

BATCH = 1024
"""Of fewer rows gradients are moved less if their rows are gathered, and each device computes some
columns for all of them."""

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's blocks define, run in order."""
    text = PAGE.read_text()
    names: dict[str, Any] = {"__name__": "docs.parallel"}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
    return names


def mesh_for(recipe: str) -> DeviceMesh:
    shape, names = {
        "ddp": ((8,), ("dp",)),
        "fsdp": ((8,), ("dp",)),
        "hsdp": ((2, 4), ("replicate", "dp")),
        "fsdp_tp": ((4, 2), ("dp", "tp")),
    }[recipe]
    return xd.init_device_mesh("xla", shape, mesh_dim_names=names)


PLACEMENTS = {
    "ddp": {"up.weight": [Replicate()], "down.weight": [Replicate()]},
    "fsdp": {"up.weight": [Shard(0)], "down.weight": [Shard(0)]},
    "hsdp": {"up.weight": [Replicate(), Shard(0)], "down.weight": [Replicate(), Shard(0)]},
    "fsdp_tp": {"up.weight": [Shard(1), Shard(0)], "down.weight": [Shard(0), Shard(1)]},
}


def moved(found: dict[str, Counter[int]]) -> int:
    """Elements of the results of collectives, on a device."""
    return sum(size * n for sizes in found.values() for size, n in sizes.items())


def original(name: str) -> str:
    """A parameter's name before it was parametrized."""
    return name.replace("parametrizations.", "").replace(".original", "")


@pytest.mark.slow
@pytest.mark.parametrize("layouts", ["step", "torch"])
@pytest.mark.parametrize("recipe", ["ddp", "fsdp", "hsdp", "fsdp_tp"])
def test_recipe(page: dict[str, Any], recipe: str, layouts: Any) -> None:
    expected = reference()
    model = page[recipe](reference(), mesh_for(recipe))
    parameters = {original(name): p for name, p in model.named_parameters()}
    for name, placements in PLACEMENTS[recipe].items():
        assert list(parameters[f"blocks.0.{name}"].placements) == placements
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS)
    wanted = torch.optim.AdamW(expected.parameters(), lr=0.01, eps=EPS)

    @functools.partial(xd.compile, layouts=layouts)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for seed in range(3):
        x = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(seed))
        loss = step(x)
        wanted_loss = loss_of(expected(x))
        torch.testing.assert_close(full(loss), wanted_loss.detach())
        wanted_loss.backward()
        wanted.step()
        wanted.zero_grad()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(full(parameters[name]), parameter.detach(), atol=1e-5, rtol=1e-4)

    found = collectives(step)
    counts = sizes(expected)
    reduced = Counter([1, *counts.values()])  # a sum per gradient, and one for the loss
    whole = Counter(counts.values())
    if recipe == "ddp":
        wanted_moves = {"all-reduce": reduced}
    elif recipe == "fsdp":
        wanted_moves = {"all-gather": whole, "all-reduce": reduced}
    elif recipe == "hsdp":  # its result's shards are summed over the replicas
        slices = Counter(c // 4 for n, c in counts.items() if "weight" in n)
        wanted_moves = {"all-gather": whole, "all-reduce": reduced + slices}
    else:
        own = {n: c // 2 if "blocks" in n else c for n, c in counts.items()}
        # Gradients, the loss, and what tensor parallelism sums: two activations, two gradients.
        batch = BATCH // 4
        activations = [batch * 8, batch * 16, batch * 8, batch * 24]
        wanted_moves = {
            "all-gather": Counter(c for n, c in own.items() if "weight" in n),
            "all-reduce": Counter([1, *own.values(), *activations]),
        }
    if layouts == "torch" or recipe in ("ddp", "fsdp"):
        assert found == wanted_moves
    else:  # hsdp's sums over both axes at once; fsdp_tp's small weights instead of activations
        assert moved(found) < moved(wanted_moves)

    # Parameters and both moments, per device, the batch and the step counts.
    shards = {"ddp": 1, "fsdp": 8, "hsdp": 4, "fsdp_tp": 4}[recipe]
    state = 3 * 4 * sum(counts.values()) // shards
    size = step.compiled_programs()[-1].memory_analysis().argument_size_in_bytes
    if recipe == "fsdp_tp":  # the blocks' weights are cut in half once more
        assert size < state
    else:
        assert state <= size <= state + 1024 + BATCH * 4 * 4


def test_recomputation_gathers_again(page: dict[str, Any]) -> None:
    class Recomputing(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.out(x)

    torch.manual_seed(0)
    model, expected = page["fsdp"](Recomputing(), mesh_for("fsdp")), reference()

    @xd.compile
    def step(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()

    x = torch.randn(16, 4)
    step(x)
    loss_of(expected(x)).backward()
    wanted = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), wanted[original(name)].grad)
    found = collectives(step)["all-gather"]
    for name, count in sizes(expected).items():
        assert found[count] == (2 if "blocks" in name else 1), name


def test_the_pages_examples(page: dict[str, Any]) -> None:
    assert all(isinstance(loss, torch.Tensor) for loss in page["losses"])
    assert isinstance(page["Block"](4), nn.Module)
