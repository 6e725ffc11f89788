"""One axis at a time, where XLA's partitioner divides by zero.

That it does, and no longer, is seen with 12 and 16 devices, whose process would end:
`tests/compilation/random_products.py`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from xla_dtensor.mesh.intermediate import intermediate_shardings

NAMES = ("a", "b", "c", "d")


def frame(*shape: int) -> Any:
    """What a `Frame` of more devices than a test has says of its axes."""
    sizes = dict(zip(NAMES, shape, strict=False))
    return SimpleNamespace(sizes=sizes, sharding=lambda *spec: SimpleNamespace(spec=spec))


def dims_of(axes: Sequence[Sequence[str]]) -> dict[str, int]:
    return {name: dim for dim, names in enumerate(axes) for name in names}


def axes_of(sharding: Any, ndim: int) -> list[tuple[str, ...]]:
    entries = [() if e is None else (e,) if isinstance(e, str) else e for e in sharding.spec]
    return [*map(tuple, entries), *[()] * (ndim - len(entries))]


# mesh, before, after, and how many sharded places lie between
TABLE = [
    ((2, 2, 2, 2), "cd b - -", "a - bd c", 5),  # the first place, a begins, three change
    ((2, 3, 2), "- b c a", "a c - b", 4),
    ((4, 2, 2), "a - b -", "c a - b", 4),
    ((2, 2, 2, 2), "ab - - -", "- ab - -", 0),  # together, as one axis
    ((2, 2, 2, 2), "ab c - -", "- ab c -", 3),
    ((2, 2, 2, 2), "ba - - -", "- ba - -", 3),  # not in the mesh's order
    ((2, 2, 2, 2), "ab - - -", "- ba - -", 3),
    ((2, 2, 2, 2), "ac - - -", "- ac - -", 3),  # no neighbours
    ((2, 1, 2, 2), "ac - d -", "- ac - d", 3),
    ((2, 2, 2, 2), "ab - - -", "- adb - -", 4),  # d comes between them
    ((2, 2, 2, 2), "ab - - -", "b a - -", 0),  # one axis
    ((2, 2, 2, 2), "ab - - -", "- - - -", 0),  # a gather
    ((2, 2, 2, 2), "- - - -", "ab c d -", 0),  # a cut
    ((2, 2, 2, 2), "ab - -", "- ab -", 0),  # three dims
    ((4, 2), "a b - -", "b a - -", 0),  # two axes
    ((4, 1, 2), "a c - -", "c a - -", 0),  # as one has size one
]


@pytest.mark.parametrize(("mesh", "before", "after", "places"), TABLE)
def test_where_a_value_is_on_its_way(
    mesh: tuple[int, ...], before: str, after: str, places: int
) -> None:
    first, last = (
        [tuple("" if names == "-" else names) for names in text.split()] for text in (before, after)
    )
    assert len(intermediate_shardings(frame(*mesh), first, last)) == places


@pytest.mark.parametrize("seed", range(20))
def test_one_axis_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    mesh = frame(2, 2, 2, 2)
    taken = 0
    for _ in range(50):
        before, after = ([[], [], [], []] for _ in range(2))
        for axes in (before, after):
            for name in rng.sample(NAMES, 4):
                if dim := rng.choice([0, 1, 2, 3, 4]):
                    axes[dim - 1].append(name)
        way = intermediate_shardings(mesh, before, after)
        if not way:
            continue
        taken += 1
        places = [axes_of(sharding, 4) for sharding in way]
        assert places[0] == list(map(tuple, before))
        steps = [*map(dims_of, places), dims_of(after)]
        for old, new in itertools.pairwise(steps[:-1]):
            moved = {name for name in NAMES if old.get(name) != new.get(name)}
            ways = {(old.get(name), new.get(name)) for name in moved}
            assert len(ways) == 1 and "".join(sorted(moved)) in "abcd"
        # What is left is to bring axes that end together, and the order of a dim's axes.
        assert steps[-1].items() <= steps[-2].items()
    assert taken > 5
