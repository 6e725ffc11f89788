"""A training that keeps its state in the memory of its hosts:
``python -m tests.checkpoint.programs.in_memory FOLDER FROM TO``.

It has to begin after step FROM, with what CPU torch has by then, and goes on to step TO; or, where
FROM is "nothing", to find that there is nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import torch
from torch import nn

import xla_dtensor as xd


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 3))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def batch(number: int) -> torch.Tensor:
    return torch.randn(24, 5, generator=torch.Generator().manual_seed(number))


def check(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """See that the state is CPU torch's after so many steps."""
    wanted = model_of()
    its_optimizer = optimizer_of(wanted)
    for i in range(steps):
        step(wanted, its_optimizer, batch(i))
    for (name, own), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor().cpu(), theirs.data, msg=name)
        state, wanted_state = optimizer.state[own], its_optimizer.state[theirs]
        assert state.keys() == wanted_state.keys(), name
        for key, value in wanted_state.items():
            found = state[key]
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(found.cpu(), value, msg=f"{name} {key}")


def main(folder: Path, begin: str, end: int) -> None:
    xd.distributed.initialize()
    mesh = xd.init_device_mesh("xla", (len(jax.devices()),), mesh_dim_names=("dp",))
    model = model_of().to("xla")
    xd.fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)
    objects = {"model": model, "optimizer": optimizer}
    with xd.checkpoint.CheckpointManager(
        folder, objects, every=4, in_memory_every=1, asynchronous=False
    ) as manager:
        done = manager.restore()
        assert done == (0 if begin == "nothing" else int(begin)), done
        check(model, optimizer, done)
        for i in range(done, end):
            step(model, optimizer, xd.distribute_tensor(batch(i), mesh, [xd.Shard(0)]))
            manager.after_step(i + 1)
        check(model, optimizer, end)
    print(f"began after {done}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
