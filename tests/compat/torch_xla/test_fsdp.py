"""The behaviour that torch_xla's public ``test/spmd/test_fsdp_v2.py`` asks for."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import xla_dtensor.compat.torch_xla as torch_xla
import xla_dtensor.compat.torch_xla.distributed.spmd as xs
from tests.compat.torch_xla.models import TwoLayers, mesh_of, tiled
from xla_dtensor.compat.torch_xla import _XLAC
from xla_dtensor.compat.torch_xla.distributed.fsdp import checkpoint_module
from xla_dtensor.compat.torch_xla.distributed.fsdp.wrap import (
    always_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from xla_dtensor.compat.torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)

spec_of = _XLAC._get_xla_sharding_spec
LINEAR = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})


@pytest.fixture(autouse=True)
def _no_global_mesh() -> Any:
    yield
    xs.set_global_mesh(None)


@pytest.fixture
def mesh() -> xs.Mesh:
    return mesh_of((8, 1), ("fsdp", "tensor"))


def wrapped(model: Any, mesh: xs.Mesh, **kwargs: Any) -> FSDPv2:
    model.fc1 = FSDPv2(model.fc1, mesh=mesh, **kwargs)
    model.fc2 = FSDPv2(model.fc2, mesh=mesh, **kwargs)
    return FSDPv2(model, mesh=mesh, **kwargs)


def test_basic_and_correct(mesh: xs.Mesh) -> None:
    plain = TwoLayers()
    model = wrapped(copy.deepcopy(plain).to("xla"), mesh)
    assert spec_of(model.fc1.weight) == spec_of(model.fc2.weight) == tiled([1, 8])
    data = torch.randn(16, 16)
    x = xs.mark_sharding(data.to("xla"), mesh, ("fsdp", None))
    output = model(x)
    assert spec_of(output) == tiled([8, 1])
    torch.testing.assert_close(output.cpu(), plain(data))
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain))
    output.sum().backward()
    plain(data).sum().backward()
    optimizer.step()
    expected.step()
    torch.testing.assert_close(model.fc1.weight.cpu(), plain.fc1.weight)
    torch.testing.assert_close(model.fc2.bias.cpu(), plain.fc2.bias)
    assert spec_of(model.fc1.weight) == tiled([1, 8])
    assert spec_of(model.fc1.weight.grad) == tiled([1, 8])


def test_a_compiled_step(mesh: xs.Mesh) -> None:
    plain = TwoLayers()
    model = FSDPv2(copy.deepcopy(plain), mesh, auto_wrap_policy=LINEAR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.05)

    @torch_xla.compile
    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(3):
        data = torch.randn(16, 16)
        loss = plain(data).square().mean()
        loss.backward()
        expected.step()
        expected.zero_grad()
        x = xs.mark_sharding(data.to("xla"), mesh, ("fsdp", None))
        torch.testing.assert_close(step(x).cpu(), loss.detach())
    assert step.compilations <= 2  # the first one makes the optimizer's state
    assert optimizer.state[model.fc1.weight]["exp_avg"].partition_spec == (None, 0)
    torch.testing.assert_close(model.fc1.weight.cpu(), plain.fc1.weight, rtol=1e-4, atol=1e-5)


def test_auto_wrap(mesh: xs.Mesh) -> None:
    model = FSDPv2(TwoLayers().to("xla"), mesh=mesh, auto_wrap_policy=LINEAR)
    assert isinstance(model.fc1, FSDPv2) and isinstance(model.fc2, FSDPv2)
    assert model.module.fc1 is model.fc1 and len(list(model.parameters())) == 4
    everything = FSDPv2(nn.Sequential(nn.Linear(4, 4)), mesh, auto_wrap_policy=always_wrap_policy)
    assert isinstance(everything[0], FSDPv2)


def test_auto_wrap_by_size(mesh: xs.Mesh) -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    model = FSDPv2(TwoLayers(), mesh, auto_wrap_policy=policy)
    assert isinstance(model.fc1, FSDPv2) and isinstance(model.fc2, nn.Linear)


def test_auto_wrap_callable(mesh: xs.Mesh) -> None:
    model = FSDPv2(
        TwoLayers().to("xla"),
        mesh=mesh,
        auto_wrap_policy=LINEAR,
        auto_wrapper_callable=lambda module, *args, **kwargs: module,
    )
    assert type(model.fc1) is nn.Linear and type(model.fc2) is nn.Linear


def test_global_mesh(mesh: xs.Mesh) -> None:
    with pytest.raises(ValueError, match="No mesh"):
        FSDPv2(TwoLayers().to("xla"))
    xs.set_global_mesh(mesh)
    assert FSDPv2(TwoLayers().to("xla"))._mesh is mesh


def test_a_model_on_the_cpu_is_brought_to_the_devices(mesh: xs.Mesh) -> None:
    xs.set_global_mesh(mesh)
    model = FSDPv2(TwoLayers())
    assert str(next(model._orig_module.parameters()).device) == "xla:0"


def test_several_slices() -> None:
    mesh = mesh_of((2, 4, 1), ("data", "fsdp", "tensor"))
    plain = TwoLayers()
    model = FSDPv2(copy.deepcopy(plain).to("xla"), mesh=mesh, extra_data_axis="data")
    text = tiled([1, 4], [0, 4, 1, 5, 2, 6, 3, 7], copies=2)
    assert spec_of(model.fc1.weight) == spec_of(model.fc2.weight) == text
    data = torch.randn(16, 16)
    x = xs.mark_sharding(data.to("xla"), mesh, (("data", "fsdp"), None))
    output = model(x)
    assert spec_of(x) == spec_of(output) == tiled([8, 1])
    torch.testing.assert_close(output.cpu(), plain(data))


def test_errors(mesh: xs.Mesh) -> None:
    xs.set_global_mesh(mesh_of((2, 4, 1), ("data", "fsdp", "tensor")))
    with pytest.raises(ValueError, match="The provided ddp axis is not in the mesh"):
        FSDPv2(TwoLayers().to("xla"), extra_data_axis="ddp")
    with pytest.raises(ValueError, match="named 'fsdp'"):
        FSDPv2(TwoLayers(), mesh_of((8,), ("x",)))
    with pytest.raises(RuntimeError, match="already wrapped"):
        FSDPv2(FSDPv2(TwoLayers(), mesh), mesh)
    with pytest.raises(RuntimeError, match="forward"):
        FSDPv2(nn.ModuleList([nn.Linear(2, 2)]), mesh)

    class Named(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"x": x}

    with pytest.raises(RuntimeError, match="shard_output"):
        FSDPv2(Named(), mesh)(torch.ones(8, 4, device="xla"))


def test_shard_output(mesh: xs.Mesh) -> None:
    seen = []

    def shard(output: Any, mesh: Any) -> None:
        seen.append(mesh)
        xs.mark_sharding(output, mesh, (None, "fsdp"))

    model = FSDPv2(nn.Linear(16, 8), mesh, shard)
    assert spec_of(model(torch.ones(4, 16, device="xla"))) == tiled([1, 8]) and seen == [mesh]


def test_gradient_checkpointing(mesh: xs.Mesh) -> None:
    plain = TwoLayers()
    model = copy.deepcopy(plain)
    model.fc1 = FSDPv2(checkpoint_module(model.fc1), mesh)  # type: ignore[assignment]
    model = FSDPv2(model, mesh)  # type: ignore[assignment]
    data = torch.randn(8, 16)
    model(xs.mark_sharding(data.to("xla"), mesh, ("fsdp", None))).square().sum().backward()
    plain(data).square().sum().backward()
    torch.testing.assert_close(model.fc1.weight.grad.cpu(), plain.fc1.weight.grad)
