"""The behaviour that torch_xla's public ``test/spmd/test_mp_input_sharding.py`` asks for, and the
loader tests of ``test_xla_sharding.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xla_dtensor.compat.torch_xla.distributed.parallel_loader as pl
import xla_dtensor.compat.torch_xla.distributed.spmd as xs
import xla_dtensor.compat.torch_xla.utils.utils as xu
from tests.compat.torch_xla.models import tiled
from xla_dtensor.compat.torch_xla import _XLAC

spec_of = _XLAC._get_xla_sharding_spec


@pytest.fixture
def mesh() -> xs.Mesh:
    return xs.get_1d_mesh("x")


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(16, 4), "y": torch.randn(16, 4, 2)}


def first(batch: Any, input_sharding: Any) -> Any:
    return next(iter(pl.MpDeviceLoader([batch], "xla", input_sharding=input_sharding)))


def test_a_spec_for_each_key(mesh: xs.Mesh, batch: dict[str, torch.Tensor]) -> None:
    specs = {"x": xs.ShardingSpec(mesh, ("x", None)), "y": xs.ShardingSpec(mesh, ("x", None, None))}
    data = first(batch, specs)
    assert spec_of(data["x"]) == tiled([8, 1]) and spec_of(data["y"]) == tiled([8, 1, 1])
    assert all(torch.equal(data[key].cpu(), batch[key]) for key in batch)
    data = first(batch, {**specs, "y": None})
    assert spec_of(data["y"]) == "" and torch.equal(data["y"].cpu(), batch["y"])


def test_a_single_tensor(mesh: xs.Mesh) -> None:
    assert spec_of(first(torch.randn(16, 4), xs.ShardingSpec(mesh, ("x", None)))) == tiled([8, 1])


def test_a_dict_of_specs_for_a_single_tensor(mesh: xs.Mesh) -> None:
    with pytest.raises(ValueError, match="is a dict"):
        first(torch.randn(16, 4), {"x": xs.ShardingSpec(mesh, ("x", None))})


def test_no_sharding(batch: dict[str, torch.Tensor]) -> None:
    data = first(batch, None)
    assert {spec_of(value) for value in data.values()} == {""}
    assert all(value.device.type == "xla" for value in data.values())


def test_missing_keys(mesh: xs.Mesh, batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(KeyError, match="'y'"):
        first(batch, {"x": xs.ShardingSpec(mesh, ("x", None))})


def test_one_spec_for_all_that_it_fits(mesh: xs.Mesh) -> None:
    data = first(
        {"x": torch.randn(16, 4), "y": torch.randn(16, 4), "z": torch.arange(16)},
        xs.ShardingSpec(mesh, ("x", None)),
    )
    assert spec_of(data["x"]) == spec_of(data["y"]) == tiled([8, 1]) and spec_of(data["z"]) == ""


def test_a_spec_of_another_rank(mesh: xs.Mesh, batch: dict[str, torch.Tensor]) -> None:
    spec = xs.ShardingSpec(mesh, ("x", None))
    with pytest.raises(ValueError, match="2 dims"):
        first(batch, {"x": spec, "y": spec})


@pytest.mark.parametrize("size", [8, 7])
def test_batches_of_images(size: int) -> None:
    mesh = xs.get_1d_mesh("data")
    images, labels = torch.randn(size, 3, 4, 4), torch.zeros(size, dtype=torch.int64)
    loader = pl.MpDeviceLoader(
        xu.SampleGenerator(data=(images, labels), sample_count=3),
        "xla",
        input_sharding=xs.ShardingSpec(mesh, ("data", None, None, None)),
    )
    assert len(loader) == 3 and len(list(loader)) == 3
    data, target = next(iter(loader))
    assert data.shape == (size, 3, 4, 4) and spec_of(data) == tiled([8, 1, 1, 1])
    assert torch.equal(data.cpu(), images) and torch.equal(target.cpu(), labels)


def test_minibatches() -> None:
    mesh = xs.get_1d_mesh("data")
    spec = xs.ShardingSpec(mesh, ("data", None), minibatch=True)
    value = torch.randn(16, 4)
    data = first(value, spec)
    assert spec_of(data) == tiled([8, 1]) and torch.equal(data.cpu(), value)
    with pytest.raises(RuntimeError, match="divisible by local runtime device count"):
        first(torch.randn(7, 4), spec)
