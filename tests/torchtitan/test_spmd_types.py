"""``spmd_types`` on per-device tensors against its own runs with a tensor for each rank (torch's
``LocalTensor``): every collective and conversion, values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("spmd_types", reason="spmd_types isn't installed: make test-torchtitan")

import spmd_types as spmd
from spmd_types import checker
from spmd_types._mesh_axis import _reset
from spmd_types.types import I, P, R, S, V
from torch.distributed._local_tensor import LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import xla_dtensor as xd

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPE, NAMES = (2, 4), ("dp", "tp")
RANKS = 8

# Function, from which type to which, the shape of each rank's tensor, and options.
CALLS: list[tuple[str, Any, Any, tuple[int, ...], dict[str, Any]]] = [
    ("all_reduce", P, R, (3,), {}),
    ("all_reduce", P, I, (3,), {}),
    ("all_gather", V, R, (3,), {}),
    ("all_gather", V, I, (3,), {}),
    ("all_gather", S(0), R, (2, 3), {}),
    ("all_gather", S(1), R, (2, 3), {}),
    ("reduce_scatter", P, V, (4, 3), {}),
    ("reduce_scatter", P, S(0), (8, 3), {}),
    ("reduce_scatter", P, S(1), (2, 8), {}),
    ("all_to_all", V, V, (4, 3), {}),
    ("all_to_all", S(0), S(1), (2, 8), {}),
    ("convert", R, V, (4, 3), {}),
    ("convert", R, S(0), (8, 3), {}),
    ("convert", I, S(0), (8, 3), {}),
    ("convert", R, P, (3,), {}),
    ("convert", I, P, (3,), {"expert_mode": True}),
    ("convert", V, P, (3,), {"expert_mode": True}),
    ("convert", S(0), P, (2, 3), {"expert_mode": True}),
    ("convert", I, R, (3,), {}),
    ("reinterpret", R, V, (3,), {"expert_mode": True}),
    ("reinterpret", V, P, (3,), {}),
    ("reinterpret", R, P, (3,), {"expert_mode": True}),
    ("redistribute", S(0), R, (2, 3), {}),
    ("redistribute", P, S(0), (8, 3), {}),
    ("redistribute", S(0), S(1), (2, 8), {}),
]


@pytest.fixture(autouse=True)
def _fresh_axes() -> Iterator[None]:
    _reset()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    _reset()


def values(shape: tuple[int, ...], kind: Any) -> list[torch.Tensor]:
    """Each rank's: the same along "tp" where the type says so."""
    drawn = torch.randn(RANKS, *shape, generator=torch.Generator().manual_seed(1))
    return [drawn[rank // 4 * 4 if kind is R or kind is I else rank] for rank in range(RANKS)]


def run(name: str, src: Any, dst: Any, options: Any, x: Any, group: Any) -> Any:
    """The call, and the gradient of half its square."""
    out = getattr(spmd, name)(x, group, src=src, dst=dst, **options)
    out.backward(out.detach())
    return out.detach(), x.grad


def expected(call: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What each rank gets, in spmd_types' own tests' way."""
    name, src, dst, shape, options = call
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = dist.device_mesh.init_device_mesh("cpu", SHAPE, mesh_dim_names=NAMES)
    own = values(shape, src)
    with LocalTensorMode(RANKS) as mode:
        x = mode.rank_map(lambda rank: own[rank].clone())
        x.requires_grad_()
        out, grad = run(name, src, dst, options, x, mesh.get_group("tp"))
        found = [[t._local_tensors[rank].clone() for rank in range(RANKS)] for t in (out, grad)]
    dist.destroy_process_group()
    _reset()
    return found[0], found[1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("call", CALLS, ids=[f"{c[0]} {c[1]} {c[2]}" for c in CALLS])
def test_values_and_gradients(call: Any, compiled: bool) -> None:
    name, src, dst, shape, options = call
    theirs = expected(call)
    mesh = xd.init_device_mesh("xla", SHAPE, mesh_dim_names=NAMES)
    x = xd.from_device_values(values(shape, src), mesh).requires_grad_()
    step = lambda: run(name, src, dst, options, x, mesh.get_group("tp"))
    ours = (xd.compile(step) if compiled else step)()
    for found, wanted in zip(ours, theirs, strict=True):
        local = found.local_values()
        for rank in range(RANKS):
            torch.testing.assert_close(local[rank], wanted[rank])


def test_types_are_checked() -> None:
    """The package's own first example, on an xla mesh."""
    mesh = xd.init_device_mesh("xla", SHAPE, mesh_dim_names=NAMES)
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    with spmd.set_current_mesh(mesh), checker.typecheck():
        x = torch.randn(4, device="xla")
        spmd.assert_type(x, {dp: R, tp: P})
        y = spmd.all_reduce(x, tp, src=P, dst=R)
        spmd.assert_type(y, {dp: R, tp: R})
        z = torch.mul(y, y)
        spmd.assert_type(z, {dp: R, tp: R})
        with pytest.raises(spmd.SpmdTypeError):
            torch.mul(x, x)  # of what is to be summed yet
        by_name = spmd.all_reduce(x, "tp", src=P, dst=R)
        spmd.assert_type(by_name, {"dp": R, "tp": R})
    torch.testing.assert_close(by_name.cpu(), x.cpu() * 4)


def test_groups_are_axes() -> None:
    """Equal ranks are equal axes, as of torch's groups; names are the mesh's."""
    mesh = xd.init_device_mesh("xla", SHAPE, mesh_dim_names=NAMES)
    axis = spmd.MeshAxis.of(mesh.get_group("tp"))
    assert axis == spmd.MeshAxis.of(4, 1)
    assert spmd.MeshAxis.of(mesh.get_group("dp")) == spmd.MeshAxis.of(2, 4)
    assert spmd.normalize_axis(mesh.get_group("tp")) is axis
