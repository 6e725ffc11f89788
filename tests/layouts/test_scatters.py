"""Rows that are added to a table which is cut along them: each device adds to those that it has."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import xla_dtensor as xd
from tests.conftest import make_mesh

MESHES = ("2x4", "4x2", "8", "2x2x2")


def embedding(table: Any, rows: Any, _: Any) -> Any:
    return F.embedding(rows, table, padding_idx=1).sin()


def index_add(table: Any, rows: Any, source: Any) -> Any:
    return table.index_add(0, rows.flatten(), source.flatten(0, 1)).cos()


def index_put(table: Any, rows: Any, source: Any) -> Any:
    return table.index_put((rows,), source, accumulate=True).cos()


def scatter_add(table: Any, rows: Any, source: Any) -> Any:
    index = rows.flatten()[:, None].expand(-1, source.shape[-1])
    return table.scatter_add(0, index, source.flatten(0, 1)).cos()


def taken(table: Any, rows: Any, _: Any) -> Any:
    return table.index_select(0, rows.flatten()).exp()


FUNCTIONS = (embedding, index_add, index_put, scatter_add, taken)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("seed", range(40))
def test_numbers(seed: int) -> None:
    draw = random.Random(seed)
    function, mesh = draw.choice(FUNCTIONS), make_mesh(draw.choice(MESHES))
    length, width = draw.choice([8, 16, 26, 64]), draw.choice([4, 8, 12])
    batch = draw.choice([2, 8, 16]), draw.choice([1, 3, 4])

    def placements(ndim: int, first: float) -> list[Any]:
        dims = [0 if draw.random() < first else draw.randrange(ndim) for _ in range(mesh.ndim)]
        return [xd.Shard(d) if draw.random() < 0.7 else xd.Replicate() for d in dims]

    torch.manual_seed(seed)
    table, source = torch.randn(length, width), torch.randn(*batch, width)
    rows = torch.randint(0, length, batch)
    wanted = [t.clone().requires_grad_() for t in (table, source)]
    expected = function(wanted[0], rows, wanted[1])
    (expected.square().sum() + 0 * wanted[1].sum()).backward()

    own = [
        xd.distribute_tensor(t, mesh, placements(t.ndim, 0.7)).requires_grad_()
        for t in (table, source)
    ]
    given = xd.distribute_tensor(rows, mesh, placements(2, 0.7))

    @xd.compile
    def step(given: Any) -> Any:
        result = function(own[0], given, own[1])
        (result.square().sum() + 0 * own[1].sum()).backward()
        return result.detach()

    for call in range(2):
        result = step(given)
        torch.testing.assert_close(result.full_tensor().cpu(), expected.detach())
        for mine, theirs in zip(own, wanted, strict=True):
            grad = mine.grad.full_tensor().cpu()
            torch.testing.assert_close(grad, (1 + call) * theirs.grad)


def test_a_tables_gradient_is_never_whole() -> None:
    """On no device, where the vocabulary is cut."""
    with xd.abstract("cpu:8"):
        mesh = make_mesh("2x4")
        table = xd.distribute_tensor(torch.randn(4096, 8), mesh, [xd.Replicate(), xd.Shard(0)])
        table.requires_grad_()
        rows = torch.zeros(16, 4, dtype=torch.int64, device="xla")
        rows = xd.distribute_tensor(rows, mesh, [xd.Shard(0), xd.Replicate()])

        def step(rows: Any) -> None:
            F.embedding(rows, table).sin().sum().backward()
            with torch.no_grad():
                table.sub_(table.grad)
            table.grad = None

        report = xd.plan(step, rows)
    whole = 4096 * 8 * 4
    assert report.memory.temporaries < whole
    assert report.collective_bytes < whole
