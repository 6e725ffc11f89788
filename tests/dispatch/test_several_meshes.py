"""Lists of tensors on meshes that cut up the same devices in different ways."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.errors import MeshMismatchError

R, S = Replicate(), Shard


def _meshes() -> tuple[xd.DeviceMesh, xd.DeviceMesh]:
    """Devices as ("dp", "tp") and, where experts are, as ("rest", "ep"), of which "ep" has devices
    along both."""
    world = xd.init_device_mesh("xla", (8,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (2, 2, 2), ("a", "dp", "tp"))["dp", "tp"]
    return dense, world._unflatten(0, (2, 4), ("rest", "ep"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_one_optimizer(how: str, compiled: bool) -> None:
    dense, sparse = _meshes()
    values = [torch.randn(8, 4), torch.randn(8, 3), torch.randn(5)]
    theirs = [torch.nn.Parameter(v.clone()) for v in values]
    ours = [
        torch.nn.Parameter(distribute_tensor(values[0], dense, [S(0), R])),
        torch.nn.Parameter(distribute_tensor(values[1], sparse, [R, S(0)])),
        torch.nn.Parameter(distribute_tensor(values[2], dense, [R, S(0)])),
    ]
    optimizers = [
        torch.optim.AdamW(theirs, lr=0.1),
        torch.optim.AdamW(ours, lr=0.1, **{how: True}),
    ]

    def step(parameters, optimizer, scale) -> None:
        for p in parameters:
            (p * p * scale).sum().backward()
        torch._foreach_mul_([p.grad for p in parameters], 0.5)
        optimizer.step()
        optimizer.zero_grad()

    on_mesh = xd.compile(step) if compiled else step
    for i in range(3):
        step(theirs, optimizers[0], 1.0 + i)
        on_mesh(ours, optimizers[1], 1.0 + i)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.full_tensor().detach().cpu(), q.detach())
    assert ours[1].device_mesh == sparse


def test_elements_on_two_meshes_dont_meet() -> None:
    dense, sparse = _meshes()
    x = distribute_tensor(torch.randn(8, 4), dense, [S(0), S(1)])
    y = distribute_tensor(torch.randn(8, 4), sparse, [R, S(0)])
    with pytest.raises(MeshMismatchError, match="redistribute"):
        torch._foreach_add([x], [y])
