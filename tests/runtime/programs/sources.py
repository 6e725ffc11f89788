"""Values that differ from process to process, and models that each process makes from a seed of its
own: what each device has of them afterwards.

    python -m tests.runtime.programs.sources DIR cpu COUNT    # torch: a rank per device, gloo
    python -m tests.runtime.programs.sources DIR xla COUNT    # the four devices in COUNT processes

In the first form a rank has what the process of its device has in the second.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

DEVICES = 4
PLACEMENTS = {
    "replicated": (Replicate(), Replicate()),
    "rows": (Shard(0), Replicate()),
    "columns": (Replicate(), Shard(1)),
    "both": (Shard(0), Shard(1)),
    "nested": (Shard(0), Shard(0)),
    "partial": (Partial(), Shard(0)),
}
REFUSED = "DivergenceError"
Entry = Any  # by device what it has, or REFUSED


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.randn(4))
        self.steps = nn.Parameter(torch.randint(9, (8,)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) * self.scale


def models(mesh: Any, line: Any, device: str) -> dict[str, Callable[[Model], nn.Module]]:
    wrapped = {} if device == "cpu" else {"device_mesh": line}
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return {
        "distribute_module": lambda model: distribute_module(model, mesh),
        "parallelize_module": lambda model: parallelize_module(model, line, plan),
        "fully_shard": lambda model: fully_shard(model, mesh=line),
        "data parallel": lambda model: DistributedDataParallel(model, **wrapped).module,
    }


def cases(device: str, own: int) -> Iterator[tuple[str, Callable[[], dict[str, torch.Tensor]]]]:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("a", "b"))
    line = mesh._flatten("line") if device == "xla" else init_device_mesh(device, (DEVICES,))
    made = {
        "floats": lambda g: torch.randn(6, 5, generator=g),
        "halves": lambda g: torch.randn(8, 4, generator=g).bfloat16(),
        "flags": lambda g: torch.rand(3, 7, generator=g) > 0.5,
        "complex": lambda g: torch.randn(2, 4, 2, generator=g).select(2, 0) * (1 + 2j),
    }
    for kind, layout, source in itertools.product(made, PLACEMENTS, (0, 1, None)):
        if layout == "partial" and kind in ("flags", "halves"):
            continue  # a sum of flags isn't one, and torch divides by the number of parts
        value = made[kind](torch.Generator().manual_seed(own))
        placements = PLACEMENTS[layout]

        def tensor(
            value: torch.Tensor = value, placements: Any = placements, source: Any = source
        ) -> dict[str, torch.Tensor]:
            made = distribute_tensor(value, mesh, placements, src_data_rank=source)
            reduced = any(isinstance(placement, Partial) for placement in placements)
            return {"": made.full_tensor() if reduced else made}

        yield f"{kind} {layout} {source}", tensor
    for layout, check in itertools.product(("replicated", "rows", "columns", "both"), (None, 1)):
        value = made["floats"](torch.Generator().manual_seed(own))

        def local(
            value: torch.Tensor = value, layout: str = layout, check: Any = check
        ) -> dict[str, torch.Tensor]:
            return {"": DTensor.from_local(value, mesh, PLACEMENTS[layout], run_check=bool(check))}

        yield f"from_local {layout} {check}", local
    for name, change in models(mesh, line, device).items():

        def module(change: Any = change) -> dict[str, torch.Tensor]:
            torch.manual_seed(own)
            model = change(Model())
            return dict(model.named_parameters()) | dict(model.named_buffers())

        yield name, module


def of_devices(tensor: torch.Tensor, device: str, ids: list[int]) -> dict[int, torch.Tensor]:
    """What each of this process's devices has."""
    tensor = tensor.detach()
    if device == "cpu":
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return {ids[0]: local.clone()}
    if isinstance(tensor, DTensor):
        return {shard.device: shard.data.clone() for shard in tensor.local_shards}
    if hasattr(tensor, "local_values"):
        values = tensor.local_values()
        values = values * len(ids) if len(values) == 1 else values
        return {i: value.cpu().clone() for i, value in zip(ids, values, strict=True)}
    return {i: tensor.clone() for i in ids}


def several_pieces(own: int) -> None:
    """More than is sent at once."""
    mesh: Any = init_device_mesh("xla", (2, 2), mesh_dim_names=("a", "b"))
    first = torch.arange(4_500_001, dtype=torch.int32)  # 18 MB
    made = distribute_tensor(first + own, mesh, (Shard(0), Replicate()))
    for shard in made.local_shards:  # type: ignore[attr-defined]
        assert torch.equal(shard.data, first[shard.index])


def main(folder: Path, device: str, count: int) -> None:
    rank = int(os.environ["RANK"])
    refused: Any = ()
    if device == "xla":
        import xla_dtensor

        refused = xla_dtensor.DivergenceError
        each = DEVICES // count
        own, ids = rank, list(range(rank * each, (rank + 1) * each))
        dist.init_process_group("xla")
    else:
        own, ids = rank * count // DEVICES, [rank]
        dist.init_process_group("gloo")
    found: dict[str, Entry] = {}
    for name, case in cases(device, own):
        try:
            tensors = case()
        except refused as error:
            assert "process 0 on " in str(error) and "shape [" in str(error), error
            found[name] = REFUSED
            continue
        found[name] = {key: of_devices(tensor, device, ids) for key, tensor in tensors.items()}
    if device == "xla":
        several_pieces(own)
    torch.save(found, folder / f"{device}.{count}.{rank}.pt")
    print("all of it")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
