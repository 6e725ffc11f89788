"""Checkpoints of a training run under torch_xla's names."""

from __future__ import annotations

from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from xla_dtensor.compat.torch_xla.experimental.distributed_checkpoint.manager import (
    CheckpointManager,
    prime_optimizer,
)

# `torch.distributed.checkpoint` of sharded tensors takes torch's planners as they are.
SPMDSavePlanner = DefaultSavePlanner
SPMDLoadPlanner = DefaultLoadPlanner

__all__ = ["CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"]
