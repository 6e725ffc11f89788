"""A dim that two mesh axes cut is asked for over some of them, in the program that made the value.

XLA took the rows of a broadcast value for those of another axis; see `relayout`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.execution import lazy

MAKES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "repeat": lambda x, n: x.repeat(n, 1),
    "expanded": lambda x, n: x.expand(n, *x.shape).reshape(-1, x.shape[1]),
    "sum of broadcasts": lambda x, n: (x + x.new_zeros(n, 1, 1)).flatten(0, 1),
    "plain": lambda x, n: torch.cat([x] * n),
}
PLACES = [Replicate(), Shard(0), Shard(1)]


def moves(ndim: int) -> list[tuple[tuple, tuple, tuple]]:
    """Of a value's source, and two redistributions, one after the other."""
    everything = list(itertools.product(PLACES, repeat=ndim))
    cut = [p for p in everything if list(p).count(Shard(0)) > 1]
    found = [(s, mid, out) for s in everything for mid in cut for out in everything]
    return random.Random(ndim).sample(found, 24)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("how", ["compiled", "eager"])
@pytest.mark.parametrize(
    "shape", [(2, 2), pytest.param((2, 4), marks=pytest.mark.slow), (2, 2, 2)], ids=str
)
def test_rows_stay_where_they_are(
    make: str, how: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xd.config, "eager", "lazy")
    monkeypatch.setattr(lazy, "FEW", 0)
    mesh = xd.init_device_mesh("xla", shape)
    # Of the result each device has one row, copies along the first mesh dim.
    count, first = math.prod(shape), shape[0]
    value = torch.arange(8.0 * count // first).reshape(count // first, 8)
    expected = MAKES[make](value, first)
    rest = len(shape) - 1
    known = (
        (Replicate(),) * (rest + 1),
        (Shard(0),) * (rest + 1),
        (Replicate(), *[Shard(0)] * rest),
    )
    cases = [known, *moves(len(shape))]
    for source, mid, out in cases:

        def run(x: torch.Tensor, mid: tuple = mid, out: tuple = out) -> torch.Tensor:
            made = MAKES[make](x, first).redistribute(placements=mid)  # type: ignore[attr-defined]
            return made.redistribute(placements=out)

        x = distribute_tensor(value, mesh, source)
        found = (xd.compile(run) if how == "compiled" else run)(x)
        assert torch.equal(found.full_tensor().cpu(), expected), (source, mid, out)  # type: ignore[attr-defined]
