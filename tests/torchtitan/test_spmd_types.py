"""``spmd_types`` on per-device tensors against its own runs with a tensor for each rank (torch's
``LocalTensor``): every collective and conversion, values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
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
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import distribute_tensor
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


class _TwoLayers(torch.nn.Module):
    """A tensor-parallel pair: columns, then rows, whose results are summed; and a factor per column
    that is invariant, or that each rank adds its part to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = spmd.convert(x, "tp", src=I, dst=R) * self.scale
        parts = torch.relu(hidden @ self.columns) @ self.rows
        return spmd.all_reduce(parts, "tp", src=P, dst=I) * self.factor


def _types(name: str) -> Any:
    return {"columns": S(1), "rows": S(0), "scale": R, "factor": I}[name]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("reshard", [False, True])
def test_annotated_parameters(compiled: bool, checked: bool, reshard: bool) -> None:
    """``fully_shard`` takes plain parameters that say by types how they make up whole ones: stored
    as ``DTensor``s, handed out as each device's part. Gradients are those of the whole batch."""
    mesh = xd.init_device_mesh("xla", SHAPE, mesh_dim_names=NAMES)
    torch.manual_seed(2)
    shapes = {"columns": (6, 8), "rows": (8, 6), "scale": (6,), "factor": (6,)}
    whole = {name: torch.randn(shape) for name, shape in shapes.items()}
    model = _TwoLayers()
    with spmd.set_current_mesh(mesh):
        for name, value in whole.items():
            kind = _types(name)
            part = value.to("meta")
            if kind not in (R, I):
                part = spmd.shard(part, "tp", src=I, dst=kind)
            parameter = torch.nn.Parameter(part)
            spmd.assert_type(parameter, {"tp": kind})
            setattr(model, name, parameter)
        dims = DataParallelMeshDims(shard="dp")
        xd.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=reshard)
    model.set_gradient_divide_factor(1.0)
    model.to_empty(device="xla")
    for name, parameter in model.named_parameters():
        placed = distribute_tensor(whole[name], mesh, parameter.placements)
        parameter.data.copy_(placed)
    rows = [torch.randn(3, 6) for _ in range(2)]
    x = xd.from_device_values(rows, mesh["dp"])

    def step(x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        with spmd.set_current_mesh(mesh), checker.typecheck() if checked else nullcontext():
            if checked:
                spmd.assert_type(x, {"dp": V, "tp": I})
            loss = model(x).square().sum()
            with spmd.no_typecheck():
                loss.backward()
        return loss.detach()

    run = xd.compile(step) if compiled else step
    for _ in range(2):
        losses = run(x).local_values()
    leaves = {name: value.clone().requires_grad_() for name, value in whole.items()}
    hidden = torch.cat(rows) * leaves["scale"] @ leaves["columns"]
    expected = (torch.relu(hidden) @ leaves["rows"] * leaves["factor"]).square().sum()
    expected.backward()
    torch.testing.assert_close(losses[0] + losses[4], expected.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor().cpu(), leaves[name].grad)


def test_annotations_that_fully_shard_refuses() -> None:
    mesh = xd.init_device_mesh("xla", SHAPE, mesh_dim_names=NAMES)
    dims = DataParallelMeshDims(shard="dp")
    for types, message in (
        ({"tp": I, "dp": V}, "data-parallel axis"),
        ({"dp": R}, "no type along dim 1"),
    ):
        model = torch.nn.Linear(4, 4, bias=False, device="meta")
        with spmd.set_current_mesh(mesh):
            spmd.assert_type(model.weight, types)
        with pytest.raises(ValueError, match=message):
            xd.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
