"""``xd.replicate``: gradients averaged over data-parallel devices, whole parameters on each."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

import xla_dtensor as xd
from tests.parallel.harness import (
    EPS,
    DataParallelMeshDims,
    Model,
    averaged_gradients,
    batches,
    check_gradients,
    check_parameters,
    collectives,
    full,
    loss_of,
    per_device,
    reference,
    sizes,
    tensor_parallel,
)
from xla_dtensor.parallel import ReplicateModule


@pytest.fixture
def mesh() -> DeviceMesh:
    return xd.init_device_mesh("xla", (4,), mesh_dim_names=("dp",))


def test_signature_of_torch() -> None:
    own = inspect.signature(xd.replicate).parameters
    for name, parameter in inspect.signature(torch_replicate).parameters.items():
        assert own[name].kind == parameter.kind
        assert own[name].default == parameter.default


def test_compiled_steps(mesh: DeviceMesh) -> None:
    """The same steps as CPU torch; one all-reduce per gradient."""
    model, expected = xd.replicate(reference(), device_mesh=mesh), reference()
    assert type(model).__name__ == "DDPModel" and isinstance(model, Model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS)
    wanted = torch.optim.AdamW(expected.parameters(), lr=0.01, eps=EPS)

    @xd.compile
    def step(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for i in range(3):
        inputs = batches(4, seed=i)
        step(per_device(inputs, mesh, ["dp"]))
        averaged_gradients(expected, inputs)
        wanted.step()
        wanted.zero_grad()
    check_parameters(model, expected)
    assert step.compilations == 1
    assert collectives(step) == {"all-reduce": Counter(sizes(expected).values())}
    # Parameters and optimizer state are whole on each device.
    analysis = step.compiled_programs()[-1].memory_analysis()
    assert analysis.argument_size_in_bytes >= 3 * 4 * sum(sizes(expected).values())


@pytest.mark.parametrize("compiled", [False, True])
def test_accumulation(mesh: DeviceMesh, compiled: bool) -> None:
    """As in DDP: what isn't reduced is each device's own ``.grad``."""
    model, expected = xd.replicate(reference(), mesh=mesh), reference()
    own = [copy.deepcopy(expected) for _ in range(4)]

    def micro(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()

    run = xd.compile(micro) if compiled else micro
    for _ in range(2):
        for i in range(3):
            inputs = batches(4, seed=i)
            model.set_requires_gradient_sync(i == 2)
            run(per_device(inputs, mesh, ["dp"]))
            averaged_gradients(expected, inputs)
            for device, x in zip(own, inputs, strict=True):
                loss_of(device(x)).backward()
            if i < 2:
                locals_ = model.out.weight.grad.local_values()
                for value, device in zip(locals_, own, strict=True):
                    torch.testing.assert_close(value, device.out.weight.grad)
        check_gradients(model, expected)
        for one in (model, expected, *own):
            one.zero_grad()
    if compiled:
        assert run.compilations == 3


@pytest.mark.parametrize("compiled", [False, True])
def test_meta_device(mesh: DeviceMesh, compiled: bool) -> None:
    """Parameters that get their memory after `replicate` are on one device until they are used."""
    with torch.device("meta"):
        model = Model()
    xd.replicate(model, device_mesh=mesh)
    model.to_empty(device="xla")
    expected = reference()
    model.load_state_dict(expected.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS)
    wanted = torch.optim.AdamW(expected.parameters(), lr=0.01, eps=EPS)

    def step(inputs: torch.Tensor) -> None:
        loss_of(model(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    call = xd.compile(step) if compiled else step
    for _ in range(3):
        inputs = batches(4)
        call(per_device(inputs, mesh, ["dp"]))
        averaged_gradients(expected, inputs)
        wanted.step()
        wanted.zero_grad()
    check_parameters(model, expected)
    if isinstance(call, xd.CompiledStep):
        assert call.recompilations == []


def test_tensor_parallel() -> None:
    root = xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("dp", "tp"))
    model, expected = reference().to("xla"), reference()
    tensor_parallel(model, root["tp"])
    xd.replicate(model, device_mesh=root["dp"], bucket_cap_mb=25)
    assert model.blocks[0].up.weight.placements == (Shard(0),)
    assert not isinstance(model.inp.weight, DTensor)

    @xd.compile
    def step(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()

    inputs = batches(4)
    step(per_device(inputs, root, ["dp"]))
    averaged_gradients(expected, inputs)
    check_gradients(model, expected)
    found = collectives(step)
    assert set(found) == {"all-reduce"}
    for name, count in sizes(expected).items():
        assert found["all-reduce"][count // 2 if "blocks" in name else count] >= 1


@pytest.mark.parametrize("sync", [True, False])
def test_global_view(mesh: DeviceMesh, sync: bool) -> None:
    """The gradient of a global loss is one for all devices, reduced or not."""
    model, expected = xd.replicate(reference(), mesh=mesh), reference()
    model.set_requires_gradient_sync(sync)

    @xd.compile
    def step(x: torch.Tensor) -> None:
        loss_of(model(x)).backward()

    x = torch.cat(batches(4))
    step(distribute_tensor(x, mesh, [Shard(0)]))
    loss_of(expected(x)).backward()
    check_gradients(model, expected)
    assert collectives(step) == {"all-reduce": Counter(sizes(expected).values())}


def test_dp_mesh_dims() -> None:
    mesh = xd.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=("a", "b", "tp"))
    model = distribute_module(nn.Linear(4, 8), mesh)
    expected = copy.deepcopy(nn.Linear(4, 8))
    expected.load_state_dict({n: full(p) for n, p in model.named_parameters()})
    xd.replicate(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate=("a", "b")))
    x = torch.randn(8, 4)
    over = [Shard(0), Shard(0), Replicate()]
    loss_of(model(distribute_tensor(x, mesh, over))).backward()
    (loss_of(expected(x)) / 4).backward()
    check_gradients(model, expected)


def test_mixed_precision(mesh: DeviceMesh) -> None:
    expected = nn.Linear(4, 8)
    model = copy.deepcopy(expected)
    policy = xd.MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    xd.replicate(model, mesh=mesh, mp_policy=policy)
    output = model(per_device(batches(4), mesh, ["dp"]))
    assert output.dtype == torch.float64
    loss_of(output).backward()
    averaged_gradients(expected, batches(4))
    check_gradients(model, expected)
    assert model.weight.grad.dtype == torch.float32


def test_ignored_modules(mesh: DeviceMesh) -> None:
    model, expected = reference(), reference()
    model.blocks[0].to("xla")
    before = [*model.blocks[0].parameters()]
    xd.replicate(model, [model.blocks[0]], mesh=mesh, ignored_params={model.out.weight})
    assert [*model.blocks[0].parameters()] == before
    assert model.out.weight.device.type == "cpu"
    model.out.to("xla")
    loss_of(model(per_device(batches(4), mesh, ["dp"]))).backward()
    averaged_gradients(expected, batches(4))
    torch.testing.assert_close(full(model.inp.weight.grad), expected.inp.weight.grad)
    # Each device's own.
    values = model.blocks[0].up.weight.grad.local_values()
    assert len(values) == 4 and not torch.equal(values[0], values[1])
    torch.testing.assert_close(sum(values) / 4, expected.blocks[0].up.weight.grad)


def test_errors(mesh: DeviceMesh) -> None:
    both = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")
    sharded = xd.fully_shard(nn.Linear(4, 4), mesh=mesh)
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"device_mesh": both}, ValueError, "expects a 1D DeviceMesh"),
        ({"mesh": both, "dp_mesh_dims": dims}, ValueError, "requires replicate-only dims"),
        ({"process_group": object()}, xd.UnsupportedOpError, "device_mesh="),
        ({"offload_policy": CPUOffloadPolicy()}, xd.UnsupportedOpError, "CPUOffloadPolicy"),
        ({"nonsense": 1}, TypeError, "nonsense"),
        ({"device_id": "0"}, RuntimeError, "device_id"),
    ]
    for options, error, match in cases:
        with pytest.raises(error, match=match):
            xd.replicate(nn.Linear(4, 4), **options)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        xd.replicate(sharded, mesh=mesh)
    model = xd.replicate(nn.Linear(4, 4), mesh=mesh)
    assert isinstance(model, ReplicateModule)
    with pytest.raises(xd.UnsupportedOpError, match="register_comm_hook"):
        model.register_comm_hook(None, lambda *args: None)
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model)
