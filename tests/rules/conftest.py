from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WORLD = 8


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Many small ops, each on one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def meshes() -> Iterator[dict[tuple[int, ...], DeviceMesh]]:
    """A (2, 4) and an (8,) mesh over a fake process group of one host."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    patch = pytest.MonkeyPatch()
    # Torch's cost model asks how many devices a host has, and finds one CPU. Ours is of one host.
    patch.setattr(torch.cpu, "device_count", lambda: WORLD)
    with warnings.catch_warnings():
        # The fake backend's own set-up warns of what it does not have.
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
        made = {shape: init_device_mesh("cpu", shape) for shape in ((2, 4), (8,))}
    yield made
    dist.destroy_process_group()
    patch.undo()
