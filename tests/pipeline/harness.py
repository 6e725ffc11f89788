"""A model of blocks, as stages of a pipeline and whole on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd

DIM = 8


class Block(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def parts(count: int) -> list[nn.Module]:
    """The modules of ``count`` stages."""
    torch.manual_seed(7)
    return [Block() for _ in range(count)]


def mesh_of(*shape: int, names: tuple[str, ...] = ("pp", "dp", "tp")) -> DeviceMesh:
    return xd.init_device_mesh("xla", shape, mesh_dim_names=names[: len(shape)])


def where(style: str, count: int, meshes: list[DeviceMesh]) -> list[DeviceMesh]:
    """The mesh of each stage: round and round, or up and down."""
    n = len(meshes)
    if style == "v":
        up_and_down = [*range(n), *reversed(range(n))]
        return [meshes[up_and_down[i % (2 * n)]] for i in range(count)]
    return [meshes[i % n] for i in range(count)]


def stages_of(
    modules: list[nn.Module],
    meshes: list[DeviceMesh],
    lay_out: Callable[[nn.Module, DeviceMesh], nn.Module] = xd.distribute_module,
    **options: Any,
) -> list[xd.pipeline.PipelineStage]:
    """Copies of the modules as stages, each laid out on its mesh."""
    return [
        xd.pipeline.PipelineStage(lay_out(copy.deepcopy(m), on), i, len(modules), on, **options)
        for i, (m, on) in enumerate(zip(modules, meshes, strict=True))
    ]


def whole(value: torch.Tensor) -> torch.Tensor:
    """On the CPU."""
    value = value.detach()
    return (value.full_tensor() if isinstance(value, xd.XLAShardedTensor) else value).cpu()


def parameters(stages: list[xd.pipeline.PipelineStage]) -> list[nn.Parameter]:
    return [p for stage in stages for p in stage.submod.parameters()]


def assert_gradients(
    stages: list[xd.pipeline.PipelineStage], expected: list[nn.Module], **tolerance: float
) -> None:
    """The stages' gradients are those of the modules on the CPU."""
    for stage, module in zip(stages, expected, strict=True):
        wanted = dict(module.named_parameters())
        for name, parameter in stage.submod.named_parameters():
            found = parameter.grad
            assert found is not None, f"stage {stage.stage_index}: {name} has no gradient"
            torch.testing.assert_close(
                whole(found),
                wanted[name].grad,
                msg=lambda text, at=f"stage {stage.stage_index} {name}": f"{at}: {text}",
                **(tolerance or {"atol": 1e-6, "rtol": 1e-5}),
            )
