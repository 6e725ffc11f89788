"""What several processes make of values and models that differ from process to process: what torch
makes of them with gloo, or `DivergenceError` where torch's ranks are left with different values of
what counts as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import launch
from tests.runtime.programs.sources import DEVICES, PLACEMENTS, REFUSED

PROGRAM = "tests.runtime.programs.sources"


def found(folder: Path, device: str, count: int, processes: int) -> dict[str, Any]:
    """By case and name, what each device has."""
    run = launch.run(["-m", PROGRAM, str(folder), device, str(count)], processes, 200)
    assert all(o.rstrip().endswith("all of it") for o in launch.succeeded(run))
    own = [torch.load(folder / f"{device}.{count}.{i}.pt") for i in range(processes)]
    joined: dict[str, Any] = {}
    for case, first in own[0].items():
        parts = [one[case] for one in own]
        if REFUSED in parts:
            assert parts == [REFUSED] * processes, case
            joined[case] = REFUSED
        else:
            joined[case] = {
                name: {i: v for part in parts for i, v in part[name].items()} for name in first
            }
    return joined


def is_one_tensor(case: str, values: dict[int, torch.Tensor]) -> bool:
    """Whether torch's ranks that hold the same part have the same elements."""
    layout = case.split()[1]
    a, b = (layout in ("rows", "both", "nested"), layout in ("columns", "both", "nested"))
    if layout == "partial":  # dumped as a whole
        a = b = False
    held: dict[Any, torch.Tensor] = {}
    for device, value in values.items():
        part = (device // 2 if a else 0, device % 2 if b else 0)
        if not torch.equal(held.setdefault(part, value), value):
            return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_as_under_torch(count: int, tmp_path: Path) -> None:
    wanted, ours = found(tmp_path, "cpu", count, DEVICES), found(tmp_path, "xla", count, count)
    assert wanted.keys() == ours.keys()
    assert len(wanted) > 3 * len(PLACEMENTS)
    refused = {case for case, value in ours.items() if value == REFUSED}
    differs = set()
    for case, tensors in wanted.items():
        if case.endswith("None") and not is_one_tensor(case, tensors[""]):
            differs.add(case)
        if case in refused:
            continue
        assert tensors.keys() == ours[case].keys()
        for name, values in tensors.items():
            assert values.keys() == ours[case][name].keys() == set(range(DEVICES))
            for device, value in values.items():
                own = ours[case][name][device]
                assert own.dtype == value.dtype and torch.equal(own, value), (case, name, device)
    # Uneven rows that both mesh dims share lie elsewhere than torch's, and the value is kept of a
    # Partial, not torch's parts of it: both have to be the same.
    strict = ("nested None", "partial None")
    assert refused - differs <= {case for case in wanted if case.endswith(strict)}
    assert differs <= refused and differs
