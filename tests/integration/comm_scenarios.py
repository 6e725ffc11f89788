"""What `test_debug_modes.py` counts collectives of, on xla devices and under torch.

python -m tests.integration.comm_scenarios   # torch's counts, as JSON, by a fake process group
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

Counts = dict[str, int]


def _moves(line: DeviceMesh, grid: DeviceMesh) -> Iterator[tuple[str, Callable[[], Any]]]:
    placements = {"r": Replicate(), "s0": Shard(0), "s1": Shard(1)}
    for source, before in placements.items():
        for target, after in placements.items():
            x = distribute_tensor(torch.ones(16, 8), line, [before])
            yield f"{source}-{target}", lambda x=x, p=after: x.redistribute(placements=[p])
            y = distribute_tensor(torch.ones(16, 8), grid, [before, Shard(0)])
            if before != Shard(0) and after != Shard(0):
                yield (
                    f"{source}.s0-{target}.r",
                    lambda y=y, p=after: y.redistribute(placements=[p, Replicate()]),
                )
    pending = distribute_tensor(torch.ones(16, 8, 8), line, [Shard(0)]).sum(0)
    for target, after in list(placements.items()):
        yield f"p-{target}", lambda p=after: pending.redistribute(placements=[p])
    yield "full", lambda: pending.full_tensor()


def _operations(line: DeviceMesh, grid: DeviceMesh) -> Iterator[tuple[str, Callable[[], Any]]]:
    x = distribute_tensor(torch.ones(16, 8), line, [Shard(1)])
    w = distribute_tensor(torch.ones(8, 16), line, [Shard(0)])
    other = distribute_tensor(torch.ones(16, 8), line, [Shard(0)])
    yield "mm", lambda: x @ w
    yield "mm.full", lambda: (x @ w).full_tensor()
    yield "mm.bias", lambda: (x @ w).redistribute(placements=[Shard(0)])
    yield "add", lambda: x + other
    yield "add.same", lambda: x + x
    yield "softmax", lambda: torch.softmax(x, 1)
    yield "relu.sum", lambda: x.relu().sum().full_tensor()


def _modules(line: DeviceMesh, grid: DeviceMesh) -> Iterator[tuple[str, Callable[[], Any]]]:
    device = line.device_type

    def mlp() -> nn.Module:
        made = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(device)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(made, line, plan)

    inputs = torch.ones(4, 8).to(device).requires_grad_()
    model = mlp()
    yield "mlp.forward", lambda: model(inputs)
    yield "mlp", lambda: model(inputs).sum().backward()

    def sequence() -> nn.Module:
        made = nn.Sequential(
            nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        ).to(device)
        plan: dict[str, Any] = {
            "0": SequenceParallel(),
            "1": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "1.0": ColwiseParallel(),
            "1.2": RowwiseParallel(output_layouts=Shard(1)),
        }
        return parallelize_module(made, line, plan)

    long = torch.ones(2, 16, 8).to(device)
    part = DTensor.from_local(long, line, [Shard(1)]).requires_grad_()
    block = sequence()
    yield "sequence.forward", lambda: block(part)


def _locals(line: DeviceMesh, grid: DeviceMesh) -> Iterator[tuple[str, Callable[[], Any]]]:
    x = torch.ones(16, 8).to(line.device_type)

    def several() -> None:
        funcol.all_reduce(x, "sum", line)
        funcol.all_reduce(x, "max", (grid, 1))
        funcol.all_gather_tensor(x, 0, line)
        funcol.reduce_scatter_tensor(x, "sum", 0, line)
        funcol.all_to_all_single(x, None, None, line)
        funcol.broadcast(x, 0, line)

    yield "locals", several


def counts(device: str) -> dict[str, Counts]:
    """Per scenario how often each collective is counted."""
    line = init_device_mesh(device, (8,), mesh_dim_names=("x",))
    grid = init_device_mesh(device, (2, 4), mesh_dim_names=("dp", "tp"))
    found = {}
    for group in (_moves, _operations, _modules, _locals):
        for name, run in group(line, grid):
            with CommDebugMode() as mode:
                run()
            own = {str(packet): n for packet, n in mode.get_comm_counts().items() if n}
            assert sum(own.values()) == mode.get_total_counts()
            found[name] = own
    return found


if __name__ == "__main__":
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    print(json.dumps(counts("cpu")))
