"""torch.distributed's own collectives, which write into tensors, along each mesh dim."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.oracle._harness import Oracle

WORLD_SIZE = 4


def main(oracle: Oracle) -> None:
    mesh = oracle.mesh((2, 2), ("dp", "tp"))
    for dim, sizes in (("dp", 2), ("tp", 2)):
        group = mesh.get_group(dim)
        n = dist.get_world_size(group)
        assert n == sizes
        x = oracle.local(f"x.{dim}", (2 * n, 3), ("dp", "tp"))
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            total = x.clone()
            assert dist.all_reduce(total, op, group=group) is None
            oracle.dump(f"{dim}.all_reduce.{op}", total)
        work = dist.all_reduce(total := x.clone(), group=group, async_op=True)
        assert work is not None
        work.wait()
        oracle.dump(f"{dim}.async", total)
        view = x.clone()
        dist.all_reduce(view[1], group=group)
        oracle.dump(f"{dim}.view", view)

        joined = torch.empty(2 * n * n, 3, device=oracle.device)
        dist.all_gather_into_tensor(joined, x, group=group)
        oracle.dump(f"{dim}.gathered", joined)
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, x, group=group)
        for i, part in enumerate(parts):
            oracle.dump(f"{dim}.part{i}", part)

        piece = torch.empty(2, 3, device=oracle.device)
        dist.reduce_scatter_tensor(piece, x, group=group)
        oracle.dump(f"{dim}.scattered", piece)
        dist.reduce_scatter(piece, list(x.chunk(n)), group=group)
        oracle.dump(f"{dim}.scattered.list", piece)
        exchanged = torch.empty_like(x)
        dist.all_to_all_single(exchanged, x, group=group)
        oracle.dump(f"{dim}.exchanged", exchanged)
        dist.all_to_all_single(exchanged, x, [2] * n, [2] * n, group=group)
        oracle.dump(f"{dim}.exchanged.sizes", exchanged)
        dist.broadcast(sent := x.clone(), group=group, group_src=1)
        oracle.dump(f"{dim}.broadcast", sent)
    mesh["dp", "tp"]._flatten("all")
    group = mesh.get_group("all")
    x = oracle.local("x", (3,), ("dp", "tp"), dtype=torch.int64, high=9)
    assert dist.get_process_group_ranks(group) == [0, 1, 2, 3]
    dist.broadcast(sent := x.clone(), src=2, group=group)
    oracle.dump("all.broadcast", sent)
    dist.all_reduce(total := x.clone(), group=group)
    oracle.dump("all.all_reduce", total)
    dist.barrier(group=group)
