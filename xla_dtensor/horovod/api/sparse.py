"""`sparse_allreduce_async`: gathers the indices and values of sparse tensors, and adds them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.horovod.api.calls import single
from xla_dtensor.horovod.api.collectives import allgather_async
from xla_dtensor.horovod.collectives.reductions import Average, ReduceOp, Sum
from xla_dtensor.horovod.world.current_world import current
from xla_dtensor.horovod.world.process_sets import global_process_set
from xla_dtensor.horovod.world.rank_number import PerRank


def sparse_allreduce_async(
    tensor: Any, name: str | None = None, op: int = Average, process_set: Any = global_process_set
) -> Callable[[], Any]:
    """The reduction of sparse tensors, whose places may differ: by gathering them.

    Args:
        tensor: a sparse COO tensor on the CPU (the xla device has dense ones only); where one
            process drives all ranks it may be a `PerRank` of them.
        name: under which the ranks find each other; numbered by default.
        op: `Average` or `Sum`.
        process_set: the ranks that take part.

    Returns:
        a function that waits for it and returns a sparse tensor, not coalesced; `synchronize` takes
        it as well.

    Raises:
        NotImplementedError: another reduction.
        ValueError: as of `allreduce_async`.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.sparse_coo_tensor([[0, 2]], [1.0, 3.0], (4,), check_invariants=True)
        handle = hvd.sparse_allreduce_async(x, name="rows")
        assert hvd.synchronize(handle).to_dense().tolist() == [1, 0, 3, 0]
    """
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"sparse_allreduce_async(op={ReduceOp(op)!r}): sparse tensors are averaged or summed"
        )
    own = tensor if isinstance(tensor, PerRank) else [tensor]
    whole = [each.coalesce() for each in own]
    wrap: Any = PerRank if isinstance(tensor, PerRank) else single
    parts = {
        "indices": wrap([each.indices().t().contiguous() for each in whole]),
        "values": wrap([each.values() for each in whole]),
    }
    handles = {
        part: allgather_async(
            value, name=None if name is None else f"{name}.{part}", process_set=process_set
        )
        for part, value in parts.items()
    }
    members = process_set.size()
    world = current()

    def wait() -> Any:
        indices, values = (world.synchronize(handles[part])[0] for part in parts)
        if op == Average:
            values = values / members
        shape = whole[0].shape
        return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False)

    return wait
