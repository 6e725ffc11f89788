"""Around parallelized modules: meta-device initialisation, activation checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import xla_dtensor as xd

STYLES = {"up": ColwiseParallel, "down": RowwiseParallel}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(module, mesh["tp"], {k: style() for k, style in STYLES.items()})


def test_parameters_begin_on_the_meta_device(mesh_2x4: DeviceMesh) -> None:
    with torch.device("meta"):
        block = Block()
    parallel(block, mesh_2x4)
    assert all(p.is_meta for p in block.parameters())
    before = {id(a) for a in jax.live_arrays()}
    block.to_empty(device="xla")
    torch.manual_seed(0)
    for layer in (block.up, block.down):
        layer.reset_parameters()
    # Nothing as large as a whole weight was left on any device, and none was a weight's layout.
    for array in jax.live_arrays():
        if id(array) not in before:
            assert max(s.data.size for s in array.addressable_shards) <= 16 * 32 // 4
    weight: Any = block.up.weight
    assert weight.placements == (torch.distributed.tensor.Shard(0),)
    # torch's default: uniform within 1 / sqrt(16).
    assert 0.2 < weight.full_tensor().cpu().abs().max() <= 0.25
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    block(torch.ones(4, 16, device="xla")).sum().backward()
    optimizer.step()


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "plain": lambda block, x: block(x),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "selective": lambda block, x: checkpoint(
        block,
        x,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, _save_products),
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_checkpointing_around_tensor_parallelism(
    way: Callable[[nn.Module, torch.Tensor], torch.Tensor], compiled: bool, mesh_2x4: DeviceMesh
) -> None:
    plain = Block()
    block = Block()
    block.load_state_dict(plain.state_dict())
    parallel(block.to("xla"), mesh_2x4)
    batches = [torch.randn(4, 16) for _ in range(2)]
    x = xd.from_device_values(batches, mesh_2x4["dp"]).requires_grad_()

    def step() -> torch.Tensor:
        y = way(block, x)
        y.square().sum().backward()
        return y.detach()

    y: Any = (xd.compile(step) if compiled else step)()
    for dp, batch in enumerate(batches):
        own = batch.clone().requires_grad_()
        plain.zero_grad()
        expected = plain(own)
        expected.square().sum().backward()
        assert x.grad is not None and block.up.weight.grad is not None
        of_device = dp * 4  # the first along tp
        torch.testing.assert_close(y.local_values()[of_device], expected.detach())
        torch.testing.assert_close(x.grad.local_values()[of_device], own.grad)
        shards = block.up.weight.grad.to_local().local_values()[of_device : of_device + 4]
        torch.testing.assert_close(torch.cat(shards), plain.up.weight.grad)
