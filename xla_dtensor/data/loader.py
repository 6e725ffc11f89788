"""Wraps a loader of each process's part of a batch into one that yields whole batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.data.batches import shard_batch
from xla_dtensor.runtime import agreement


class ShardedLoader:
    """What a loader yields, each tensor as `shard_batch` makes it. Each process's loader gives its
    part of the rows: with ``torch.utils.data.distributed.DistributedSampler(dataset,
    xd.distributed.process_count(), xd.distributed.process_index())`` for example.

    Args:
        loader: an iterable of tensors, or of tuples, lists and dicts of them; a ``DataLoader``.
        device_mesh: an xla mesh.
        placements: one per mesh dim, of every tensor of a batch.

    Raises:
        DivergenceError: one process's loader ends before another's.

    Example::

        import torch, xla_dtensor as xd
        from torch.utils.data import DataLoader, TensorDataset

        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        rows = TensorDataset(torch.arange(32.0).reshape(16, 2))
        for (batch,) in xd.data.ShardedLoader(DataLoader(rows, batch_size=8), mesh, [xd.Shard(0)]):
            assert batch.shape == (8, 2) and batch.placements == (xd.Shard(0),)
    """

    def __init__(
        self, loader: Iterable[Any], device_mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> None:
        self.loader = loader
        self._mesh, self._placements = device_mesh, tuple(placements)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        end = object()
        batches = iter(self.loader)
        while True:
            batch = next(batches, end)
            agreement.agree(
                "has no more batches" if batch is end else "has another batch",
                "Each process's loader has to have as many batches (DistributedSampler sees to it)",
            )
            if batch is end:
                return
            yield pytree.tree_map_only(torch.Tensor, self._shard, batch)

    def _shard(self, tensor: torch.Tensor) -> torch.Tensor:
        return shard_batch(tensor, self._mesh, self._placements)
