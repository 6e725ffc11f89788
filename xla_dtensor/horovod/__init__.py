"""Horovod's torch API: ``import xla_dtensor.horovod as hvd`` in place of ``horovod.torch``.

Ranks are processes, where a launcher started several; the devices of a process that is alone; or
threads of `run`. docs/horovod.md has what that means for a script.
"""

from xla_dtensor.errors import HorovodInternalError
from xla_dtensor.horovod import elastic
from xla_dtensor.horovod.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from xla_dtensor.horovod.builds import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from xla_dtensor.horovod.calls import barrier, join, poll, synchronize
from xla_dtensor.horovod.compression import Compression
from xla_dtensor.horovod.gathering import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from xla_dtensor.horovod.lifecycle import (
    add_process_set,
    cross_rank,
    cross_size,
    init,
    is_coordinator,
    is_initialized,
    local_rank,
    local_size,
    mesh,
    per_rank,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from xla_dtensor.horovod.optimizer import DistributedOptimizer
from xla_dtensor.horovod.process_sets import ProcessSet, global_process_set
from xla_dtensor.horovod.rank_number import PerRank
from xla_dtensor.horovod.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from xla_dtensor.horovod.reductions import Adasum, Average, Max, Min, Product, Sum
from xla_dtensor.horovod.running import run
from xla_dtensor.horovod.state_of_training import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from xla_dtensor.horovod.sync_batch_norm import SyncBatchNorm
from xla_dtensor.horovod.timeline import start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PerRank",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_coordinator",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mesh",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "per_rank",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
