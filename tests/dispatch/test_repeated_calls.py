"""What is done a second time traces and compiles nothing, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import xla_dtensor as xd


@pytest.fixture
def events() -> Iterator[list[str]]:
    """JAX's events of tracing, lowering and compiling, as they happen."""
    found: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **kw: found.append(event) if "compile" in event else None
    )
    yield found
    jax.monitoring.clear_event_listeners()


def unreduced(mesh: DeviceMesh) -> torch.Tensor:
    values = [torch.full((3, 5), float(i)) for i in range(8)]
    return DTensor.from_local(xd.from_device_values(values, mesh), mesh, [Partial(), Partial()])


def other_mesh() -> DeviceMesh:
    return xd.init_device_mesh("xla", (2,), mesh_dim_names=("other",))


CALLS: dict[str, tuple[Callable[[DeviceMesh], Any], Callable[[Any, DeviceMesh], torch.Tensor]]] = {
    "cpu of an unreduced tensor": (unreduced, lambda x, mesh: x.cpu()),
    "local_shards of one": (unreduced, lambda x, mesh: x.local_shards[0].data),
    "distribute_tensor of an XLATensor": (
        lambda mesh: torch.full((5, 3), 28.0).to("xla"),
        lambda x, mesh: distribute_tensor(x, mesh, [Shard(0), Shard(1)]).cpu(),
    ),
    "distribute_tensor of one on the mesh": (
        lambda mesh: distribute_tensor(torch.full((5, 3), 28.0), mesh).full_tensor(),
        lambda x, mesh: distribute_tensor(x, mesh, [Shard(0), Shard(1)]).cpu(),
    ),
    "to other devices": (
        lambda mesh: distribute_tensor(torch.full((5, 3), 28.0), mesh, [Shard(0), Replicate()]),
        lambda x, mesh: x.redistribute(other_mesh(), [Shard(0)]).cpu(),
    ),
    "reduced": (unreduced, lambda x, mesh: x.reduce_partial().cpu()),
    "full_tensor": (unreduced, lambda x, mesh: x.full_tensor().cpu()),
    "to_local": (unreduced, lambda x, mesh: x.to_local().local_values()[7] * 4),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_the_second_time(mesh_2x4: DeviceMesh, events: list[str], name: str) -> None:
    make, call = CALLS[name]
    first = call(make(mesh_2x4), mesh_2x4)
    assert torch.equal(first, torch.full_like(first, 28.0))
    again = make(mesh_2x4)
    events.clear()
    assert torch.equal(call(again, mesh_2x4), first)
    assert events == []
