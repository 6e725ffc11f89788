"""op_db in inference mode, where autograd takes nothing apart."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.conformance import entries
from tests.conformance.check import check_entry

# Compositions of torch's that look at values, or choose by them.
NAMES = (
    "combinations",
    "cov",
    "histogramdd",
    "linalg.norm",
    "native_batch_norm",
    "nn.functional.batch_norm",
    "nn.functional.ctc_loss",
    "nn.functional.instance_norm",
    "nn.functional.one_hot",
    "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention",
    "nonzero",
    "tensor_split",
)
ALL = sorted({entries.full_name(entry) for entry in entries.op_db()})


def _check(name: str, mesh: DeviceMesh, limit: int) -> None:
    for entry in entries.select(name):
        dtype = torch.float32 if torch.float32 in entry.dtypes else torch.int64
        if dtype not in entry.dtypes:
            continue
        usual = check_entry(entry, dtype, mesh, limit, forms=("forward", "inplace", "out"))
        with torch.inference_mode():
            result = check_entry(entry, dtype, mesh, limit, forms=("forward", "inplace", "out"))
        known = {(f["form"], f["sample"]) for f in usual.failures}
        assert [f for f in result.failures if (f["form"], f["sample"]) not in known] == []


@pytest.mark.parametrize("name", NAMES)
def test_compositions(name: str, mesh_2x4: DeviceMesh) -> None:
    _check(name, mesh_2x4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_entry(name: str, mesh_2x4: DeviceMesh) -> None:
    _check(name, mesh_2x4, 2)
