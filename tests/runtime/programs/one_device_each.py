"""One device per process: ranks are Python numbers, tensors each process's own, as under torch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd


def main() -> None:
    dist.init_process_group("xla")
    mesh = xd.init_device_mesh("xla", (2,), mesh_dim_names=("dp",))
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == 2 and rank == xd.distributed.process_index()
    assert mesh.get_rank() == mesh.get_local_rank() == mesh.get_local_rank("dp") == rank
    assert mesh.get_coordinate() == [rank] and dist.get_rank(mesh.get_group("dp")) == rank

    x = torch.full((3,), float(rank), device="xla")
    dist.all_reduce(x)
    assert x.tolist() == [1, 1, 1]
    own = x * rank
    assert own.tolist() == [rank] * 3
    gathered = [torch.zeros(3, device="xla") for _ in range(size)]
    dist.all_gather(gathered, own)
    assert [each.tolist() for each in gathered] == [[0] * 3, [1] * 3]
    varied = (xd.collectives.axis_index(mesh, "dp") * torch.arange(6.0).reshape(2, 3)).t()
    assert varied.tolist() == [[0, 3 * rank], [rank, 4 * rank], [2 * rank, 5 * rank]]
    assert varied.cpu().stride() == varied.stride() == (1, 3)
    assert f"{4 * rank}.]" in str(varied) and f"{varied[1, 1]:.1f}" == f"{4.0 * rank}"
    dist.broadcast(own, src=1)
    assert own.tolist() == [1] * 3

    # A shard is a slice at a rank-dependent place, on one process alone or on all.
    full = torch.arange(8.0, device="xla")
    shard = full[4 * rank : 4 * rank + 4]
    sharded = DTensor.from_local(shard, mesh, [Shard(0)])
    assert sharded.full_tensor().tolist() == list(range(8))
    assert sharded.to_local().tolist() == shard.tolist()
    assert DTensor.from_local(torch.tensor([rank + 1.0]), mesh, [Partial()]).item() == 3
    if rank == 0:
        assert full.sum().item() == 28
    try:
        DTensor.from_local(torch.tensor([float(rank)]), mesh, [Replicate()])
    except xd.DivergenceError as error:
        assert "has to be the same" in str(error)
    else:
        raise AssertionError("values that differ were taken for replicas")

    uneven = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    held = uneven.to_local()
    assert held.tolist() == ([0, 1, 2] if rank == 0 else [3, 4])
    assert (held * rank).sum().item() == 7 * rank
    back = DTensor.from_local(held * 2, mesh, [Shard(0)], shape=(5,), stride=(1,))
    assert back.tolist() == [0, 2, 4, 6, 8]
    leaf = uneven.detach().requires_grad_()
    (leaf.to_local() * (rank + 1)).sum().backward()
    assert leaf.grad.placements == (Shard(0),) and leaf.grad.tolist() == [1, 1, 1, 2, 2]

    data_parallel_by_hand(rank, size)
    print("all of it")


def data_parallel_by_hand(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model, expected = nn.Linear(4, 2), nn.Linear(4, 2)
    expected.load_state_dict(model.state_dict())
    model = model.to("xla")
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
    for module in (model, expected):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            batch = rows if module is expected else rows[4 * rank : 4 * rank + 4].to("xla")
            module(batch).square().mean().backward()
            if module is model:
                for parameter in module.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= size
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight.cpu(), expected.weight)


if __name__ == "__main__":
    main()
