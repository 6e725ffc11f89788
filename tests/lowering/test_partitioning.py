"""Gathers, scatters and grouped convolutions in random layouts, some of which XLA gets wrong."""

from __future__ import annotations

import pytest
import torch

import xla_dtensor as xd
from tests.conftest import make_mesh
from tests.lowering import partitioning
from tests.lowering.partitioning import FAMILIES, case, run

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")

# Found wrong in some formulation: (family, mesh, numbers).
REGRESSIONS = [
    ("scatter_add", "2x4", (3, 8)),  # batched scatter
    ("scatter_reduce", "2x2x2", (4, 7, 9, 31, 39)),  # an index sharded unevenly
    ("scatter_reduce", "2x4", (8,)),
    ("index", "2x2x2", (22,)),  # a dim of the result sharded by several axes
    ("conv", "2x4", (4, 7)),  # the gradient of a grouped weight
    ("conv", "2x2x2", (0, 7)),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "mesh", "numbers"), REGRESSIONS)
def test_what_was_wrong(name: str, mesh: str, numbers: tuple[int, ...]) -> None:
    found = [run(case(name, number), make_mesh(mesh)) for number in numbers]
    assert found == [None] * len(numbers)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", FAMILIES)
def test_random_layouts(name: str) -> None:
    # One eager and one compiled case.
    assert [run(case(name, number), make_mesh("2x2x2")) for number in (1000, 1001)] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2x4", "4x2", "2x2x2", "8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_many_random_layouts(name: str, mesh: str) -> None:
    assert list(partitioning.failures([name], make_mesh(mesh), range(30))) == []


def test_an_index_sharded_where_it_has_one_element() -> None:
    """Seed 19726 of the fuzzer, eagerly by itself: XLA's verifier refused the program."""
    mesh, whole = make_mesh("2x2x2"), [xd.Replicate()] * 3
    x = torch.zeros(3, 2)
    rows, columns = torch.tensor([[2]]), torch.tensor([[1], [1], [0], [0], [0], [1], [0], [0]])
    place = lambda value, dim: xd.distribute_tensor(value, mesh, [*whole[:2], xd.Shard(dim)])
    found = place(x, 0)
    with xd.config.override(eager="strict"):
        found[xd.distribute_tensor(rows, mesh, whole), place(columns, 1)] = 3.0
    x[rows, columns] = 3.0
    assert torch.equal(found.full_tensor().cpu(), x)
