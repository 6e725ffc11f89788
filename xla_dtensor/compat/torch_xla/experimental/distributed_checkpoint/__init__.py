"""Checkpoints of a training run under torch_xla's names."""

from __future__ import annotations

from xla_dtensor.compat.torch_xla.experimental.distributed_checkpoint.manager import (
    CheckpointManager,
    prime_optimizer,
)
from xla_dtensor.compat.torch_xla.experimental.distributed_checkpoint.planners import (
    SPMDLoadPlanner,
    SPMDSavePlanner,
)

__all__ = ["CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"]
