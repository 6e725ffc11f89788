"""`ElasticSampler`: shares out an epoch's remaining rows when the number of ranks changes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch

from xla_dtensor.horovod.world.current_world import current


class ElasticSampler(torch.utils.data.Sampler[int]):
    """A ``DistributedSampler`` that knows which rows have been done, and shares out those that are
    left when the number of ranks changes. A process that drives all ranks has all rows.

    Args:
        dataset: of a constant length.
        shuffle: whether the order is random, another one in each epoch.
        seed: of the order; the same on all ranks.

    Attributes:
        epoch: that of `set_epoch`.
        remaining_indices: the rows that are left, of all ranks.
        num_replicas, rank: among how many ranks they are shared out, and which one this is.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch, self.processed_num = 0, 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all rows; to be called after one, not before it."""
        self.epoch, self.processed_num = epoch, 0
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has done a batch of its rows, in the order in which they came."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Sequence[int]) -> None:
        """These rows are done, whichever rank had them."""
        self.processed_indices.update(indices)

    def state_dict(self) -> dict[str, Any]:
        """What has been done."""
        return {
            "epoch": self.epoch,
            "processed_num": self.processed_num,
            "processed_indices": sorted(self.processed_indices),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has said."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Share out the rows that are left among the ranks that there are now."""
        world = current()
        self.num_replicas = 1 if world.is_alone else world.size
        self.rank = 0 if world.is_alone else world.rank
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        left = order[self.processed_num :]
        self.remaining_indices = [i for i in left if i not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        # The last ranks begin again, so that all have as many.
        filled = [left[i % len(left)] for i in range(self.total_size)]
        return iter(filled[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
