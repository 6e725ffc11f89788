"""What XLA makes whole on its way between shardings, with the user's line."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd
from xla_dtensor.debug import _rematerializations

COLUMNS, BOTH = [Shard(1), Shard(1)], [Shard(1), Shard(0)]


def test_the_line_is_the_users(mesh_2x4: DeviceMesh) -> None:
    line = sys._getframe().f_lineno + 3

    def step(x: Any) -> Any:
        return (x * 2).redistribute(placements=COLUMNS).sin().redistribute(placements=BOTH)

    compiled = xd.compile(step)
    x = distribute_tensor(torch.randn(5, 5), mesh_2x4, BOTH)
    found = xd.debug.rematerializations(compiled, x)
    assert f"{__file__}:{line}" in [each.at for each in found]
    for each in found:
        assert each.source != each.target and each.source.startswith("{devices=[")
        assert each.bytes == 4 * torch.Size(each.shape).numel() and each.operation
    assert compiled.traces == compiled.compilations == 0  # nothing has happened here


def test_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"is no compiled step; xd\.compile it first"):
        xd.debug.rematerializations(lambda x: x, 1)


@pytest.mark.slow
def test_a_program_of_other_devices() -> None:
    with pytest.raises(xd.UnsupportedOpError, match="doesn't compile for simulated CPU devices"):
        _rematerializations._compiled("module {", 8)


PROGRAM = """HloModule jit_step, num_partitions=8

FileNames
1 "train.py"
2 "{ours}"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=3 end_line=3 column=4 end_column=4}}
2 {{file_name_id=1 function_name_id=1 line=7 end_line=9 column=4 end_column=4}}
3 {{file_name_id=2 function_name_id=2 line=5 end_line=5 column=4 end_column=4}}

StackFrames
1 {{file_location_id=1 parent_frame_id={first}}}
2 {{file_location_id=2 parent_frame_id={second}}}
3 {{file_location_id=3 parent_frame_id={third}}}

ENTRY %main
"""


@pytest.mark.parametrize("offset", [0, 1])
def test_frames(offset: int) -> None:
    """Frames of the package lead to the user's above them, whichever way XLA counts."""
    numbers = {"first": offset, "second": 1 + offset, "third": 1 + offset}
    frames = _rematerializations._Frames(PROGRAM.format(ours=xd.__file__, **numbers))
    assert [frames.users_line(number) for number in (1, 2, 3, 9)] == [
        "train.py:3",
        "train.py:7",
        "train.py:3",
        None,
    ]
