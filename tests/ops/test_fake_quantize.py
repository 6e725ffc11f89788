"""Fake quantization, and the observers of quantization-aware training, against CPU torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

RANGES = [(0, 255, 3), (-128, 127, -2), (-8, 7, 0)]
LAYOUTS = {
    "device": None,
    "replicated": [Replicate(), Replicate()],
    "sharded": [Shard(0), Shard(1)],
    "channels": [Replicate(), Shard(1)],
}


def values(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(8, 12) * 4
    x[0, 0] = torch.nan
    x[1] = torch.arange(12) * 0.025  # halfway between two levels
    return x.to(dtype)


def parameters(kind: str, low: int, high: int, zero_point: int) -> tuple[Any, ...]:
    if kind == "numbers":
        return 0.05, zero_point, low, high
    if kind == "tensors":
        return torch.tensor([0.05]), torch.tensor([zero_point], dtype=torch.int32), low, high
    zero_points = torch.randint(max(low, -5), min(high, 5), (12,), dtype=torch.int32)
    return torch.rand(12) / 10 + 0.01, zero_points, 1, low, high


@pytest.mark.one_in(11)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("levels", RANGES, ids=str)
@pytest.mark.parametrize("kind", ["numbers", "tensors", "channels"])
def test_fake_quantize(
    mesh_2x4: DeviceMesh, kind: str, levels: tuple[int, int, int], dtype: torch.dtype, layout: str
) -> None:
    function = getattr(
        torch, f"fake_quantize_per_{'channel' if kind == 'channels' else 'tensor'}_affine"
    )
    x, grad, given = values(dtype), torch.randn(8, 12).to(dtype), parameters(kind, *levels)
    expected = x.clone().requires_grad_()
    out = function(expected, *given)
    out.backward(grad)

    placements = LAYOUTS[layout]

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh_2x4, placements) if placements else tensor.to("xla")

    def whole(tensor: Any) -> torch.Tensor:
        return (tensor.full_tensor() if placements else tensor).detach().cpu()

    def shared(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return distribute_tensor(value, mesh_2x4) if placements else value.to("xla")

    own = placed(x).requires_grad_()
    result = function(own, *map(shared, given))
    result.backward(placed(grad))
    assert torch.equal(whole(result), out.detach())
    assert torch.equal(whole(own.grad), expected.grad)  # type: ignore[arg-type]


def observed(case: int, device: str) -> list[torch.Tensor]:
    """Three batches of one observer, whose switches, layout and range are the case's."""
    generator = torch.Generator().manual_seed(case)

    def one_of(options: list[Any]) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    symmetric, per_channel, resized = (one_of([False, True]) for _ in range(3))
    low, high, _ = one_of([*RANGES, (0, 127, 0)])
    shift, size = one_of([0, 3, -3, 1e-4]), one_of([1, 1e-7, 10, 0])
    shape = ([0] if resized else [6]) if per_channel else []
    least, most = (torch.full(shape, inf).to(device) for inf in (torch.inf, -torch.inf))
    scale = torch.ones(shape or [1]).to(device)
    zero_point = torch.zeros(shape or [1], dtype=torch.int32).to(device)
    seen = []
    for i in range(3):
        x = torch.randn(6, 5, 3, generator=generator) * size + shift
        # What nothing has been written to is any memory.
        switches = [i == 0 or one_of([True, True, False]) for _ in range(2)]
        observes, quantizes = (torch.tensor([on]).to(device) for on in switches)
        x = x.to(device).requires_grad_()
        out = torch.fused_moving_avg_obs_fake_quant(
            *(x, observes, quantizes, least, most, scale, zero_point),
            *(0.3, low, high, 0, per_channel, symmetric),
        )
        out.sum().backward()
        assert x.grad is not None
        tensors = (out, x.grad, least, most, scale, zero_point)
        seen += [tensor.detach().cpu().clone() for tensor in tensors]
    return seen


@pytest.mark.parametrize(
    "case", [*range(4), *(pytest.param(i, marks=pytest.mark.slow) for i in range(4, 60))]
)
def test_an_observer(case: int) -> None:
    for own, expected in zip(observed(case, "xla"), observed(case, "cpu"), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*")
@pytest.mark.filterwarnings("ignore:.*reduce_range.*")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_quantization_aware_training(compiled: bool) -> None:
    """`torch.ao.quantization.prepare_qat`'s model: its weights are observed by channels."""
    from torch.ao import quantization

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    expected = quantization.prepare_qat(model)
    own = copy.deepcopy(expected).to("xla")

    def step_of(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    reference, step = step_of(expected), step_of(own)
    if compiled:
        step(torch.zeros(4, 6).to("xla"))  # gives the observers of channels their sizes
        reference(torch.zeros(4, 6))
        step = xd.compile(step)
    for _ in range(4):
        x = torch.randn(4, 6)
        torch.testing.assert_close(step(x.to("xla")).cpu(), reference(x), rtol=1e-4, atol=1e-5)
    for (name, tensor), other in zip(
        own.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(tensor.cpu(), other, rtol=1e-4, atol=1e-5, msg=name)
