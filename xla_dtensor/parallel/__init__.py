"""Data parallelism: ``fully_shard`` and ``replicate``."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from xla_dtensor.parallel.by_size import shard_by_size
from xla_dtensor.parallel.fully_shard import fully_shard
from xla_dtensor.parallel.module import FSDPModule, UnshardHandle
from xla_dtensor.parallel.offload import offload_state
from xla_dtensor.parallel.parallelize import parallelize
from xla_dtensor.parallel.replicate import ReplicateModule, replicate
from xla_dtensor.parallel.zero import zero

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "UnshardHandle",
    "fully_shard",
    "offload_state",
    "parallelize",
    "replicate",
    "shard_by_size",
    "zero",
]
