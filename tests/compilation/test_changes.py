"""A step that is never stale: every row of the table, compiled on a mesh against CPU torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from tests.compilation.changes import (
    REFUSED,
    TABLE,
    EagerMesh,
    Mesh,
    Observation,
    ReplayMesh,
    Row,
    World,
    assert_same,
    observe,
    same,
)

PARAMS = [
    pytest.param(row, id=name, marks=[pytest.mark.slow] if row.slow else [])
    for name, row in TABLE.items()
]


@pytest.fixture(autouse=True)
def _global_state() -> Iterator[None]:
    """torch's global settings are put back after a row that failed in the middle."""
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.autograd.set_detect_anomaly(False)
    torch.set_grad_enabled(True)


def observations(row: Row, world: World) -> Iterator[Observation]:
    torch.manual_seed(0)
    return observe(row.program(world), world)


def check(row: Row, world: World) -> None:
    """The program in ``world`` shows what it shows on the CPU, or is refused where it may be."""
    expected = list(observations(row, World()))
    count = 0
    try:
        for actual in observations(row, world):
            assert_same(actual, expected[count], f"after call {count}")
            count += 1
    except (xd.XlaDTensorError, RuntimeError, TypeError) as error:
        if row.name not in REFUSED or not re.search(REFUSED[row.name], str(error)):
            raise
        return
    assert count == len(expected)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("row", PARAMS)
def test_compiled_as_torch(mesh_2x4: DeviceMesh, row: Row) -> None:
    check(row, Mesh(mesh_2x4))


@pytest.mark.one_in(23)
@pytest.mark.parametrize("row", PARAMS)
def test_replayed_as_torch(mesh_2x4: DeviceMesh, row: Row) -> None:
    check(row, ReplayMesh(mesh_2x4))


@pytest.mark.slow
@pytest.mark.parametrize("row", list(TABLE.values()), ids=list(TABLE))
def test_eagerly_as_torch(mesh_2x4: DeviceMesh, row: Row) -> None:
    """The same programs without `xd.compile`: a row that fails here too says nothing about it."""
    check(row, EagerMesh(mesh_2x4))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("row", list(TABLE.values()), ids=list(TABLE))
def test_the_change_shows(row: Row) -> None:
    """On the CPU, without the change, the program yields something else: the row can fail."""
    seen = [o.results for o in observations(row, World())]
    stale = [o.results for o in observations(row, World(changes=False))]
    shows = any(
        a.keys() != b.keys() or not all(same(a[key], b[key]) for key in b)
        for a, b in zip(seen, stale, strict=True)
    )
    assert shows is not row.unseen


def test_the_table() -> None:
    assert len(TABLE) >= 120
    assert set(REFUSED) <= set(TABLE)
