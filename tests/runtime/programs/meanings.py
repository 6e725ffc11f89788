"""What everything means in two processes of four devices; what is expected is CPU torch's.

Each process runs all of it, and says so at the end.
"""

from __future__ import annotations

import io

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import xla_dtensor as xd


def reads(mesh: xd.DeviceMesh) -> None:
    """Values on the host, of every layout, evenly sharded or not."""
    for rows in (8, 5):
        full = torch.arange(rows * 8.0).reshape(rows, 8)
        for placements in (
            [Shard(0), Shard(1)],
            [Replicate(), Replicate()],
            [Shard(0), Shard(0)],
            [Partial(), Shard(0)],
        ):
            x = distribute_tensor(full, mesh, placements)
            assert torch.equal(x.cpu(), full), placements
            assert torch.equal(x.full_tensor().cpu(), full)
            assert x.tolist() == full.tolist()
            assert "18., " in repr(x)
            assert torch.equal(x[1:3].cpu(), full[1:3])  # of a view
        assert x.sum().item() == full.sum().item() and bool((x >= 0).all())
    large = distribute_tensor(torch.arange(4096.0).reshape(64, 64), mesh, [Shard(0), Shard(1)])
    text = str(large)
    assert "..., 6." in text and "4.0950e+03]]" in text


def shapes_by_values(mesh: xd.DeviceMesh) -> None:
    full = torch.tensor([[0, 3, 0, 1], [2, 0, 0, 0]] * 4)
    x = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
    assert torch.equal(x.nonzero().cpu(), full.nonzero())
    assert torch.equal(x[x > 0].cpu(), full[full > 0])
    assert torch.equal(x.unique().cpu(), full.unique())
    x[x > 2] = 7
    full[full > 2] = 7
    assert torch.equal(x.cpu(), full)
    table = distribute_tensor(torch.arange(32.0).reshape(8, 4), mesh, [Shard(0), Replicate()])
    index = torch.tensor([[1, 7], [0, 3]] * 4)
    found = torch.nn.functional.embedding(distribute_tensor(index, mesh, [Shard(0)] * 2), table)
    wanted = torch.nn.functional.embedding(index, torch.arange(32.0).reshape(8, 4))
    assert torch.equal(found.cpu(), wanted)


def looked_at(mesh: xd.DeviceMesh) -> None:
    """What a compiled step looks at of tensors that it finds, whose shards both processes have."""
    mask = distribute_tensor(torch.arange(8) % 2 == 0, mesh, [Shard(0), Replicate()])
    count = distribute_tensor(torch.arange(8), mesh, [Shard(0), Shard(0)])

    @xd.compile
    def step(x):
        count.add_(1)
        if count[5] % 2 == 1:
            x = x * count.sum().item()
        return x[mask]

    x = torch.arange(8.0)
    for call in range(4):
        wanted = x * (36 + 8 * call) if call % 2 else x
        found = step(distribute_tensor(x, mesh, [Replicate(), Shard(0)]))
        assert found.tolist() == wanted[mask.cpu()].tolist(), call
        mask.logical_not_()


def own_values(mesh: xd.DeviceMesh, me: int) -> None:
    """What is this process's: the four devices of its row."""
    full = torch.arange(64.0).reshape(8, 8)
    x = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
    shards = x.local_shards
    assert [shard.device for shard in shards] == [4 * me + i for i in range(4)]
    for shard in shards:
        assert torch.equal(shard.data, full[shard.index])
    local = x.to_local()
    assert [v.tolist() for v in local.local_values()] == [s.data.tolist() for s in shards]
    own = [torch.full((2,), float(4 * me + i)) for i in range(4)]
    y = xd.from_device_values(own, mesh)
    assert [v[0].item() for v in (y + 1).local_values()] == [4 * me + i + 1 for i in range(4)]
    total = xd.collectives.all_reduce(xd.collectives.all_reduce(y, (mesh, "dp")), (mesh, "tp"))
    assert total.tolist() == [28, 28]
    assert mesh.get_local_rank("dp") == me
    refuses(xd.PerDeviceValueError, "drives several", lambda: mesh.get_local_rank("tp"))
    refuses(xd.PerDeviceValueError, "drives several", mesh.get_coordinate)
    refuses(ValueError, "4 of them this process's", lambda: xd.from_device_values(own * 2, mesh))


def process_local(mesh: xd.DeviceMesh, me: int) -> None:
    """What only this process has, as part of a whole."""
    whole = torch.arange(64.0).reshape(8, 8)
    part = whole[4 * me : 4 * me + 4]
    for placements in ([Shard(0), Replicate()], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        batch = xd.data.shard_batch(part, mesh, placements)
        assert batch.shape == (8, 8) and torch.equal(batch.cpu(), whole), placements
    # Along a mesh dim inside of each process all have the same.
    batch = xd.data.shard_batch(whole, mesh, [Replicate(), Shard(0)])
    assert torch.equal(batch.cpu(), whole)
    x = DTensor.from_local(part, mesh, [Shard(0), Replicate()])
    assert x.shape == (8, 8) and torch.equal(x.cpu(), whole)
    assert DTensor.from_local(torch.tensor([me + 1.0]), mesh, [Partial(), Replicate()]).item() == 3
    same = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Replicate()])
    assert same.tolist() == [1, 1]

    rows = TensorDataset(torch.arange(32.0).reshape(16, 2), torch.arange(16))
    sampler = DistributedSampler(rows, xd.distributed.process_count(), me, shuffle=False)
    loader = xd.data.ShardedLoader(
        DataLoader(rows, batch_size=4, sampler=sampler), mesh, [Shard(0), Replicate()]
    )
    assert len(loader) == 2
    numbers = [target.cpu() for _, target in loader]
    assert sorted(torch.cat(numbers).tolist()) == list(range(16))
    assert numbers[0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]

    refuses(
        xd.PlacementError,
        "doesn't divide by its 4 devices",
        lambda: xd.data.shard_batch(torch.ones(6, 2), mesh, [Shard(0), Shard(0)]),
    )
    refuses(xd.MeshError, "a mesh has to have all of them", lambda: xd.DeviceMesh("xla", [0, 1]))
    across = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("in", "out"))["out", "in"]
    refuses(
        xd.PlacementError,
        "next to each other",
        lambda: xd.data.shard_batch(torch.ones(8, 2), across, [Shard(0), Shard(0)]),
    )


def random_numbers(mesh: xd.DeviceMesh) -> None:
    """Of the seed and the position alone; a fresh seed is one for all."""
    torch.manual_seed(3)
    x = torch.distributed.tensor.randn((8, 8), device_mesh=mesh, placements=[Shard(0), Shard(1)])
    torch.manual_seed(3)
    assert torch.equal(x.cpu(), torch.randn(8, 8, device="xla").cpu())
    torch.xla.seed()
    y = torch.distributed.tensor.rand((8,), device_mesh=mesh, placements=[Shard(0), Shard(0)])
    seeds: list[int | None] = [None, None]
    dist.all_gather_object(seeds, torch.xla.initial_seed())
    assert seeds[0] == seeds[1] and 0 <= y.sum().item() <= 8


def processes(me: int) -> None:
    """torch.distributed's questions are about processes."""
    assert (dist.get_rank(), dist.get_world_size()) == (me, 2)
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, {"rank": me})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    told = [me, "x"]
    dist.broadcast_object_list(told, src=1)
    assert told == [1, "x"]
    dist.barrier()
    refuses(xd.UnsupportedOpError, "several devices", lambda: dist.all_reduce(torch.ones(2).xla()))


def saved(mesh: xd.DeviceMesh) -> None:
    full = torch.arange(20.0).reshape(5, 4)
    x = distribute_tensor(full, mesh, [Shard(0), Shard(1)])
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)["x"]
    assert back.placements == x.placements and torch.equal(back.cpu(), full)
    seen = []
    x.requires_grad_().register_hook(lambda grad: seen.append(grad.full_tensor().cpu()))
    (x * x).sum().backward()
    assert torch.equal(seen[0], 2 * full)
    assert "aten" in str(xd.explain(torch.matmul, x.detach(), x.detach().t()))


def own_and_shared(mesh: xd.DeviceMesh, me: int) -> None:
    """A tensor of the process's own, next to tensors of all: it has to be the same in all."""
    x = distribute_tensor(torch.ones(8), mesh, [Shard(0), Replicate()])
    assert (x * torch.full((8,), 2.0, device="xla")).tolist() == [2] * 8
    local = torch.full((8,), float(me), device="xla") + 1  # nobody else needs to know
    assert local.tolist() == [me + 1] * 8
    same = "has to be the same in all processes"
    refuses(xd.DivergenceError, same, lambda: x * local)
    assert (x * torch.full((8,), 3.0)).tolist() == [3] * 8  # of the CPU
    refuses(xd.DivergenceError, same, lambda: x * torch.full((8,), float(me)))
    step = xd.compile(lambda x, y: x + y)
    assert step(x, torch.arange(8.0)).tolist() == list(range(1, 9))
    refuses(xd.DivergenceError, same, lambda: step(x, torch.arange(8.0) * me))
    refuses(xd.DivergenceError, same, lambda: step(x, local))
    assert step(x, torch.arange(8.0)).tolist() == list(range(1, 9))


def refuses(kind, text, call) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} with {text!r}")


def main() -> None:
    dist.init_process_group("xla")
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    me = xd.distributed.process_index()
    assert xd.distributed.process_count() == xd.distributed.initialize() == 2
    reads(mesh)
    shapes_by_values(mesh)
    looked_at(mesh)
    own_values(mesh, me)
    process_local(mesh, me)
    random_numbers(mesh)
    processes(me)
    saved(mesh)
    own_and_shared(mesh, me)
    print("all of it")


if __name__ == "__main__":
    main()
