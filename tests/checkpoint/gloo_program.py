"""A torch DTensor program of four gloo processes, without xla_dtensor: ``torchrun -m`` it with the
folder of a checkpoint to load, and one to save to."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

SHAPES = {"even": (8, 12), "uneven": (10, 7), "small": (3, 2), "line": (9,), "none": (0, 4)}

GLOO_LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(-1),)),
    "both": ((2, 2), (Shard(0), Shard(-1))),
    "one dim twice": ((2, 2), (Shard(0), Shard(0))),
    "strided": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "replicated": ((2, 2), (Replicate(), Shard(0))),
}


def values() -> dict[str, torch.Tensor]:
    """What both sides save."""
    generator = torch.Generator().manual_seed(5)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    found["half"] = torch.randn(6, 6, generator=generator).bfloat16()
    found["numbers"] = torch.randint(2**60, (5, 4), generator=generator)
    found["truths"] = torch.rand(7, 3, generator=generator) > 0.5
    return found


def placed(placements: tuple[Placement, ...], ndim: int) -> list[Placement]:
    """``Shard(-1)`` by number; torch wants that."""
    return [Shard(ndim - 1) if p == Shard(-1) else p for p in placements]


def layouts_of(name: str) -> list[str]:
    """torch cuts nothing uneven by ``_StridedShard``."""
    return [layout for layout in GLOO_LAYOUTS if layout != "strided" or name == "even"]


def state(meshes: dict[Any, DeviceMesh], fill: bool) -> dict[str, Any]:
    """Every value in every layout, the values themselves, and what is no tensor."""
    result: dict[str, Any] = {"step": 7 if fill else 0, "plain": {}, "names": ["a", 1, None]}
    for name, value in values().items():
        value = value if fill else torch.zeros_like(value)
        result["plain"][name] = value.clone()
        for layout, (shape, placements) in GLOO_LAYOUTS.items():
            if layout not in layouts_of(name):
                continue
            where = placed(placements, value.ndim)
            if layout == "strided":  # as many pieces as the mesh dim to its right has
                factor = meshes[shape].size(1)
                where[0] = _StridedShard(0, split_factor=factor) if factor > 1 else Shard(0)
            result.setdefault(layout, {})[name] = distribute_tensor(value, meshes[shape], where)
    return result


def main(source: str, target: str) -> None:
    dist.init_process_group("gloo")
    meshes: dict[Any, DeviceMesh] = {
        (4,): init_device_mesh("cpu", (4,)),
        (2, 2): init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")),
    }
    loaded = state(meshes, False)
    dcp.load(loaded, checkpoint_id=source)
    assert loaded["step"] == 7 and loaded["names"] == ["a", 1, None]
    for name, value in values().items():
        assert torch.equal(loaded["plain"][name], value), name
        for layout in layouts_of(name):
            found = loaded[layout][name].full_tensor()
            assert found.dtype == value.dtype and torch.equal(found, value), (layout, name)
    dcp.save(state(meshes, True), checkpoint_id=target)
    dist.destroy_process_group()
    print("both ways")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
