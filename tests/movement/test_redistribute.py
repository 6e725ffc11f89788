"""Between layouts: every pair of placements, what each device then holds, and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import tests.conftest as shared
import xla_dtensor as xd
from tests.torch_layouts import all_placements, expected_indices

pytestmark = pytest.mark.one_in(3)  # each variant compiles programs of its own

R, S = Replicate(), Shard
Placements = tuple[Placement, ...]

EVEN, UNEVEN = (8, 16), (9, 7)


def value_of(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) - 5


def check_shards(x: xd.XLAShardedTensor, value: torch.Tensor, placements: Placements) -> None:
    """``x`` has the value ``value``, and each device holds what torch says it does."""
    mesh = x.device_mesh
    assert x.placements == placements
    assert (x.shape, x.dtype) == (value.shape, value.dtype)
    indices = expected_indices(value.shape, tuple(mesh.shape), placements)
    shards = x.local_shards
    assert [s.device for s in shards] == mesh.mesh.flatten().tolist()
    assert [s.index for s in shards] == indices, placements
    for shard in shards:
        assert torch.equal(shard.data, value[shard.index]), placements


def check_pairs(
    mesh: DeviceMesh, value: torch.Tensor, pairs: Iterable[tuple[Placements, Placements]]
) -> None:
    source: Placements | None = None
    for before, after in pairs:
        if before != source:
            source, x = before, distribute_tensor(value, mesh, before)
            check_shards(x, value, before)
        y = x.redistribute(placements=after)
        assert y.device_mesh == mesh
        check_shards(y, value, after)
        assert (x.placements, y is x) == (before, False)


@pytest.mark.parametrize("shape", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("mesh_name", ["8", "2x4", "1"])
def test_every_pair(mesh_name: str, shape: tuple[int, ...]) -> None:
    mesh = shared.make_mesh(mesh_name)
    sources = all_placements(mesh.shape, 2, Partial())
    targets = list(all_placements(mesh.shape, 2))
    check_pairs(mesh, value_of(shape), itertools.product(sources, targets))


@pytest.mark.parametrize("shape", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("mesh_name", ["4x2", "2x2x2"])
def test_from_and_to_every_placement(mesh_name: str, shape: tuple[int, ...]) -> None:
    """Each source and each target once: all pairs of the (2, 2, 2) mesh take minutes."""
    mesh = shared.make_mesh(mesh_name)
    sources = list(all_placements(mesh.shape, 2, Partial()))
    targets = list(all_placements(mesh.shape, 2))
    pairs = [(s, targets[-i % len(targets)]) for i, s in enumerate(sources)]
    assert {target for _, target in pairs} == set(targets)
    check_pairs(mesh, value_of(shape), pairs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8,), (9,)], ids=["even", "uneven"])
def test_every_pair_on_three_mesh_dims(shape: tuple[int, ...]) -> None:
    mesh = shared.make_mesh("2x2x2")
    sources = all_placements(mesh.shape, 1, Partial())
    targets = list(all_placements(mesh.shape, 1))
    check_pairs(mesh, value_of(shape), itertools.product(sources, targets))


GRADIENT_PAIRS: list[tuple[Placements, Placements]] = [
    ((S(0), S(1)), (R, R)),
    ((S(0), S(0)), (S(1), R)),
    ((R, R), (S(1), S(0))),
    ((_StridedShard(0, split_factor=4), S(0)), (S(0), S(0))),
    ((Partial(), S(0)), (S(0), R)),
    ((Partial(), Partial()), (R, S(1))),
    ((Partial("avg"), R), (R, R)),
]


@pytest.mark.parametrize(("before", "after"), GRADIENT_PAIRS, ids=str)
@pytest.mark.parametrize("shape", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_gradients(before: Placements, after: Placements, shape: tuple[int, ...]) -> None:
    mesh = shared.make_mesh("2x4")
    value, weight = value_of(shape), torch.randn(shape)
    x = distribute_tensor(value, mesh, before).requires_grad_()
    (x.redistribute(placements=after) * weight).sum().backward()
    assert x.grad is not None
    wanted = tuple(R if isinstance(p, Partial) else p for p in before)
    check_shards(x.grad, weight, wanted)
    check_shards(x.detach(), value, before)


def test_gradients_of_gradients() -> None:
    mesh = shared.make_mesh("2x4")
    value = torch.randn(5, 6)
    x = distribute_tensor(value, mesh, [S(0), S(1)]).requires_grad_()
    y = x.redistribute(placements=[S(1), R]) ** 3
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second.full_tensor().cpu(), 6 * value)


@pytest.mark.parametrize("backward_dtype", [None, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("forward_dtype", [None, torch.bfloat16, torch.float64])
def test_dtypes(forward_dtype: torch.dtype | None, backward_dtype: torch.dtype | None) -> None:
    """The result is in ``forward_dtype``; the gradient passes through ``backward_dtype``, by
    default the input's, and comes back in the input's."""
    value = torch.randn(5, 6)
    weight = torch.randn(5, 6, dtype=torch.float64)
    x = distribute_tensor(value, shared.make_mesh("2x4"), [S(0), R]).requires_grad_()
    y = x.redistribute(
        placements=[R, S(1)], forward_dtype=forward_dtype, backward_dtype=backward_dtype
    )
    y.backward(distribute_tensor(weight.to(y.dtype), y.device_mesh, y.placements))
    assert torch.equal(y.full_tensor().cpu(), value.to(forward_dtype or torch.float32))
    grad = weight.to(y.dtype).to(backward_dtype or torch.float32).float()
    assert x.grad is not None
    check_shards(x.grad, grad, x.placements)


def test_async_op_is_the_same() -> None:
    x = distribute_tensor(value_of(EVEN), shared.make_mesh("2x4"), [S(0), R])
    check_shards(x.redistribute(placements=[R, R], async_op=True), value_of(EVEN), (R, R))


@pytest.mark.parametrize("after", [(S(0), R), (R, S(0)), (R, R)], ids=str)
@pytest.mark.parametrize("before", [(S(0), R), (R, R), (Partial(), R)], ids=str)
def test_the_source_is_never_changed(before: Placements, after: Placements) -> None:
    """Neither by writing to the result, nor by a compiled step that reuses the result's memory."""
    mesh = shared.make_mesh("2x4")
    value = value_of((8,))
    x = distribute_tensor(value, mesh, before)
    y = x.redistribute(placements=after)
    y.add_(1)
    full = x.full_tensor()
    full.mul_(2)

    @xd.compile
    def step() -> None:
        y.add_(1)
        full.add_(1)

    step()
    step()
    check_shards(x, value, before)
    check_shards(y, value + 3, after)
    assert torch.equal(full.cpu(), value * 2 + 2)


MESHES = {
    "2x4": lambda: shared.make_mesh("2x4"),
    "a submesh": lambda: shared.make_mesh("2x4")["tp"],
    "reversed": lambda: DeviceMesh("xla", list(range(8))[::-1]),
    "three others": lambda: DeviceMesh("xla", [6, 2, 5]),
    "one": lambda: DeviceMesh("xla", [7]),
}


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(MESHES, 2)))
def test_between_meshes(source: str, target: str) -> None:
    here, there = MESHES[source](), MESHES[target]()
    before = (S(0), Partial())[: here.ndim]
    after = (S(1), S(0))[: there.ndim]
    value, weight = value_of(UNEVEN), torch.randn(UNEVEN)
    x = distribute_tensor(value, here, before).requires_grad_()
    y = x.redistribute(there, after)
    assert y.device_mesh == there
    if there.ndim == 1 and target != "a submesh":
        check_shards(y.detach(), value, after)
    assert torch.equal(y.full_tensor().cpu(), value)
    (y * weight).sum().backward()
    assert x.grad is not None
    assert x.grad.device_mesh == here
    assert x.grad.placements == (S(0), R)[: here.ndim]
    assert torch.equal(x.grad.full_tensor().cpu(), weight)
    assert torch.equal(x.detach().full_tensor().cpu(), value)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,), (1, 1)], ids=str)
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    mesh = shared.make_mesh("2x4")
    value = torch.full(shape, 2.5)
    placements = list(all_placements(mesh.shape, min(len(shape), 1), Partial()))
    check_pairs(mesh, value, zip(placements, [(R, R)] * len(placements), strict=True))
    for before in placements:
        x = distribute_tensor(value, mesh, before)
        assert torch.equal(x.full_tensor().cpu(), value)
        assert torch.equal((x + x).sum().full_tensor().cpu(), (value + value).sum())


@pytest.mark.parametrize("reduction", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("before", ["P R", "P P", "P S", "S P"])
def test_partial(reduction: str, before: str) -> None:
    """A partial tensor's value is its reduced value, whatever the reduction."""
    mesh = shared.make_mesh("2x4")
    choices = {"P": Partial(reduction), "R": R, "S": S(0)}
    placements = tuple(choices[c] for c in before.split())
    value = value_of(UNEVEN)
    x = distribute_tensor(value, mesh, placements)
    assert x.placements == placements
    assert torch.equal(x.full_tensor().cpu(), value)
    for after in [(R, R), (S(0), R), (S(1), S(0)), placements]:
        check_shards(x.redistribute(placements=after), value, after)
    torch.testing.assert_close((x + 1).full_tensor().cpu(), value + 1)
    torch.testing.assert_close((x * x).full_tensor().cpu(), value * value)
    torch.testing.assert_close(torch.relu(x).full_tensor().cpu(), torch.relu(value))
    torch.testing.assert_close(x.sum(0).full_tensor().cpu(), value.sum(0))


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64, torch.complex128],
)
def test_dtypes_are_moved_exactly(dtype: torch.dtype) -> None:
    value = (value_of(UNEVEN) * 1.0000001).to(dtype)
    if dtype is torch.int64:
        value += 2**53 + 1
    mesh = shared.make_mesh("2x4")
    pairs = [((S(0), S(1)), (R, R)), ((Partial(), R), (S(1), R)), ((R, S(1)), (S(0), S(0)))]
    check_pairs(mesh, value, pairs if dtype is not torch.bool else pairs[::2])
