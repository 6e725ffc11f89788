"""A collective on a `PerRank`: one process has every rank's tensor, as their shapes differ."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.errors import HorovodInternalError
from xla_dtensor.horovod.collectives.requests import HorovodRequest, Response
from xla_dtensor.horovod.ranks import exchange
from xla_dtensor.horovod.ranks.disagreements import disagreement
from xla_dtensor.horovod.ranks.ranked_tensors import request_of, to_array, to_tensor
from xla_dtensor.horovod.world.rank_number import PerRank
from xla_dtensor.mesh import frame_of


def all_at_once(call: HorovodRequest, name: str, mesh: DeviceMesh) -> list[Any]:
    """The results of a collective of `PerRank` values.

    Args:
        call: what is asked for; a value that is no `PerRank` is the same on all ranks.
        name: the operation's.
        mesh: the devices of the ranks.

    Returns:
        per tensor its result: one tensor where all ranks get the same, else a `PerRank`; of an
        alltoall with splits, also what has come from each rank.

    Raises:
        HorovodInternalError: the ranks' tensors don't fit together.
    """
    ranks = call.process_set.ranks
    own = {rank: [_of(tensor, rank) for tensor in call.tensors] for rank in ranks}
    requests = {
        rank: request_of(call.collective.of_rank(rank), name, tensors, ranks)
        for rank, tensors in own.items()
    }
    wrong = disagreement(requests)
    if wrong:
        raise HorovodInternalError(wrong)
    response = Response(name, tuple(ranks), requests)
    values: exchange.Values = {
        rank: [to_array(tensor) for tensor in tensors] for rank, tensors in own.items()
    }
    devices = np.array(frame_of(mesh).jax_mesh.devices).ravel()
    (outputs,) = exchange.run([response], [values], list(devices))
    found: list[Any] = []
    for position, output in enumerate(outputs):
        each = [to_tensor(output, rank, own[rank][position]) for rank in ranks]
        found.append(each[0] if call.collective.same_on_all else PerRank(each))
    parts = list(requests.values())
    more = [call.collective.more_results(parts, i) for i in range(len(ranks))]
    found += map(PerRank, zip(*more, strict=True))
    if call.targets is not None:
        for target, result in zip(call.targets, found, strict=True):
            for rank, mine in zip(ranks, target, strict=True):
                mine.copy_(_of(result, ranks.index(rank)))
        return list(call.targets)
    return found


def _of(value: Any, rank: int) -> Any:
    return value[rank] if isinstance(value, PerRank) else value
