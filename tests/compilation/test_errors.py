"""Mistakes inside a compiled step: the exception, the user's line, and state left unharmed."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import xla_dtensor as xd


def uses_item(x: torch.Tensor) -> torch.Tensor:
    return x * int(x.sum().item())


def uses_if(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def uses_nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero().sum()


def uses_mask(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].sum()


def uses_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy()).sum()


def uses_print(x: torch.Tensor) -> list:
    return x.tolist()


def uses_seed(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand_like(x)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (uses_item, "return x * int(x.sum().item())"),
        (uses_if, "if x.sum() > 0:"),
        (uses_nonzero, "return x.nonzero().sum()"),
        (uses_mask, "return x[x > 0].sum()"),
        (uses_numpy, "return torch.from_numpy(x.numpy()).sum()"),
        (uses_print, "return x.tolist()"),
        (uses_seed, "torch.manual_seed(0)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_data_dependent_python_shows_the_line(mesh_2x4: DeviceMesh, function, line: str) -> None:
    x = distribute_tensor(torch.randn(8), mesh_2x4, [Shard(0), Replicate()])
    with pytest.raises(xd.DataDependentError) as error:
        xd.compile(function)(x)
    message = str(error.value)
    assert f"{__file__}:" in message and message.count(line) == 1, message
    assert "torch.where" in message
    function(x)  # eagerly there is nothing wrong with it


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_torchscript_runs_is_refused_in_our_words() -> None:
    """Its interpreter raises an error of its own, with nothing of the one that it has met."""
    scripted = torch.jit.script(uses_if)
    x = torch.ones(4, device="xla")
    with pytest.raises(xd.DataDependentError, match=r"torch\.where") as error:
        xd.compile(lambda x: scripted(x))(x)
    assert f"{__file__}:" in str(error.value) and "if x.sum() > 0" in str(error.value.__cause__)
    assert torch.equal(scripted(x).cpu(), torch.ones(4))


COUNTER = torch.zeros(1)
SAME = COUNTER[:]


def counts_on_the_cpu(x: torch.Tensor) -> torch.Tensor:
    COUNTER.add_(1)
    return x + SAME


def draws_on_the_cpu(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(8)


@pytest.mark.parametrize(
    ("function", "line"),
    [(counts_on_the_cpu, "return x + SAME"), (draws_on_the_cpu, "return x + torch.rand(8)")],
    ids=["write", "random"],
)
def test_what_would_happen_on_the_cpu_only_once(mesh_2x4: DeviceMesh, function, line: str) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()])
    with pytest.raises(xd.DataDependentError, match="CPU") as error:
        xd.compile(function)(x)
    assert line in str(error.value)
    assert COUNTER.item() == 0


def test_constants_on_the_cpu_are_fine(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()])

    def step(x: torch.Tensor) -> torch.Tensor:
        scale = torch.zeros(8)
        scale[2:] = 3.0
        return x * scale.add_(1)

    assert xd.compile(step)(x).cpu().tolist() == [1.0] * 2 + [4.0] * 6


def test_sizes_and_masks_made_from_sizes_are_no_data(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(4, 4), mesh_2x4, [Shard(0), Replicate()])

    def step(x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[0], x.shape[1], device=x.device).triu(1)
        return x * 2 if bool((mask == 0).any()) else x

    assert xd.compile(step)(x).cpu().tolist() == [[2.0] * 4] * 4


CONSTANTS = {
    "equal": lambda x: x * 2 if torch.equal(*[torch.ones(2, device=x.device)] * 2) else x,
    "allclose": lambda x: x * 2 if torch.allclose(*[torch.zeros(2, device=x.device)] * 2) else x,
    "nonzero": lambda x: x[torch.nonzero(torch.arange(4, device=x.device) > 1)[:, 0]],
    "bincount": lambda x: x + torch.arange(4, device=x.device).bincount(),
    "cov": torch.cov,
    "corrcoef": torch.corrcoef,
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_what_is_made_of_constants_is_no_data(name: str, mesh_2x4: DeviceMesh) -> None:
    """CPU torch computes it while the step is traced; once for all calls."""
    torch.manual_seed(0)
    step = xd.compile(CONSTANTS[name])
    for _ in range(2):
        value = torch.randn(4, 4)
        x = distribute_tensor(value, mesh_2x4, [Shard(0), Replicate()])
        torch.testing.assert_close(step(x).full_tensor().cpu(), CONSTANTS[name](value))
    assert len(step.compiled_programs()) == 1


def test_a_failed_trace_changes_nothing(mesh_2x4: DeviceMesh) -> None:
    model = nn.Linear(4, 4)
    xd.distribute_module(model, mesh_2x4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [p.detach().cpu() for p in model.parameters()]
    x = distribute_tensor(torch.randn(8, 4), mesh_2x4, [Shard(0), Replicate()])
    fail = True

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if fail:
            raise ZeroDivisionError("on purpose")
        return loss

    compiled = xd.compile(step)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        compiled(x)
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["capturable"] is False
    for old, parameter in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), old, rtol=0, atol=0)
    fail = False
    assert torch.isfinite(compiled(x).cpu())
    assert (model.weight + 1).cpu().shape == (4, 4)


def test_tensors_of_two_root_meshes(mesh_2x4: DeviceMesh) -> None:
    other_mesh = xd.init_device_mesh("xla", (2,), mesh_dim_names=("x",))
    captured = distribute_tensor(torch.ones(8), other_mesh, [Shard(0)])
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()])

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sum() + captured.sum().full_tensor()

    with pytest.raises(xd.MeshMismatchError) as error:
        xd.compile(step)(x)
    message = str(error.value)
    assert "the compiled step uses tensors of" in message
    assert "[0, 1, 2, 3, 4, 5, 6, 7]" in message and "[0, 1]" in message
    assert "return x.sum() + captured.sum().full_tensor()" in message
    assert "redistribute the tensor" in message
    with pytest.raises(xd.MeshMismatchError, match="inside a compiled step"):
        xd.compile(lambda x: x.redistribute(other_mesh, [Shard(0)]))(x)


def test_an_op_without_a_lowering_is_named(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(4, 4), mesh_2x4, [Shard(0), Replicate()])
    with pytest.raises(xd.UnsupportedOpError) as error:
        torch.ops.aten._sparse_semi_structured_linear(x, x, x)
    assert "aten::_sparse_semi_structured_linear.default has no lowering to XLA" in str(error.value)
    assert "xla_dtensor/lowering/README.md" in str(error.value)


@pytest.mark.parametrize("way", ["result", "gradient"])
def test_a_model_without_memory(way: str, mesh_2x4: DeviceMesh) -> None:
    """Steps of what was made on the meta device raise, and run once it has memory."""
    with torch.device("meta"):
        model = nn.Linear(4, 8)
    model = distribute_module(model, mesh_2x4)
    x = distribute_tensor(torch.ones(2, 4), mesh_2x4, [Shard(0), Replicate()])

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x).sum()
        return out if way == "result" else torch.autograd.grad(out, model.weight)[0]

    with pytest.raises(NotImplementedError, match=r"meta tensor; no data!.*to_empty"):
        step(x)
    model.to_empty(device="xla")
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    assert step(x).flatten()[0].item() == (64 if way == "result" else 2)


CONVERSIONS = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
    "to_empty": lambda model: model.to_empty(device="xla"),
    "cpu": lambda model: model.cpu(),
}


@pytest.mark.parametrize("phase", ["forward", "backward", "value"])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_model_can_be_converted_after_its_step_has_failed(
    name: str, phase: str, mesh_2x4: DeviceMesh
) -> None:
    """torch swaps no tensor that has a weak reference, and what is left of a trace that failed is
    garbage in cycles."""
    model = distribute_module(nn.Linear(4, 8), mesh_2x4)
    x = distribute_tensor(torch.ones(2, 4), mesh_2x4, [Shard(0), Replicate()])

    @xd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x.to(model.weight.dtype)).sum()
        if phase == "backward":
            out.backward()
        if phase == "value":
            out.tolist()
        raise ValueError("the step's own")

    gc.disable()
    try:
        with contextlib.suppress(ValueError, RuntimeError):
            step(x)
        CONVERSIONS[name](model)
    finally:
        gc.enable()
