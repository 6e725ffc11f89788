"""Strided slices, their gradients and writes through them, in layouts that XLA gets wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.conftest import make_mesh
from xla_dtensor.execution import lazy

Program = Callable[[torch.Tensor], torch.Tensor]
WAYS = ("lazy", "strict", "compiled", "outside")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How a program runs: operations joined however few they are, one by one, forward and
    backward as one compiled step, or the forward alone."""
    lazy.flush()
    monkeypatch.setattr(xd.config, "eager", "lazy" if request.param == "lazy" else "strict")
    monkeypatch.setattr(lazy, "OFTEN", 0)
    yield request.param
    lazy.flush()


def gradient(program: Program, x: torch.Tensor, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The program's value of ``x``, and the gradient of that."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = program(x)
        return value, torch.autograd.grad(value, x)[0]

    x = x.requires_grad_()
    if way == "compiled":
        return xd.compile(step)(x)
    if way == "outside":
        value = xd.compile(program)(x)
        return value, torch.autograd.grad(value, x)[0]
    return step(x)


def check(
    program: Program, x: torch.Tensor, mesh: DeviceMesh, layout: list[Placement], way: str
) -> None:
    expected = gradient(program, x.clone(), "")
    found = gradient(program, distribute_tensor(x, mesh, layout), way)
    for wanted, got in zip(expected, found, strict=True):
        torch.testing.assert_close(got.full_tensor().cpu(), wanted)


def whole(x: torch.Tensor) -> torch.Tensor:
    m = x.mean(0)
    v = m.reshape(-1)
    found = (x, m, v, v[1:3:2], x.topk(2, 1)[0], v.topk(2, 0)[0])
    return sum(((u.sin()).sum() for u in found), torch.zeros((), device=x.device))


def test_a_row_of_a_mean(way: str) -> None:
    check(whole, torch.randn(6, 2), make_mesh("2x4"), [Shard(0), Shard(1)], way)


def relative(rng: random.Random, shape: list[int]) -> Program:
    """A few strided slices of one another, with other operations between, all summed up."""
    plan = []
    for _ in range(rng.randint(2, 4)):
        dim = rng.randrange(len(shape))
        start = rng.randrange(shape[dim])
        step, end = rng.choice([1, 2, 2, 3, 5]), rng.randint(start + 1, shape[dim] + 2)
        plan.append((rng.choice(["x", "last"]), dim, start, end, step, rng.random() < 0.3))

    def program(x: torch.Tensor) -> torch.Tensor:
        last, total = x, x.sin().sum()
        for what, dim, start, end, step, tops in plan:
            base = x if what == "x" else last
            if start >= base.shape[dim]:
                start = 0
            last = base[(*[slice(None)] * dim, slice(start, end, step))]
            total = total + (last.sort(dim)[0] * 2 if tops else last.cos()).sin().sum()
            total = total + (last * last).mean(0).sum()
        return total

    return program


@pytest.mark.one_in(3)
@pytest.mark.parametrize("shape", ["2x4", "4x2", "2x2x2", "8"])
@pytest.mark.parametrize("seed", range(1))
def test_relatives(shape: str, seed: int, way: str) -> None:
    rng, mesh = random.Random(f"{shape} {seed}"), make_mesh(shape)
    sizes = [rng.choice([1, 2, 3, 5, 6, 8, 9]) for _ in range(rng.randint(1, 3))]
    layout = [rng.choice([Replicate(), *map(Shard, range(len(sizes)))]) for _ in range(mesh.ndim)]
    check(relative(rng, sizes), torch.randn(sizes), mesh, layout, way)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["2x4", "4x2", "2x2x2", "8"])
@pytest.mark.parametrize("seed", range(100, 125))
def test_many_relatives(shape: str, seed: int, way: str) -> None:
    test_relatives(shape, seed, way)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", ["8"])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
@pytest.mark.parametrize(("size", "start", "step"), [(8, 7, 3), (9, 1, 2), (6, 2, 4), (2, 1, 2)])
def test_writes(
    shape: str, placement: Placement, size: int, start: int, step: int, way: str
) -> None:
    mesh, x, y = make_mesh(shape), torch.randn(size), torch.randn(len(range(start, size, step)))

    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x * 1
        x[start::step] = y
        x[start::step] += 1
        return x

    layout = [placement] * mesh.ndim
    found = (xd.compile(write) if way in ("compiled", "outside") else write)(
        distribute_tensor(x, mesh, layout), distribute_tensor(y, mesh, layout)
    )
    torch.testing.assert_close(found.full_tensor().cpu(), write(x, y), rtol=0, atol=0)


def test_a_scatter_shorter_than_its_axis(way: str) -> None:
    """Index and value are sharded by different axes; shards of the index are but padding."""
    mesh = make_mesh("4x2")
    index = torch.zeros(2, 1, dtype=torch.int64)
    over = {"cpu": index, "xla": distribute_tensor(index, mesh, [Shard(0), Replicate()])}

    def taken(x: torch.Tensor) -> torch.Tensor:
        return torch.take_along_dim(x, over[x.device.type], 1).sin().sum()

    check(taken, torch.randn(2, 1), mesh, [Replicate(), Shard(0)], way)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", [[Shard(0), Replicate()], [Replicate(), Shard(0)]], ids=str)
def test_one_row_written_of_what_moves(layout: list[Placement], way: str) -> None:
    """Where the rows are in other shards than before."""
    mesh, index = make_mesh("2x4"), torch.tensor([0])
    over = {"cpu": index, "xla": distribute_tensor(index, mesh, [Replicate(), Replicate()])}

    def put(x: torch.Tensor) -> torch.Tensor:
        row = torch.full((1, 1), 2.0, device=x.device)
        out = x.index_put((over[x.device.type],), row, accumulate=True)
        if x.device.type == "xla":
            out = out.redistribute(placements=layout)
        return out.sin().sum() + x.min(0)[0].sum() + x.split(2)[0].sum()

    check(put, torch.randn(3, 1), mesh, [Replicate(), Shard(1)], way)
