"""One device per process: scripts with torch's DistributedDataParallel and fully_shard, of which
each process has its own rows; what is expected is CPU torch on all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import xla_dtensor as xd

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer):
    def step(rows: torch.Tensor) -> torch.Tensor:
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    found = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    found[0].load_state_dict(found[1].state_dict())
    return found[0].to("xla"), found[1]


def main() -> None:
    dist.init_process_group("xla")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = xd.init_device_mesh("xla", (size,), mesh_dim_names=("dp",))
    own = ROWS[rank::size]
    for wrap in (
        lambda module: DistributedDataParallel(module, device_mesh=mesh),
        lambda module: fully_shard(module, mesh=mesh),
    ):
        for compiled in (False, True):
            module, expected = models()
            model = wrap(module)
            step = step_of(model, torch.optim.AdamW(model.parameters(), lr=0.1))
            reference = step_of(expected, torch.optim.AdamW(expected.parameters(), lr=0.1))
            if compiled:
                step = xd.compile(step)
            for _ in range(3):
                step(xd.from_device_values([own], mesh) if compiled else own.to("xla"))
                reference(ROWS)
            weight = module[0].weight.detach()
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            torch.testing.assert_close(weight.cpu(), expected[0].weight.detach())
    try:
        step(own.to("xla"))
    except xd.DivergenceError as error:
        assert "from_device_values" in str(error)
    else:
        raise AssertionError("rows that differ were taken for the same")
    print("all of it")


if __name__ == "__main__":
    main()
