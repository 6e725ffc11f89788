"""Which tensors share a storage: what decides whether one of them may move to memory of its own."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.dispatch import metadata


def make(mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(torch.ones(4, 2), mesh, [Shard(0), Replicate()])


OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda x: x[1:],
    "a view of a view": lambda x: x.t()[0],
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "what devices hold": lambda x: x.to_local(),
    "several views": lambda x: x.unbind(),
    "a tensor moved here": lambda x: moved_to(torch.empty_like(x), x),
    "from_local": lambda x: DTensor.from_local(x.to_local(), x.device_mesh, x.placements),
    "saved by autograd": lambda x: (torch.ones_like(x).requires_grad_() * x[:]).sum(),
}


def moved_to(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    tensor.data = other
    return tensor


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", list(OTHERS))
def test_growing_while_others_share_the_memory(mesh_2x4: DeviceMesh, name: str) -> None:
    x = make(mesh_2x4)
    other = OTHERS[name](x)
    with pytest.raises(xd.UnsupportedOpError, match="share the memory that it has"):
        x.resize_(8, 2)
    assert other is not None and x.shape == (4, 2)
    del other
    x._xla_local = None  # x's own hold on what to_local() returned
    gc.collect()
    assert x.resize_(8, 2).cpu()[:4].tolist() == [[1.0, 1.0]] * 4


def test_the_others_too(mesh_2x4: DeviceMesh) -> None:
    x = make(mesh_2x4)
    view = x[1:]
    with pytest.raises(xd.UnsupportedOpError, match="share the memory that it has"):
        view.resize_(8, 2)
    del x
    gc.collect()
    del view


def test_tensors_that_moved_away_share_nothing(mesh_2x4: DeviceMesh) -> None:
    x, y = make(mesh_2x4), make(mesh_2x4)
    view = x[1:]
    view.data = y
    assert x.resize_(8, 2).shape == (8, 2)
    with pytest.raises(xd.UnsupportedOpError, match="share the memory that it has"):
        y.resize_(8, 2)


def test_only_tensors_count(mesh_2x4: DeviceMesh) -> None:
    x = make(mesh_2x4)
    references = [x._storage_] * 3 + [x, x]
    assert x.resize_(8, 2).shape == (8, 2) and references
    assert "getrefcount" not in inspect.getsource(metadata)


def test_out_of_another_shape(mesh_2x4: DeviceMesh) -> None:
    x = make(mesh_2x4)
    out = torch.empty_like(x[:, 0])[:0].clone()
    torch.add(x, 1, out=out)
    assert out.shape == (4, 2)
    view = out[:1]
    with (
        pytest.warns(UserWarning, match="was resized"),
        pytest.raises(xd.UnsupportedOpError, match="share the memory that it has"),
    ):
        torch.cat([x, x], out=out)
    assert view.shape == (1, 2)


def test_views_that_are_gone_leave_nothing(mesh_2x4: DeviceMesh) -> None:
    x = make(mesh_2x4)
    kept = [x[i] for i in range(4)]
    for _ in range(1000):
        x[0]
    assert len(x._storage_.viewers) < 40
    assert x._storage_.is_shared(x) and len(kept) == 4


@pytest.mark.slow
@pytest.mark.parametrize("times", [8, 20])
def test_views_made_by_several_threads(mesh_2x4: DeviceMesh, times: int) -> None:
    """Each of them is known, whoever makes the first."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(times):
            x = make(mesh_2x4)
            kept: list[torch.Tensor] = []
            threads = [
                threading.Thread(target=lambda x=x, kept=kept: kept.append(x[1:])) for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            while kept:
                assert x._storage_.is_shared(x)
                kept.pop()
            gc.collect()
            assert not x._storage_.is_shared(x)
    finally:
        sys.setswitchinterval(before)
