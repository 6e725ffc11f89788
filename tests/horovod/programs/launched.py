"""A Horovod script as a launcher starts it, whichever: who it is, and a short training.

python -m tests.horovod.programs.launched
"""

from __future__ import annotations

import torch

import xla_dtensor as xd
import xla_dtensor.horovod as hvd
from tests.horovod.ranks import data
from tests.horovod.test_compiled import compare, network, trained_on_the_host


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert (rank, size) == (xd.distributed.process_index(), xd.distributed.process_count())
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)  # all on one host
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    total = hvd.allreduce(torch.tensor([1.0, rank]), op=hvd.Sum)
    assert total.tolist() == [size, size * (size - 1) / 2]
    assert hvd.allgather(torch.full((rank + 1,), rank)).tolist() == [
        r for r in range(size) for _ in range(r + 1)
    ]
    assert hvd.broadcast_object({"from": rank}, root_rank=size - 1) == {"from": size - 1}
    torch.manual_seed(rank)
    model = network()
    if rank:
        torch.nn.init.zeros_(model[0].weight)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    for seed in range(2):
        optimizer.zero_grad()
        model(data(rank, [4, 6], seed=seed)).square().mean().backward()
        optimizer.step()
    compare(model, trained_on_the_host(2))
    print(f"rank {rank} of {size}: all of it", flush=True)


if __name__ == "__main__":
    main()
