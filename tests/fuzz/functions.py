"""What lines of programs call besides torch's own: one function for CPU torch and for xla tensors.

A per-device tensor is, on the CPU, all devices' values stacked: the mesh's dims come first. So what
lines do to them counts dims from the end. ``mesh`` is the mesh's shape there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import xla_dtensor as xd
from tests.fuzz import layouts_text


def redistribute(x, placements):
    return x.redistribute(placements=placements) if isinstance(x, DTensor) else x.clone()


def to_local(x, placements, grads, mesh):
    if isinstance(mesh, DeviceMesh):
        return x.redistribute(placements=placements).to_local(grad_placements=grads)
    for i, (placement, n) in enumerate(zip(placements, mesh, strict=True)):
        if placement.is_replicate():
            x = x.unsqueeze(i).expand(*x.shape[:i], n, *x.shape[i:])
        else:
            dim = i + placement.dim
            x = x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, i)
    return x


def from_local(x, placements, mesh):
    if isinstance(mesh, DeviceMesh):
        return DTensor.from_local(x, mesh, placements)
    for i, placement in reversed(list(enumerate(placements))):
        if placement.is_replicate():
            x = x.select(i, 0)
        elif placement.is_partial():
            x = x.sum(i) if placement.reduce_op == "sum" else x.mean(i)
        else:
            dim = i + placement.dim
            x = x.movedim(i, dim).flatten(dim, dim + 1)
    return x


def all_reduce(x, op, mesh, axis):
    if isinstance(mesh, DeviceMesh):
        return xd.collectives.all_reduce(x, (mesh, axis), op)
    reduced = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}[op]
    return reduced(x, axis, keepdim=True).expand_as(x)


def all_gather(x, dim, mesh, axis):
    if isinstance(mesh, DeviceMesh):
        return xd.collectives.all_gather(x, (mesh, axis), dim)
    dim += len(mesh)
    gathered = x.movedim(axis, dim - 1).flatten(dim - 1, dim).unsqueeze(axis)
    return gathered.expand(*gathered.shape[:axis], mesh[axis], *gathered.shape[axis + 1 :])


def reduce_scatter(x, dim, mesh, axis):
    if isinstance(mesh, DeviceMesh):
        return xd.collectives.reduce_scatter(x, (mesh, axis), dim)
    dim += len(mesh) - 1
    total = x.sum(axis)
    return total.unflatten(dim, (mesh[axis], total.shape[dim] // mesh[axis])).movedim(dim, axis)


def all_to_all(x, mesh, axis):
    if isinstance(mesh, DeviceMesh):
        return xd.collectives.all_to_all(x, (mesh, axis))
    dim, n = len(mesh), mesh[axis]
    return x.unflatten(dim, (n, x.shape[dim] // n)).transpose(axis, dim).flatten(dim, dim + 1)


def broadcast(x, source, mesh, axis):
    if isinstance(mesh, DeviceMesh):
        return xd.collectives.broadcast(x, (mesh, axis), source)
    return x.narrow(axis, source, 1).expand_as(x)


def permute(x, order, mesh, axis):
    if isinstance(mesh, DeviceMesh):
        return xd.collectives.permute(x, (mesh, axis), order)
    return x.index_select(axis, torch.tensor(order).argsort())


def axis_index(mesh, axis):
    if isinstance(mesh, DeviceMesh):
        return xd.collectives.axis_index(mesh, axis)
    shape = [n if i == axis else 1 for i, n in enumerate(mesh)]
    return torch.arange(mesh[axis]).reshape(shape)


def of_devices(x, local_dims):
    """A number for each device, to be combined with local tensors of so many dims."""
    return x.reshape(*x.shape, *[1] * local_dims)


# Random numbers: CPU torch's are others, so it is given those of the devices.


class Draws:
    """The random numbers of a program, in the order in which it draws them.

    Attributes:
        values: what CPU torch takes.
        record: what a run on a mesh has drawn, if somebody wants it.
    """

    def __init__(self) -> None:
        self.values: list[torch.Tensor] | None = None
        self.record: list[torch.Tensor] | None = None
        self.taken = 0

    def start(self, values: list[torch.Tensor] | None) -> None:
        self.values, self.taken = values, 0

    def take(self, made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The next ones: those of the devices, or for drawing a program others like them."""
        self.taken += 1
        values = made if self.values is None else self.values[self.taken - 1]
        return torch.empty_like(like.detach()).copy_(values)  # with its strides

    def noted(self, value: Any) -> Any:
        if self.record is not None:
            self.record.append(value.detach().cpu())
        return value


DRAWS = Draws()


def rand(x):
    if isinstance(x, DTensor):
        return DRAWS.noted(torch.rand_like(x))
    return DRAWS.take(torch.linspace(0.01, 0.97, x.numel()).reshape(x.shape), x)


def randn(x):
    if isinstance(x, DTensor):
        return DRAWS.noted(torch.randn_like(x))
    return DRAWS.take(torch.linspace(-1.9, 2.1, x.numel()).reshape(x.shape), x)


def bernoulli(x):
    """0 or 1, by the probabilities that the sigmoid of ``x`` gives."""
    if isinstance(x, DTensor):
        return DRAWS.noted(torch.bernoulli(x.detach().sigmoid()))
    return DRAWS.take((torch.arange(x.numel()) % 2).reshape(x.shape), x)


def uniform_(x):
    if isinstance(x, DTensor):
        return DRAWS.noted(x.uniform_(-1, 1))
    return x.copy_(DRAWS.take(torch.linspace(-0.9, 0.95, x.numel()).reshape(x.shape), x))


def dropout(x, p):
    """Of ``x`` without zeros."""
    if isinstance(x, DTensor):
        y = F.dropout(x, p)
        if DRAWS.record is not None:
            DRAWS.record.append((y.detach().cpu() != 0) / (1 - p))
        return y
    return x * DRAWS.take((torch.arange(x.numel()) % 2).reshape(x.shape) / (1 - p), x)


RANDOM = (rand, randn, bernoulli, uniform_, dropout)
FUNCTIONS = (redistribute, to_local, from_local, all_reduce, all_gather, reduce_scatter, all_to_all)
FUNCTIONS += (broadcast, permute, axis_index, of_devices, *RANDOM)
NAMES: dict[str, Any] = {"torch": torch, "F": F, **layouts_text.SCOPE}
NAMES |= {function.__name__: function for function in FUNCTIONS}
