"""Layouts that checkpoints are saved from and loaded into."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.conftest import make_mesh

# Mesh and placements; of a matrix of 10 x 6 each cuts unevenly somewhere.
LAYOUTS: dict[str, tuple[str, tuple[Placement, ...]]] = {
    "rows": ("8", (Shard(0),)),
    "columns": ("8", (Shard(1),)),  # two devices have nothing
    "both": ("2x4", (Shard(0), Shard(1))),
    "one dim twice": ("4x2", (Shard(0), Shard(0))),
    "strided": ("2x4", (_StridedShard(0, split_factor=4), Shard(0))),
    "replicated": ("2x4", (Replicate(), Replicate())),
    "partly": ("2x2x2", (Replicate(), Shard(1), Shard(0))),
    "five devices": ("5", (Shard(0),)),
    "one device": ("1", (Shard(0),)),
    "submesh": ("2x4/tp", (Shard(1),)),
}


def laid_out(value: torch.Tensor, layout: str) -> Any:
    """``value`` as the layout of that name has it; "xla" and "cpu" are plain tensors."""
    if layout in ("xla", "cpu"):
        return value.clone().to(layout)
    name, placements = LAYOUTS[layout]
    root, _, dim = name.partition("/")
    mesh = make_mesh(root)
    return distribute_tensor(value, mesh[dim] if dim else mesh, placements)


def value_of(tensor: Any) -> torch.Tensor:
    """The whole value on the CPU."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a CPU tensor's elements."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes()
