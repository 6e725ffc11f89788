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
DTYPES = (torch.float32, torch.int64)
FORMS = ("forward", "inplace", "out")
ALL = sorted({entries.full_name(e) for e in entries.op_db() if e.dtypes & {*DTYPES}})


def _check(name: str, mesh: DeviceMesh) -> None:
    """What fails in inference mode fails without it, too."""
    for entry in entries.select(name):
        dtype = next((d for d in DTYPES if d in entry.dtypes), None)
        if dtype is None:  # another entry of that name has one
            continue
        usual = check_entry(entry, dtype, mesh, limit=2, forms=FORMS)
        with torch.inference_mode():
            result = check_entry(entry, dtype, mesh, limit=2, forms=FORMS)
        known = {(f["form"], f["sample"]) for f in usual.failures}
        assert [f for f in result.failures if (f["form"], f["sample"]) not in known] == []


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_compositions(name: str, mesh_2x4: DeviceMesh) -> None:
    _check(name, mesh_2x4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_entry(name: str, mesh_2x4: DeviceMesh) -> None:
    _check(name, mesh_2x4)
