"""Batches on the mesh: what the loader gives, where, in order, however the loop ends."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import xla_dtensor as xd
from tests.conftest import make_mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture(autouse=True)
def _no_mesh() -> Iterator[None]:
    yield
    xd.set_mesh(None)


class Rows(Dataset):
    """Rows that are random each time, and one that can't be read."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise ValueError(f"row {index} is bad")
        return {"x": torch.full((4,), float(index)) + torch.rand(4), "y": index}


def on_host(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: on_host(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [on_host(v) for v in value]
    return value


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 2, 100])
def test_epochs_are_the_loaders(workers: int, prefetch: int) -> None:
    """The same batches as from the loader itself, random numbers and shuffling included, twice;
    the last one is smaller and cut unevenly."""
    loader = DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=workers)
    placed = xd.data.device_loader(loader, make_mesh("2x4"), prefetch=prefetch)
    assert len(placed) == 3 and placed.loader is loader
    epochs = []
    for batches in (loader, placed):
        torch.manual_seed(3)
        epochs.append([[on_host(batch) for batch in batches] for _ in range(2)])
    torch.testing.assert_close(epochs[1], epochs[0], rtol=0, atol=0)


Pair = namedtuple("Pair", "left right")
BATCH = {"x": torch.randn(8, 4), "more": [torch.randn(2, 8), Pair(torch.tensor(3), "a name")]}


@pytest.mark.parametrize(
    "placements,wanted",
    [
        (None, [[S0, R], [S0, R], [R, R]]),
        ([R, S0], [[R, S0], [R, S0], None]),
        ({"x": [S1, S0], "more": None}, [[S1, S0], [S0, R], [R, R]]),
        ({"x": None, "more": [[R, S1], Pair([R, R], None)]}, [[S0, R], [R, S1], [R, R]]),
    ],
)
def test_placements(placements: Any, wanted: list[Any]) -> None:
    mesh = make_mesh("2x4")
    batch = dict(BATCH)
    if wanted[2] is None:
        batch["more"] = [BATCH["more"][0], Pair(torch.zeros(3), "a name")]
        wanted = [*wanted[:2], [R, S0]]
    xd.set_mesh(mesh)
    (placed,) = xd.data.device_loader([batch], placements=placements)
    pair = placed["more"][1]
    assert type(pair) is Pair and pair.right == "a name"
    found = [placed["x"], placed["more"][0], pair.left]
    assert [list(t.placements) for t in found] == wanted
    assert all(t.device_mesh == mesh for t in found)
    assert torch.equal(on_host(placed["x"]), batch["x"])


@pytest.mark.parametrize(
    "placements,message",
    [
        ({"x": None}, r"don't fit a batch, whose keys are \['x', 'more'\]"),
        ([None, None], "don't fit a batch, whose keys are"),
        ({"x": None, "more": [None]}, r"don't fit a batch\['more'\], whose elements are \[0, 1\]"),
        ({"x": {"y": None}, "more": None}, r"are for a batch\['x'\], which is a tensor"),
        ([S0], "got 1 placements"),
        ([R, S1], r"Shard\(dim=1\).*shard dim is impossible"),
    ],
)
def test_placements_that_do_not_fit(placements: Any, message: str) -> None:
    with pytest.raises(xd.PlacementError, match=message):
        list(xd.data.device_loader([BATCH], make_mesh("2x4"), placements))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_what_is_taken_ahead(prefetch: int) -> None:
    taken = []

    def batches() -> Iterator[torch.Tensor]:
        buffer = torch.empty(4)
        for i in range(6):
            taken.append(i)
            yield buffer.fill_(i)  # one memory for all, as loaders that pin memory have it

    loop = iter(xd.data.device_loader(batches(), make_mesh("4"), prefetch=prefetch))
    first = next(loop)
    assert taken == list(range(prefetch + 1))
    values = [first, *loop]
    assert [on_host(v).tolist() for v in values] == [[float(i)] * 4 for i in range(6)]


@pytest.mark.parametrize("prefetch", [0, 2])
# (torch waits ten seconds for workers of a loop that an error has ended.)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_comes_in_its_turn(prefetch: int, workers: int) -> None:
    loader = DataLoader(Rows(bad=7), batch_size=2, num_workers=workers)
    seen = []
    with pytest.raises(ValueError, match="row 7 is bad"):
        for batch in xd.data.device_loader(loader, make_mesh("4"), prefetch=prefetch):
            rows = on_host(batch["y"]).tolist()
            seen.append(rows)
    assert seen == [[0, 1], [2, 3], [4, 5]]


def test_a_loop_that_ends_early_and_begins_again() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)
    placed = xd.data.device_loader(loader, make_mesh("4"))
    for (x,) in placed:
        assert on_host(x).tolist() == [0, 1]
        break
    assert [on_host(x).tolist() for (x,) in placed] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    pairs = zip(placed, placed, strict=True)  # two loops at once
    assert all(torch.equal(on_host(a), on_host(b)) for (a,), (b,) in pairs)


def test_sharded_batches_and_those_of_the_device() -> None:
    mesh = make_mesh("2x4")
    sharded = distribute_tensor(torch.arange(8.0), mesh, [R, R])
    on_device = torch.arange(8.0).to("xla")
    for x in xd.data.device_loader([sharded, on_device, torch.arange(8.0) * 1], mesh, [R, S0]):
        assert x.placements == (R, S0) and on_host(x).tolist() == list(range(8))


def test_arguments() -> None:
    with pytest.raises(ValueError, match="prefetch=-1"):
        xd.data.device_loader([], make_mesh("4"), prefetch=-1)
    with pytest.raises(xd.MeshError, match="no mesh is current"):
        xd.data.device_loader([])
    with pytest.raises(TypeError, match="has no len"):
        len(xd.data.device_loader(iter([]), make_mesh("4")))


def test_a_compiled_step_over_it() -> None:
    """As the plain loop on the CPU, in one program but for the last batch."""
    torch.manual_seed(0)
    inputs = torch.randn(20, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    losses: dict[str, list[float]] = {}
    for where in ("cpu", "xla"):
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(4, 1)
        batches: Any = loader
        if where == "xla":
            mesh = make_mesh("4")
            model = xd.distribute_module(model, mesh)
            batches = xd.data.device_loader(loader, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Any, y: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = xd.compile(step) if where == "xla" else step
        losses[where] = [run(x, y).item() for _ in range(2) for x, y in batches]
    assert losses["xla"] == pytest.approx(losses["cpu"], rel=1e-5)
    assert run.compilations == 2
