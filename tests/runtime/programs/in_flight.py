"""Values of process 0 are distributed while programs with collectives of the same size run.

python -m tests.runtime.programs.in_flight         # this package: each value is the right one
python -m tests.runtime.programs.in_flight jax     # plain JAX: how many values were others
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

import xla_dtensor as xd
from xla_dtensor.execution import lazy

ROUNDS = 40
WORDS = 1024  # of what is distributed, and of each device's part of a sum


def ours() -> int:
    """The values that are wrong."""
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    wrong = 0
    parts = [
        xd.distribute_tensor(torch.full((2, 4 * WORDS), float(i)), mesh, [xd.Shard(0), xd.Shard(1)])
        for i in range(3)
    ]
    for i in range(ROUNDS):
        sums = [
            part.sum(0).redistribute(placements=[xd.Replicate(), xd.Shard(0)]) for part in parts
        ]
        lazy.flush_all()
        mine = i if xd.distributed.process_index() == 0 else -1
        sent = xd.distribute_tensor(torch.full((WORDS,), float(mine)), mesh, [xd.Replicate()] * 2)
        wrong += not bool((sent.full_tensor().cpu() == i).all())
        for j, total in enumerate(sums):
            wrong += not bool((total.full_tensor().cpu() == 2 * j).all())
    return wrong


def by_jax_alone() -> int:
    """The same with a program on one device of each process, as JAX lets one write it."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    xd.init_device_mesh("xla", (8,))  # the processes meet
    devices = np.array(jax.devices()).reshape(2, 4)
    every, some = Mesh(devices, ("dp", "tp")), Mesh(devices[:, 0], ("dp",))

    def made(mesh: Any, value: float, *spec: Any) -> Any:
        shape = (2, WORDS * (4 if len(spec) == 2 else 1))
        own = NamedSharding(mesh, PartitionSpec(*spec))
        piece = np.full((1, WORDS), value, np.float32)
        return jax.make_array_from_callback(shape, own, lambda _: piece)

    add = lambda x: x.sum(0)
    on_every = jax.jit(add, out_shardings=NamedSharding(every, PartitionSpec("tp")))
    on_some = jax.jit(add, out_shardings=NamedSharding(some, PartitionSpec()))
    parts = [made(every, float(i), "dp", "tp") for i in range(3)]
    wrong = 0
    for i in range(ROUNDS):
        sums = [on_every(part) for part in parts]
        sent = on_some(made(some, float(i), "dp"))
        for expected, found in ((i, sent), *enumerate(sums)):
            shards = found.addressable_shards
            wrong += any((np.asarray(s.data) != 2 * expected).any() for s in shards)
    return wrong


if __name__ == "__main__":
    print("wrong", by_jax_alone() if sys.argv[1:] == ["jax"] else ours())
