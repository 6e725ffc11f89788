"""transformers' models, unmodified: loss and gradients are CPU torch's, by two layouts."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="it isn't installed: make test-transformers")

import xla_dtensor as xd
from tests.transformers import harness
from tests.transformers.architectures import ALL, Architecture
from tests.transformers.table import LIMIT

FAST = {"Llama", "GPT-2", "BERT"}
ROWS = [
    pytest.param(one, id=one.name, marks=() if one.name in FAST else pytest.mark.slow)
    for one in ALL
]
# Their plans cut two weights that lie in one tensor so that a device has a piece of each, which is
# no contiguous block.
REFUSED = {"Mixtral"}
# Whatever a model warns of: transformers is pinned.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("architecture", ROWS)
def test_by_size(architecture: Architecture) -> None:
    mesh = xd.init_device_mesh("xla", (2, 2), mesh_dim_names=("dp", "tp"))
    model, batch = harness.by_size(architecture, mesh)
    found = harness.run(model, batch)
    off = harness.difference(found, harness.on_cpu(architecture), model)
    assert off.sharded[0] > 0 and off.loss < 1e-5 and off.gradient < LIMIT, off


@pytest.mark.parametrize("architecture", ROWS)
def test_by_its_own_plan(architecture: Architecture) -> None:
    if not harness.has_plan(architecture):
        pytest.skip("the class has no plan")
    mesh = xd.init_device_mesh("xla", (2,), mesh_dim_names=("tp",))
    if architecture.name in REFUSED:
        with pytest.raises(xd.PlacementError, match=r"_StridedShard\(dim=1, sf=2\)"):
            harness.by_plan(architecture, mesh)
        return
    model, batch = harness.by_plan(architecture, mesh)
    found = harness.run(model, batch)
    off = harness.difference(found, harness.on_cpu(architecture), model)
    assert off.sharded[0] > 0 and off.loss < 1e-5 and off.gradient < LIMIT, off


@pytest.mark.slow
def test_eagerly() -> None:
    architecture = next(one for one in ALL if one.name == "Llama")
    mesh = xd.init_device_mesh("xla", (2, 2), mesh_dim_names=("dp", "tp"))
    model, batch = harness.by_size(architecture, mesh)
    found = harness.run(model, batch, compiled=False)
    off = harness.difference(found, harness.on_cpu(architecture), model)
    assert off.loss < 1e-5 and off.gradient < LIMIT, off
