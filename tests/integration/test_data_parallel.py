"""torch's own names for data parallelism on xla meshes, against CPU torch."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

import xla_dtensor as xd
from tests.parallel.harness import (
    Model,
    averaged_gradients,
    batches,
    check_gradients,
    loss_of,
    per_device,
    reference,
)


@pytest.fixture
def mesh() -> DeviceMesh:
    return xd.init_device_mesh("xla", (4, 2), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("xla")
    yield
    dist.destroy_process_group()


def expected_gradients(inputs: list[torch.Tensor]) -> Model:
    expected = reference()
    averaged_gradients(expected, inputs)
    return expected


# --- fully_shard and replicate -------------------------------------------------------------------


def test_fully_shard(mesh: DeviceMesh) -> None:
    model = reference()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=True)
    assert fully_shard(module=model, mesh=mesh["dp"]) is model
    assert isinstance(model, xd.FSDPModule)
    assert model.out.weight.placements == (xd.Shard(0),)
    inputs = batches(4)
    loss_of(model(per_device(inputs, mesh, ["dp"]))).backward()
    check_gradients(model, expected_gradients(inputs))


def test_policies(mesh: DeviceMesh) -> None:
    model = fully_shard(
        reference(), mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    assert model(per_device(batches(4), mesh, ["dp"])).dtype == torch.bfloat16
    model = fully_shard(reference(), mesh=mesh["dp"], offload_policy=CPUOffloadPolicy())
    inputs = batches(4)
    loss_of(model(per_device(inputs, mesh, ["dp"]))).backward()
    check_gradients(model, expected_gradients(inputs))


def test_hsdp_and_methods_of_modules(mesh: DeviceMesh) -> None:
    model = fully_shard(reference(), mesh=mesh)
    model.loss = lambda x: loss_of(Model.forward(model, x))
    register_fsdp_forward_method(model, "loss")
    inputs = batches(8)
    model.loss(per_device(inputs, mesh, ["dp", "tp"])).backward()
    check_gradients(model, expected_gradients(inputs))


@pytest.mark.parametrize("newer", [False, True])
def test_replicate(mesh: DeviceMesh, newer: bool) -> None:
    if newer:
        from torch.distributed._composable.replicate_with_fsdp import replicate as function

        model = function(reference(), mesh=mesh["dp"])
    else:
        model = replicate(reference(), device_mesh=mesh["dp"])
    assert isinstance(model, xd.parallel.ReplicateModule)
    inputs = batches(4)
    loss_of(model(per_device(inputs, mesh, ["dp"]))).backward()
    check_gradients(model, expected_gradients(inputs))


def test_without_a_mesh(mesh: DeviceMesh) -> None:
    """The current mesh, or the one of all devices, for a module on xla devices."""
    with mesh["dp"]:
        assert replicate(reference())._get_fsdp_state().parameters[0].parallel.size == 4
    model = fully_shard(reference().to("xla"))
    assert model.out.weight.device_mesh.size() == 8


@pytest.mark.usefixtures("default_group")
def test_with_a_default_group() -> None:
    """A module on the CPU, as under torch with a process group."""
    model = fully_shard(reference())
    assert model.out.weight.device_mesh.size() == 8
    ddp = DistributedDataParallel(reference())
    assert ddp.device_mesh.size() == 8 and ddp.module.out.weight.device.type == "xla"


def test_the_first_fsdp_names_the_newer_one(mesh: DeviceMesh) -> None:
    with pytest.raises(xd.UnsupportedOpError, match="fully_shard"):
        FullyShardedDataParallel(nn.Linear(2, 2).to("xla"))
    with pytest.raises(xd.UnsupportedOpError, match="fully_shard"):
        FullyShardedDataParallel(nn.Linear(2, 2), mesh.get_group("dp"))


# --- DistributedDataParallel ---------------------------------------------------------------------


def wrapped(mesh: DeviceMesh, **kwargs: Any) -> DistributedDataParallel:
    return DistributedDataParallel(reference().to("xla"), device_mesh=mesh["dp"], **kwargs)


def test_ddp_steps(mesh: DeviceMesh) -> None:
    """Eagerly and compiled, the steps of CPU torch."""
    for compiled in (False, True):
        ddp, expected = wrapped(mesh, device_ids=None, find_unused_parameters=True), reference()
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        wanted = torch.optim.AdamW(expected.parameters(), lr=0.01)

        def step(x: torch.Tensor, ddp: Any = ddp, optimizer: Any = optimizer) -> None:
            loss_of(ddp(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

        run = xd.compile(step) if compiled else step
        for i in range(3):
            inputs = batches(4, seed=i)
            run(per_device(inputs, mesh, ["dp"]))
            averaged_gradients(expected, inputs)
            wanted.step()
            wanted.zero_grad()
        for own, other in zip(ddp.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(own.detach().cpu(), other.detach(), rtol=1e-4, atol=1e-5)
        if compiled:
            assert not run.recompilations


def test_ddp_is_torchs_class(mesh: DeviceMesh) -> None:
    module = reference().to("xla")
    weight = module.out.weight
    ddp = DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    assert type(ddp) is DistributedDataParallel
    assert ddp.module is module and module.out.weight is weight and ddp.device.type == "xla"
    assert dist.get_world_size(ddp.process_group) == 4
    state = ddp.state_dict()
    assert list(state) == [f"module.{name}" for name in reference().state_dict()]
    other = wrapped(mesh)
    with torch.no_grad():
        other.module.out.weight.zero_()
    other.load_state_dict(state)
    torch.testing.assert_close(other.module.out.weight.cpu(), weight.cpu())

    class Own(DistributedDataParallel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    own = Own(reference().to("xla"), device_mesh=mesh["dp"])
    x = per_device(batches(4), mesh, ["dp"])
    assert own.blocks is own.module.blocks
    torch.testing.assert_close(own(x).local_values(), (2 * wrapped(mesh)(x)).local_values())


def test_ddp_in_no_sync(mesh: DeviceMesh) -> None:
    """A compiled step sees that it is inside."""
    ddp, expected = wrapped(mesh), reference()
    inputs = [batches(4, seed=i) for i in range(3)]

    @xd.compile
    def step(x: torch.Tensor) -> None:
        (loss_of(ddp(x)) / 3).backward()

    with ddp.no_sync():
        for own in inputs[:2]:
            step(per_device(own, mesh, ["dp"]))
            assert ddp.module.out.weight.grad.varying == ("dp",)
    step(per_device(inputs[2], mesh, ["dp"]))
    assert ddp.module.out.weight.grad.varying == ()
    averaged_gradients(expected, [x for own in inputs for x in own])
    check_gradients(ddp.module, expected)


def test_ddp_starts_from_the_first_devices_values(mesh: DeviceMesh) -> None:
    values = [torch.full((2,), float(i)) for i in range(4)]

    def module() -> nn.Module:
        made = nn.Linear(2, 2).to("xla")
        made.bias = nn.Parameter(xd.from_device_values(values, mesh["dp"]))
        made.register_buffer("own", xd.from_device_values(values, mesh["dp"]))
        return made

    ddp = DistributedDataParallel(module(), device_mesh=mesh["dp"])
    assert ddp.module.bias.tolist() == ddp.module.own.tolist() == [0, 0]
    ddp = DistributedDataParallel(module(), device_mesh=mesh["dp"], init_sync=False)
    assert ddp.module.bias.varying == ddp.module.own.varying == ("dp",)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        ddp = DistributedDataParallel(module(), device_mesh=mesh["dp"], broadcast_buffers=False)
    assert ddp.module.bias.varying == () and ddp.module.own.varying == ("dp",)
    made = module()
    made._ddp_params_and_buffers_to_ignore = ["bias", "own"]
    ddp = DistributedDataParallel(made, device_mesh=mesh["dp"])
    assert made.bias.varying == made.own.varying == ("dp",)
    ddp(per_device([torch.ones(1, 2)] * 4, mesh, ["dp"])).square().sum().backward()
    assert made.weight.grad.varying == () and made.bias.grad.varying == ("dp",)


def test_ddp_refuses(mesh: DeviceMesh) -> None:
    with pytest.raises(RuntimeError, match="Only 1D device mesh"):
        DistributedDataParallel(reference().to("xla"), device_mesh=mesh)
    with pytest.raises(RuntimeError, match="Cannot specify both"):
        DistributedDataParallel(
            reference().to("xla"), device_mesh=mesh["dp"], process_group=mesh.get_group("dp")
        )
    with pytest.raises(RuntimeError, match="not needed"):
        DistributedDataParallel(nn.ReLU(), device_mesh=mesh["dp"])
    with pytest.raises(xd.UnsupportedOpError, match=r"mp_policy=xla_dtensor.MixedPrecisionPolicy"):
        wrapped(mesh, mixed_precision=object())
    ddp = wrapped(mesh)
    with pytest.raises(xd.UnsupportedOpError, match="reduction"):
        ddp.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(xd.UnsupportedOpError, match="batches of all devices"), ddp.join():
        pass
    with pytest.raises(xd.UnsupportedOpError, match=r"xla_dtensor\.replicate"):
        copy.deepcopy(ddp)
    with pytest.raises(AssertionError, match="already been applied"):
        DistributedDataParallel(ddp.module, device_mesh=mesh["dp"])


_OTHERS = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel
import xla_dtensor as xd

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
on_xla = xd.init_device_mesh("xla", (8,))
mesh = torch.distributed.init_device_mesh("cpu", (1,))
ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
ddp(torch.ones(1, 2)).sum().backward()
assert ddp.module.weight.grad.device.type == "cpu" and ddp.reducer is not None
model = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
assert not isinstance(model, xd.FSDPModule) and fully_shard.state(model) is not None
model(torch.ones(1, 2)).sum().backward()
model = replicate(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
assert not isinstance(model, xd.FSDPModule)
assert isinstance(fully_shard(torch.nn.Linear(8, 8), mesh=on_xla), xd.FSDPModule)
assert isinstance(replicate(torch.nn.Linear(8, 8), device_mesh=on_xla), xd.parallel.ReplicateModule)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_other_devices_keep_torchs() -> None:
    """Also where the names were imported before the package."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", _OTHERS], check=True)
