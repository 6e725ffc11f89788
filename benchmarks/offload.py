"""What a training step needs of the memory of a TPU chip, and of its host, with parameters and
optimizer state on the chips and off them: `python benchmarks/offload.py` (libtpu, and no TPU)."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import xla_dtensor as xd
from xla_dtensor.planning import Report

PLACES = {
    "on the chips": (False, False),
    "`xd.parallel.offload_state(optimizer)`": (False, True),
    "`CPUOffloadPolicy`": (True, False),
}


def report(topology: str, parameters: bool, state: bool, width: int, blocks: int) -> Report:
    with xd.abstract(topology) as there:
        mesh = xd.init_device_mesh("xla", (len(there.topology.devices),), mesh_dim_names=("dp",))
        layers = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        ]
        options = {"offload_policy": CPUOffloadPolicy()} if parameters else {}
        for layer in layers:
            xd.fully_shard(layer, mesh=mesh, **options)
        model = xd.fully_shard(nn.Sequential(*layers), mesh=mesh, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        if state:
            xd.parallel.offload_state(optimizer)
        x = xd.distribute_tensor(torch.randn(64, width), mesh, [xd.Shard(0)])

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return xd.plan(step, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()
    mib = lambda count: f"{count / 2**20:.2f} MiB"
    print("| | HBM: arguments | temporaries | needed | host | collectives |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, (parameters, state) in PLACES.items():
        found = report(options.topology, parameters, state, options.width, options.blocks)
        memory = found.memory
        count = sum(row.count for row in found.collectives)
        cells = map(mib, (memory.arguments, memory.temporaries, memory.needed, memory.host))
        print(f"| {name} | {' | '.join(cells)} | {mib(found.collective_bytes)} in {count} |")


if __name__ == "__main__":
    main()
