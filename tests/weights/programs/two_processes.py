"""Weights of eight devices, four of each process, in the layouts of another mesh of these."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.weights import Fused

train, sample = xd.init_device_mesh("xla", (8,)), xd.init_device_mesh("xla", (2, 4))
torch.manual_seed(0)
q, k = torch.randn(8, 8), torch.randn(4, 8)
state = {"q": distribute_tensor(q, train, [Shard(0)]), "k": distribute_tensor(k, train, [Shard(1)])}
names = {"qk": Fused(("q", "k"), groups=2)}
placements = [Shard(0), Shard(1)]
for _ in range(2):
    found = xd.transfer(state, sample, placements, names=names, check=True)
    wanted = torch.cat([q[:4], k[:2], q[4:], k[2:]])
    assert torch.equal(found["qk"].full_tensor().cpu(), wanted)
    target = {"qk": distribute_tensor(torch.zeros(12, 8), sample, [Replicate(), Shard(0)])}
    xd.transfer(state, target, names=names, check=True)
    assert torch.equal(target["qk"].full_tensor().cpu(), wanted)
    q, k = q * 2, k * 2
    for tensor in state.values():
        tensor.mul_(2)
try:
    xd.transfer(state, sample, limit=100)
except ValueError as error:
    assert "several processes" in str(error)
else:
    raise AssertionError("it took a limit")
print("transferred")
