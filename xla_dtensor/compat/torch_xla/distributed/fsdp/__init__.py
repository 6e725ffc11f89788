"""Names that ``torch_xla.distributed.fsdp`` shares with FSDPv2: wrap policies and checkpointing."""

from xla_dtensor.compat.torch_xla.distributed.fsdp.utils import checkpoint_module

__all__ = ["checkpoint_module"]


def __getattr__(name: str) -> object:
    if name == "XlaFullyShardedDataParallel":
        raise ImportError(
            "XlaFullyShardedDataParallel (a process per device) has no counterpart: use "
            "torch_xla.experimental.spmd_fully_sharded_data_parallel's "
            "SpmdFullyShardedDataParallel, or xla_dtensor.fully_shard"
        )
    raise AttributeError(name)
