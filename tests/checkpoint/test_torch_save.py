"""``torch.save`` and ``torch.load(weights_only=True)`` of every kind of xla tensor."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Shard

import xla_dtensor as xd
from tests.checkpoint.layouts import LAYOUTS, laid_out, same, value_of
from tests.conftest import make_mesh

VALUE = torch.arange(60, dtype=torch.float32).reshape(10, 6)


def on_a_submesh() -> Any:
    """Sharded unevenly over tp, another one for each dp."""
    values = [torch.randn(10, 6) for _ in range(8)]
    mesh = make_mesh("2x4")
    local = xd.from_device_values(values, mesh, vary=["dp"])
    return DTensor.from_local(local, mesh["tp"]).redistribute(placements=[Shard(0)])


KINDS: dict[str, Any] = {
    **{name: lambda name=name: laid_out(VALUE, name) for name in [*LAYOUTS, "xla"]},
    "a number": lambda: torch.tensor(2.5, device="xla"),
    "no elements": lambda: laid_out(torch.zeros(0, 3), "rows"),
    "a view": lambda: laid_out(VALUE, "both")[1:4, ::2],
    "bfloat16": lambda: laid_out(VALUE.bfloat16(), "both"),
    "a parameter": lambda: torch.nn.Parameter(laid_out(VALUE, "both")),
    "pending": lambda: DTensor.from_local(torch.ones(3).to("xla"), make_mesh("8"), [Partial()]),
    "varying": lambda: xd.from_device_values([VALUE + i for i in range(8)], make_mesh("2x4")),
    "varying along one": lambda: xd.collectives.axis_index(make_mesh("2x4"), "tp"),
    "varying on a submesh": on_a_submesh,
}


def host(tensor: Any) -> torch.Tensor:
    """Its value, or those of all devices."""
    if getattr(tensor, "_form", None) is not None and tensor._form.varying:
        parts = (
            [s.data for s in tensor.local_shards]
            if isinstance(tensor, DTensor)
            else tensor.local_values()
        )
        return torch.cat([part.reshape(-1) for part in parts])
    return value_of(tensor)


def saved(tensor: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"x": tensor}, file)
    file.seek(0)
    return file


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", [None, "xla", {"xla": "xla"}])
@pytest.mark.parametrize("kind", KINDS)
def test_on_xla(kind: str, where: Any) -> None:
    tensor = KINDS[kind]()
    loaded = torch.load(saved(tensor), map_location=where, weights_only=True)["x"]
    assert type(loaded) is type(tensor) and loaded.requires_grad == tensor.requires_grad
    assert isinstance(loaded, torch.nn.Parameter) == isinstance(tensor, torch.nn.Parameter)
    assert loaded._form.varying == tensor._form.varying
    if isinstance(tensor, DTensor):
        assert loaded.placements == tensor.placements and loaded.device_mesh == tensor.device_mesh
    assert loaded.shape == tensor.shape and same(host(loaded), host(tensor))


@pytest.mark.parametrize("where", ["cpu", torch.device("cpu"), {"xla": "cpu"}, {"xla:0": "cpu"}])
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_cpu(kind: str, where: Any) -> None:
    """Of a tensor that varies, the values of all devices, mesh axes first."""
    tensor = KINDS[kind]()
    loaded = torch.load(saved(tensor), map_location=where, weights_only=True)["x"]
    assert type(loaded) in (torch.Tensor, torch.nn.Parameter) and loaded.device.type == "cpu"
    if not tensor._form.varying:
        assert same(loaded.detach(), value_of(tensor))
    elif kind == "varying":
        assert same(loaded, torch.stack([VALUE + i for i in range(8)]).reshape(2, 4, 10, 6))
    elif kind == "varying along one":
        assert loaded.tolist() == [0, 1, 2, 3]
    else:
        assert loaded.shape == (2, 10, 6)


@pytest.mark.parametrize("kind", ["varying", "varying on a submesh"])
def test_pickle_and_copy_of_what_varies(kind: str) -> None:
    tensor = KINDS[kind]()
    for other in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        assert type(other) is type(tensor) and same(host(other), host(tensor))


def test_in_a_step_it_is_refused() -> None:
    x = KINDS["varying"]()
    step = xd.compile(lambda: pickle.dumps(x))
    with pytest.raises(xd.DataDependentError, match="saving a tensor"):
        step()
