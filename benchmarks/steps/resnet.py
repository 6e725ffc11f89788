"""A residual network for small images, data parallel, statistics over the whole batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jax.sharding import PartitionSpec as P
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from steps import jax_resnet
from steps.case import Batch, Case
from steps.jax_training import SGD

WIDTHS = (16, 32, 64)  # of each stage, two blocks each, as the networks for CIFAR-10 have them
BLOCKS = 2
CLASSES = 10
BATCH, SIZE = 64, 32
LR = 0.005


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = None
        if stride > 1 or width_in != width:
            self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False)
            self.shortcut_bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        skipped = x if self.shortcut is None else self.shortcut_bn(self.shortcut(x))
        return F.relu(y + skipped)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTHS[0])
        self.blocks = nn.ModuleList()
        width_in = WIDTHS[0]
        for stage, width in enumerate(WIDTHS):
            for block in range(BLOCKS):
                stride = 2 if stage and not block else 1
                self.blocks.append(Block(width_in, width, stride))
                width_in = width
        self.output = nn.Linear(width_in, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        for block in self.blocks:
            x = block(x)
        return self.output(x.mean((2, 3)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return ResNet()


def make_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(BATCH, 3, SIZE, SIZE, generator=generator),
            torch.randint(CLASSES, (BATCH,), generator=generator),
        )
        for _ in range(count)
    ]


def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def shard_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Data parallel: all of it on every device."""
    distribute_module(model, mesh)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, distribute_tensor(buffer, mesh, [Replicate()]))
    return model


CASE = Case(
    mesh_shape=(8,),
    mesh_names=("dp",),
    make_model=make_model,
    make_batches=make_batches,
    loss=loss,
    shard_model=shard_model,
    shard_batch=lambda tensor, mesh: distribute_tensor(tensor, mesh, [Shard(0)]),
    make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
    jax_loss=jax_resnet.make_loss(WIDTHS, BLOCKS),
    jax_optimizer=SGD(LR),
    param_spec=lambda name: P(),
    batch_spec=P("dp"),
    max_norm=None,
)
