"""Wrote the files beside it, in a checkout of commit 53c542d, before modules were moved:

git worktree add /tmp/before 53c542d
cd /tmp/before && PYTHONPATH=. python WHERE_THIS_IS/write.py WHERE_THIS_IS
"""

import pickle
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

START = torch.arange(24.0).view(4, 6)


def trained(mesh, placements):
    """A model and its optimizer after one step whose gradients are ones."""
    model = torch.nn.Linear(6, 4)
    with torch.no_grad():
        model.weight.copy_(START)
        model.bias.copy_(torch.arange(4.0))
    if mesh is not None:
        for name, where in placements.items():
            placed = distribute_tensor(getattr(model, name).detach(), mesh, where)
            setattr(model, name, torch.nn.Parameter(placed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


PLACEMENTS = {"weight": [Shard(0), Shard(1)], "bias": [Replicate(), Shard(0)]}


def main(folder: Path) -> None:
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    model, optimizer = trained(mesh, PLACEMENTS)
    tensors = {
        "sharded": distribute_tensor(START, mesh, [Shard(0), Shard(1)]),
        "uneven": distribute_tensor(START, mesh, [Replicate(), Shard(1)]),
        "single": START.to("xla").to(torch.bfloat16),
        "parameter": torch.nn.Parameter(distribute_tensor(START, mesh, [Shard(1), Replicate()])),
        "mesh": mesh,
    }
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**tensors, **states}, folder / "state.pt")
    (folder / "tensors.pickle").write_bytes(pickle.dumps(tensors))
    objects = {"model": model, "optimizer": optimizer}
    with xd.checkpoint.CheckpointManager(folder / "managed", objects, every=1) as manager:
        manager.save(7)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
