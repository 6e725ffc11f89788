"""A small model, its expected gradients from CPU torch, and what a compiled step communicates."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import xla_dtensor as xd

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # torch 2.11, where what ours are asked for has no class yet

    @dataclass
    class DataParallelMeshDims:  # type: ignore[no-redef]
        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError("At least one of shard or replicate must be set")

        shard_names = property(lambda self: _names(self.shard))
        replicate_names = property(lambda self: _names(self.replicate))

    def _names(value: Any) -> tuple[str, ...]:
        return () if value is None else (value,) if isinstance(value, str) else tuple(value)


EPS = 1e-4
"""For Adam and its kin. Their first steps divide a gradient by its own size, so where one is near
zero by chance (of the 4,992 here one is, a millionth of the largest) rounding decides the sign of
the step, and another processor rounds in another way. This is far above what rounding is (4e-10),
and far below what most gradients are (1e-3)."""


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int, out: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Each parameter has a number of elements of its own, also with the blocks' cut in half by
    tensor parallelism, so that the collectives of a compiled step can be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 24, bias=False)
        self.blocks = nn.ModuleList([Block(24, 32, 8), Block(8, 128, 16)])
        self.out = nn.Linear(16, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def reference() -> Model:
    torch.manual_seed(0)
    return Model()


def batches(count: int, seed: int = 1) -> list[torch.Tensor]:
    """A batch for each data-parallel device."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, generator=generator) for _ in range(count)]


def per_device(values: Sequence[torch.Tensor], root: DeviceMesh, dims: Sequence[str]) -> Any:
    """``values``, one for each coordinate along mesh dims ``dims``, as a per-device tensor."""
    names = list(root.mesh_dim_names or ())
    sizes = [root.size(names.index(dim)) for dim in dims]
    of_devices = []
    for coordinate in itertools.product(*map(range, root.shape)):
        index = 0
        for dim, size in zip(dims, sizes, strict=True):
            index = index * size + coordinate[names.index(dim)]
        of_devices.append(values[index])
    return xd.from_device_values(of_devices, root, list(dims))


def averaged_gradients(
    model: nn.Module, inputs: Sequence[torch.Tensor], loss: Callable[..., Any] = loss_of
) -> None:
    """Add to ``.grad`` what data-parallel devices with these inputs would: CPU torch."""
    for x in inputs:
        (loss(model(x)) / len(inputs)).backward()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The logical value on the CPU."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def check_gradients(model: nn.Module, expected: nn.Module, atol: float = 1e-6) -> None:
    pairs = zip(model.named_parameters(), expected.named_parameters(), strict=True)
    for (name, parameter), (wanted_name, wanted) in pairs:
        assert name == wanted_name
        assert parameter.grad is not None, name
        torch.testing.assert_close(full(parameter.grad), wanted.grad, atol=atol, rtol=1e-5)
        if isinstance(parameter, DTensor):
            assert parameter.grad.placements == parameter.placements, name


def check_parameters(model: nn.Module, expected: nn.Module, atol: float = 1e-5) -> None:
    for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(full(parameter), wanted.detach(), atol=atol, rtol=1e-4)


def tensor_parallel(model: Model, tp: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard_blocks(model: Model, **options: Any) -> Model:
    """``fully_shard`` as one uses it: the blocks, then the root."""
    for block in model.blocks:
        xd.fully_shard(block, **options)
    return xd.fully_shard(model, **options)


def sharded(kind: str, **options: Any) -> tuple[Model, DeviceMesh, tuple[str, ...]]:
    """The model under one kind of parallelism, the root mesh, and its data-parallel dims."""
    model = reference()
    if kind == "fsdp":
        root = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        return shard_blocks(model, mesh=root, **options), root, ("dp",)
    if kind == "hsdp":
        root = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("rep", "shard"))
        return shard_blocks(model, mesh=root, **options), root, ("rep", "shard")
    if kind == "fsdp_tp":
        root = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("dp", "tp"))
        model.to("xla")
        tensor_parallel(model, root["tp"])
        return shard_blocks(model, mesh=root["dp"], **options), root, ("dp",)
    assert kind == "hsdp_tp"
    root = xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("rep", "shard", "tp"))
    model.to("xla")
    tensor_parallel(model, root["tp"])
    return shard_blocks(model, mesh=root["rep", "shard"], **options), root, ("rep", "shard")


_COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?\S+ = (?P<type>\S+|\([^)]*\)) "
    r"(?P<op>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(",
    re.MULTILINE,
)
_ARRAY = re.compile(r"\b[a-z]+\d+\[(?P<dims>[\d,]*)\]")


def collectives(step: Any) -> dict[str, Counter[int]]:
    """Per kind of collective of the newest program, how often a result has how many elements.

    XLA merges several all-reduces into one with several results; these are counted apart.
    """
    found: dict[str, Counter[int]] = {}
    for match in _COLLECTIVE.finditer(step.compiled_programs()[-1].as_text()):
        results = found.setdefault(match["op"], Counter())
        for array in _ARRAY.finditer(match["type"]):
            results[math.prod(map(int, filter(None, array["dims"].split(","))))] += 1
    return found


def sizes(model: nn.Module) -> dict[str, int]:
    """The number of elements of each parameter."""
    return {name: parameter.numel() for name, parameter in model.named_parameters()}
