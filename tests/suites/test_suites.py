"""A few of torch's modules in the fast tests, all in the slow ones, and tests of the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.suites.modules import FORMS, check_module, module_db
from tests.suites.optimizers import by_optimizer
from tests.suites.report import render

FAST = ("nn.BatchNorm2d", "nn.Embedding", "nn.LazyConv1d", "nn.MultiMarginLoss")


def cases() -> list[Any]:
    slow = pytest.mark.slow
    return [
        pytest.param(entry, id=entry.name, marks=[] if entry.name in FAST else slow)
        for entry in module_db()
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("entry", cases())
def test_module(entry: Any, mesh_2x4: DeviceMesh) -> None:
    result = check_module(entry, mesh_2x4, limit=2)
    assert not result.failures
    assert {"train forward", "eval forward"} <= set(result.forms) <= set(FORMS)


class _Entry:
    """One of `module_db` whose module does something else on the devices."""

    def __init__(self, name: str, damage: Callable[[nn.Module], None]) -> None:
        (self._entry,) = (entry for entry in module_db() if entry.name == name)
        base = self._entry.module_cls

        class Damaged(base):
            def forward(self, x: torch.Tensor, *args: Any) -> Any:
                if x.device.type == "xla":
                    with torch.no_grad():
                        damage(self)
                return super().forward(x, *args)

        self.module_cls = Damaged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


def _larger(module: Any) -> None:
    module.weight *= 2


def _biased(module: Any) -> None:
    module.running_mean += 1


@pytest.mark.parametrize(
    "name,damage,form",
    [
        ("nn.Linear", _larger, "train forward"),
        ("nn.BatchNorm1d", _biased, "train buffers"),
        ("nn.BatchNorm1d", _biased, "eval forward"),
        ("nn.Linear", lambda module: module.nothing, "eval forward"),
    ],
)
def test_what_is_wrong_is_found(
    name: str, damage: Callable[[nn.Module], None], form: str, mesh_2x4: DeviceMesh
) -> None:
    result = check_module(_Entry(name, damage), mesh_2x4, limit=1)
    assert result.forms[form] != "pass"
    assert form in [failure["form"] for failure in result.failures]


def test_all_of_torchs_entries_are_there() -> None:
    assert len(module_db()) > 100
    assert len(by_optimizer()) >= 12 and sum(map(len, by_optimizer().values())) > 200


def test_the_report_names_what_has_no_reason() -> None:
    common = {"dtype": "float32", "mesh": "2x4", "samples": 2, "limit": 1}
    failure = {"form": "eval forward", "class": "wrong", "text": "7 | 8", "layouts": []}
    sparse = {"form": "forward", "class": "unsupported", "text": "no", "layouts": []}
    records = [
        {"suite": "modules", "name": "nn.A", "forms": {"eval forward": "pass"}, **common},
        {"suite": "modules", "name": "nn.B", "forms": {"eval forward": "wrong"}, **common},
        {"suite": "operations", "name": "to_sparse", "forms": {"forward": "unsupported"}, **common},
    ]
    for record, failures in zip(records, ([], [failure], [sparse]), strict=True):
        record["failures"] = failures
    text = render(records, "commit")
    assert "| float32, 2x4 | eval forward | 2 | 1 | 50.0 % | 0 | 1 |" in text
    assert "| float32, 2x4 | forward | 1 | 0 | 0.0 % | 1 | 0 |" in text
    assert "| modules | nn.B | eval forward, float32 | wrong | **no reason**: 7 \\| 8 |" in text
    assert "dense arrays only" in text
