"""Bounds of collectives, counted by hand from the table of links."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xla_dtensor.mesh.device_order import Extent
from xla_dtensor.planning.collectives import HloCollective, Part
from xla_dtensor.planning.links import Lane, Switched, Torus, links
from xla_dtensor.planning.program_text import Shaped
from xla_dtensor.runtime.chips import CHIPS, GPUS

V5E, H100 = CHIPS["v5e"], GPUS["h100"]
LINE, RING = Lane((Extent(4, False),), V5E), Lane((Extent(4, True),), V5E)
MB = 10**6


def collective(
    kind: str, nbytes: int, groups: Any, dims: tuple[str, ...] = (), size: int | None = None
) -> HloCollective:
    part = Part(Shaped("s8", (nbytes,)), ())
    return HloCollective(kind, 1, (part,), dims, size or len(groups[0]), groups)


def test_the_links_are_the_tables() -> None:
    # 400 GB/s over four links in both directions; 1200 over six.
    assert V5E.link == 50e9 and CHIPS["v5p"].link == 100e9
    assert RING.bandwidth == 100e9 and LINE.bandwidth == 50e9
    assert Lane((Extent(4, True), Extent(4, True)), V5E).bandwidth == 200e9


@pytest.mark.parametrize(
    ("kind", "lanes", "expected"),
    [
        # Each of four devices lacks three quarters of the result.
        ("all-gather", [RING], 0.75 * 4 * MB / 100e9),
        ("all-gather", [LINE], 0.75 * 4 * MB / 50e9),
        ("all-gather", [RING, RING], 0.75 * 4 * MB / 200e9),
        # What is reduced is four times the result.
        ("reduce-scatter", [RING], 0.75 * 16 * MB / 100e9),
        ("all-reduce", [RING], 2 * 0.75 * 4 * MB / 100e9),
        ("collective-permute", [RING], 4 * MB / 50e9),
    ],
)
def test_in_a_torus(kind: str, lanes: list[Lane], expected: float) -> None:
    names = tuple(map(str, range(len(lanes))))
    over = Torus(dict(zip(names, lanes, strict=True)))
    groups = ((0, 1), (1, 0)) if kind == "collective-permute" else ((0, 1, 2, 3),)
    assert over.seconds(collective(kind, 4 * MB, groups, names, 4)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        # A ring of 16: of 8 devices' results half go to the other 8, over two links each way.
        ([Extent(16, True)], 8 / 2 * MB / (2 * 50e9)),
        # A line has one link there.
        ([Extent(8, False)], 4 / 2 * MB / 50e9),
        # Each row of a torus of 16 x 16 has a ring of its own: 8 * 16 devices' over 2 * 16 links.
        ([Extent(16, True), Extent(16, True)], 8 * 16 / 2 * MB / (2 * 16 * 50e9)),
        # The longest axis is the slowest.
        ([Extent(16, True), Extent(2, False)], 8 * 2 / 2 * MB / (2 * 2 * 50e9)),
    ],
)
def test_an_exchange_crosses_the_middle_of_each_axis(axes: list[Extent], expected: float) -> None:
    size = int(np.prod([axis.length for axis in axes]))
    one = collective("all-to-all", MB, (tuple(range(size)),), ("dp",))
    assert Torus({"dp": Lane(tuple(axes), V5E)}).seconds(one) == pytest.approx(expected)
    # As two dims of a mesh it is the same.
    apart = {str(i): Lane((axis,), V5E) for i, axis in enumerate(axes)}
    both = collective("all-to-all", MB, (tuple(range(size)),), (*apart,))
    assert Torus(apart).seconds(both) == pytest.approx(expected)


def test_nothing_moves_in_a_group_of_one() -> None:
    over = Torus({"dp": RING})
    assert over.seconds(collective("all-reduce", MB, ((0,), (1,)), ("dp",))) == 0
    assert over.seconds(collective("all-reduce", MB, ((0, 1),), ("elsewhere",))) == 0
    assert Switched(H100, [0, 0]).seconds(collective("all-reduce", MB, ((0,), (1,)))) == 0


# Two hosts of four GPUs. 450 GB/s from each to the others of its host, 50 from each to other hosts.
HERE = ((0, 1, 2, 3), (4, 5, 6, 7))
ACROSS = ((0, 4), (1, 5), (2, 6), (3, 7))
ALL = (tuple(range(8)),)


@pytest.mark.parametrize(
    ("kind", "groups", "expected"),
    [
        ("all-gather", HERE, 0.75 * 8 * MB / 450e9),
        # In a switch sums are made on the way: each device sends its part and gets the sum.
        ("all-reduce", HERE, 8 * MB / 450e9),
        ("reduce-scatter", HERE, 3 * 8 * MB / 450e9),
        ("all-to-all", HERE, 0.75 * 8 * MB / 450e9),
        # One of each host: half of the result is the other's.
        ("all-gather", ACROSS, 0.5 * 8 * MB / 50e9),
        ("all-reduce", ACROSS, 2 * 0.5 * 8 * MB / 50e9),
        ("reduce-scatter", ACROSS, 8 * MB / 50e9),
        ("all-to-all", ACROSS, 0.5 * 8 * MB / 50e9),
        # Four of each host: its four cards share what the host lacks, but for an exchange.
        ("all-gather", ALL, 0.5 * 8 * MB / 50e9 / 4),
        ("all-reduce", ALL, 2 * 0.5 * 8 * MB / 50e9 / 4),
        ("reduce-scatter", ALL, 4 * 8 * MB / 50e9 / 4),
        ("all-to-all", ALL, 0.5 * 8 * MB / 50e9),
        ("collective-permute", ((0, 1), (1, 0)), 8 * MB / 450e9),
        ("collective-permute", ((0, 1), (3, 4)), 8 * MB / 50e9),
        ("all-gather", (), 0.5 * 8 * MB / 50e9 / 4),  # of all, where the program doesn't say
    ],
)
def test_between_gpus(kind: str, groups: Any, expected: float) -> None:
    over = Switched(H100, [0, 0, 0, 0, 1, 1, 1, 1])
    one = collective(kind, 8 * MB, groups, size=8)
    assert over.seconds(one) == pytest.approx(expected)


def test_a_host_with_few_members_has_few_cards() -> None:
    over = Switched(H100, [0, 0, 0, 1])
    one = collective("all-gather", 8 * MB, ((0, 1, 2, 3),))
    assert over.seconds(one) == pytest.approx(0.75 * 8 * MB / 50e9)


def test_a_rack_is_one_domain() -> None:
    """18 hosts of four GPUs are behind one switch, the 19th isn't."""
    hosts = [
        SimpleNamespace(platform="gpu", device_kind="NVIDIA GB200", process_index=i // 4)
        for i in range(4 * 19)
    ]
    mesh = np.array(hosts, dtype=object).reshape(19, 4)
    over = links(GPUS["gb200"], mesh, ("dp", "tp"))
    assert isinstance(over, Switched) and over.numbers == [0] * 72 + [1] * 4
    pair = collective("collective-permute", MB, ((0, 71),))
    assert over.seconds(pair) == pytest.approx(MB / 900e9)
    pair = collective("collective-permute", MB, ((0, 72),))
    assert over.seconds(pair) == pytest.approx(MB / 50e9)
