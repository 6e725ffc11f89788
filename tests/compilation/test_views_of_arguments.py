"""Results and attributes that are views, or views of views, of a step's arguments: of those of the
call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

VIEWS = {
    "a corner": lambda x: x[1:, 2:],
    "an element": lambda x: x[0, 0],
    "a row of the transposed": lambda x: x.t()[0],
    "viewed and transposed": lambda x: x.view(2, 8).transpose(0, 1),
    "a chunk": lambda x: x.chunk(2)[1],
    "of a chunk": lambda x: x.chunk(2)[1][0],
    "expanded": lambda x: x[:1].expand(4, 4),
    "several": lambda x: (x[0], x[0][1:], x[0][1:][0]),
    "kept and shown": lambda x: (lambda row: (row, row[0], row[0]))(x[1]),
    "detached": lambda x: x[1:].detach()[1],
    "unsqueezed": lambda x: x[1].unsqueeze(0).unsqueeze(0),
}


def flat(result: Any) -> list[Any]:
    return [t for each in result for t in flat(each)] if isinstance(result, tuple) else [result]


def inputs(kind: str, mesh: Any) -> list[Any]:
    values = [torch.arange(16.0).reshape(4, 4) + 100 * i for i in range(4)]
    if kind == "cpu":
        return values
    if kind == "device":
        return [value.to("xla") for value in values]
    return [distribute_tensor(value, mesh, [Shard(0), Replicate()]) for value in values]


@pytest.mark.parametrize("kind", ["device", "sharded"])
@pytest.mark.parametrize("name", VIEWS)
def test_of_the_call(name: str, kind: str, mesh_2x4: Any) -> None:
    view = VIEWS[name]
    step = xd.compile(view)
    expected, given = inputs("cpu", None), inputs(kind, mesh_2x4)
    for i in (0, 1, 2, 1):
        wanted, found = flat(view(expected[i])), flat(step(given[i]))
        for one, other in zip(found, wanted, strict=True):
            assert one.tolist() == other.tolist()
            assert one.stride() == other.stride()
        if name != "expanded":
            found[-1].fill_(-1.0)  # the argument's own memory
            wanted[-1].fill_(-1.0)
        for one, other in zip(given, expected, strict=True):
            assert one.tolist() == other.tolist()


@pytest.mark.parametrize("kind", ["device", "sharded"])
@pytest.mark.parametrize("name", VIEWS)
def test_kept_in_an_attribute(name: str, kind: str, mesh_2x4: Any) -> None:
    class Keeper:
        kept: Any = None

        def step(self, x: Any) -> Any:
            self.kept = VIEWS[name](x)
            return x.sum()

    expected, given = inputs("cpu", None), inputs(kind, mesh_2x4)
    one, other = Keeper(), Keeper()
    step = xd.compile(one.step)
    for i in (0, 1, 2):
        assert step(given[i]).item() == other.step(expected[i]).item()
        for found, wanted in zip(flat(one.kept), flat(other.kept), strict=True):
            assert found.tolist() == wanted.tolist()


def test_of_a_view_that_was_there_before() -> None:
    x = torch.arange(16.0, device="xla").reshape(4, 4)
    row = x[1]
    step = xd.compile(lambda y: (y[0], row[2:]))
    for _ in range(3):
        first, second = step(x)
        second.add_(1)
        assert first.tolist() == [0, 1, 2, 3]
        assert row.tolist() == x[1].tolist()
    assert row.tolist() == [4, 5, 9, 10]
