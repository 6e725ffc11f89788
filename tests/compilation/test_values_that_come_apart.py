"""State of which the devices have one value before the first step, and each its own after it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

import xla_dtensor as xd


def test_a_count_is_one_program_from_the_start(mesh_2x4: DeviceMesh) -> None:
    count, own = torch.zeros(2, device="xla"), xd.collectives.axis_index(mesh_2x4, "dp")

    def step(x: torch.Tensor) -> torch.Tensor:
        count.add_(x.sum() * own)
        return x + count.sum()

    compiled, x = xd.compile(step), torch.ones(3, device="xla")
    for i in range(1, 4):
        result = compiled(x)
        assert [t.tolist() for t in count.local_values()[::4]] == [[0, 0], [3 * i, 3 * i]]
        assert [t.tolist() for t in result.local_values()[::4]] == [[1] * 3, [1 + 6 * i] * 3]
    assert compiled.compilations == 1 and compiled.recompilations == []
    count.zero_()
    compiled(x)
    assert [t.tolist() for t in count.local_values()[::4]] == [[0, 0], [3, 3]]
    assert compiled.compilations == 1


@pytest.mark.parametrize("placement", [Shard(0), Partial()])
def test_so_is_a_sharded_one(mesh_2x4: DeviceMesh, placement: Placement) -> None:
    """Laid out along "tp", it varies along "dp" from the first step on."""
    tp, dp = mesh_2x4["tp"], xd.collectives.axis_index(mesh_2x4, "dp")
    count = DTensor.from_local(torch.zeros(2, device="xla"), tp, [placement])

    def step(x: torch.Tensor) -> None:
        count.add_(DTensor.from_local(x + dp, tp, [placement]))

    compiled, x = xd.compile(step), xd.from_device_values([torch.ones(2)] * 4, tp)
    for i in range(1, 4):
        compiled(x)
        own = count.full_tensor().local_values()
        parts = 4 if placement.is_partial() else 1
        size = 8 if placement.is_shard() else 2
        assert own[0].tolist() == [parts * i] * size
        assert own[4].tolist() == [2 * parts * i] * size
    assert compiled.compilations == 1 and compiled.recompilations == []


def test_another_one_has_a_program_of_its_own(mesh_2x4: DeviceMesh) -> None:
    """A tensor that takes the count's place in each step doesn't make a program each time."""
    own, state = xd.collectives.axis_index(mesh_2x4, "dp"), {}

    def step(x: torch.Tensor) -> None:
        state["count"].add_(x * own)

    compiled, x = xd.compile(step), torch.ones(2, device="xla")
    for _ in range(5):
        state["count"] = torch.zeros(2, device="xla")
        compiled(x)
        assert [t.tolist() for t in state["count"].local_values()[::4]] == [[0, 0], [1, 1]]
    assert compiled.compilations <= 2


def test_an_argument_stays_what_it_is(mesh_2x4: DeviceMesh) -> None:
    own = xd.collectives.axis_index(mesh_2x4, "dp")
    compiled = xd.compile(lambda x: x.add_(own))
    for _ in range(3):
        x = torch.ones(2, device="xla")
        compiled(x)
        assert [t.tolist() for t in x.local_values()[::4]] == [[1, 1], [2, 2]]
    assert compiled.compilations == 1


def test_a_step_that_raises_leaves_the_value(mesh_2x4: DeviceMesh) -> None:
    count, own = torch.ones(2, device="xla"), xd.collectives.axis_index(mesh_2x4, "dp")

    def step() -> None:
        count.add_(own)
        raise ValueError("no")

    compiled = xd.compile(step)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            compiled()
        assert count.tolist() == [1, 1]
    assert count.varying == ()
