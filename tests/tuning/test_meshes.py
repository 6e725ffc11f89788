"""Which meshes `xd.tune` looks at."""

from __future__ import annotations

import math

import pytest
import torch

from xla_dtensor.errors import TopologyError
from xla_dtensor.tuning.meshes import NAMES, USUAL, meshes

BATCH = (torch.zeros(16, 32), torch.zeros(16))


def test_all_sizes_once() -> None:
    found = [*meshes(8, 8, BATCH, USUAL, {})]
    sizes = [tuple(mesh.items()) for mesh, _ in found]
    assert len({*sizes}) == len(sizes)
    assert sizes == [
        (("dp", 8),),
        (("dp", 4), ("tp", 2)),
        (("dp", 2), ("tp", 4)),
        (("tp", 8),),
    ]
    assert dict(found[1][0]) == {"dp": 4, "tp": 2} and found[1][1] == (0, None)


def test_a_host_may_have_the_parameters_whole() -> None:
    """Of 4 hosts with 8 devices each."""
    with_both = [m for m, _ in meshes(32, 8, BATCH, USUAL, {}) if m.get("fsdp", 1) > 1]
    assert with_both and all(m["fsdp"] * m.get("tp", 1) == 8 for m in with_both)
    assert {"dp": 4, "fsdp": 8} not in with_both  # 16 rows over 32 devices
    assert {"dp": 4, "fsdp": 4, "tp": 2} in with_both


@pytest.mark.parametrize("count", [6, 8, 12])
def test_the_batch_divides(count: int) -> None:
    for mesh, roles in meshes(count, count, BATCH, NAMES, {}):
        assert math.prod(mesh.values()) == count and len(mesh) <= 3
        for dim, length in enumerate((16, 32)):
            devices = [s for s, r in zip(mesh.values(), roles, strict=True) if r == dim]
            assert length % math.prod(devices) == 0


def test_sizes_that_are_given() -> None:
    assert [m for m, _ in meshes(8, 8, BATCH, USUAL, {"tp": 4})] == [{"dp": 2, "tp": 4}]
    assert [m for m, _ in meshes(8, 8, BATCH, ("dp",), {})] == [{"dp": 8}]
    assert [*meshes(8, 8, BATCH, USUAL, {"tp": 3})] == []
    fixed = {"dp": 2, "fsdp": 2}
    assert [m for m, _ in meshes(8, 8, BATCH, USUAL, fixed)] == [{"dp": 2, "fsdp": 2, "tp": 2}]


def test_other_names_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"a mesh dim called pp: xd\.tune's are dp, fsdp"):
        [*meshes(8, 8, BATCH, (*USUAL, "pp"), {})]


def test_one_device() -> None:
    assert [m for m, _ in meshes(1, 1, BATCH, USUAL, {})] == [{"dp": 1}]
