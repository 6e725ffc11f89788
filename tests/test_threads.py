"""Threads with tensors of their own get what one thread gets; random numbers are distinct."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import xla_dtensor as xd
from xla_dtensor import dispatch

THREADS = 4
Place = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def switch_interval() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """What ``work(0)``, ``work(1)``, ... return, each in a thread of its own, all at once."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def values(index: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(*shape, generator=generator)


def operations(index: int, place: Place) -> list[torch.Tensor]:
    """Shapes of its own in every thread, so that plans are being made all the time."""
    found = []
    for i in range(2):
        x, y = place(values(index, 8, 4 + index)), place(values(index + 9, 4 + index, 8 + i))
        z = torch.relu(x @ y).softmax(-1) * (i + 1) + index
        found += [z.cpu(), z.sum(0).cpu(), torch.cat([z, z]).t().contiguous().cpu()]
        found.append((x.double() / 3).sum().cpu())  # 64-bit types are switched on per thread
        found.append((place(torch.arange(8)) * 2**40).cpu())
    return found


def writes(index: int, place: Place) -> list[torch.Tensor]:
    x = place(values(index, 8, 6))
    view, row = x[:, 1:4], x[index]
    for i in range(10):
        x.mul_(1.5).add_(i)
        view.sub_(1)
        row.fill_(i)
        torch._foreach_add_([x, view], 1)
    local = x.to_local() if hasattr(x, "to_local") else x
    local.add_(1)
    return [x.cpu(), view.cpu(), row.cpu()]


def gradients(index: int, place: Place) -> list[torch.Tensor]:
    found = []
    for i in range(2):
        x = place(values(index, 8, 5)).requires_grad_()
        w = place(values(index + 5, 5, 3 + i)).requires_grad_()
        loss = nn.functional.gelu(x @ w).pow(2).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (first * x).sum().backward()
        found += [loss.detach().cpu(), x.grad.cpu(), w.grad.cpu()]
    return found


def training(index: int, place: Place, adapt: Callable[[nn.Module], nn.Module]) -> list[Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(values(10 * index + i, *parameter.shape))
    model = adapt(model)
    optimizer = [torch.optim.AdamW, torch.optim.SGD][index % 2](
        model.parameters(), lr=1e-2 * (index + 1), foreach=True
    )
    found = []
    x, y = place(values(index, 8, 6)), place(values(index + 1, 8, 2))
    for _ in range(3):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    return [*found, *(p.detach().cpu() for p in model.parameters())]


def batches(index: int, place: Place) -> list[torch.Tensor]:
    x = place(values(index, 8, 4))
    found = []
    for i in range(5):
        with dispatch.batched():
            y = x * (i + index)
            z = (y - x).tanh()
        found += [y.cpu(), z.cpu()]
    return found


WORK: dict[str, Callable[[int, Place], list[torch.Tensor]]] = {
    "operations": operations,
    "writes": writes,
    "gradients": gradients,
    "batches": batches,
}


def check(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for own, want in zip(found, expected, strict=True):
        for value, wanted in zip(own, want, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", list(WORK))
def test_as_one_thread(mesh_2x4: DeviceMesh, name: str, switch_interval: None) -> None:
    def place(value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value, mesh_2x4, [Shard(0), Replicate()])

    xd.debug.clear_caches()  # plans and forms are made by all threads at once
    work = WORK[name]
    plain = [work(i, torch.clone) for i in range(THREADS)]
    check(in_threads(lambda i: work(i, place)), plain)
    check(in_threads(lambda i: work(i, place)), plain)


def test_all_kinds_at_once(mesh_2x4: DeviceMesh, switch_interval: None) -> None:
    def place(value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value, mesh_2x4, [Shard(0), Replicate()])

    kinds = list(WORK.values())
    expected = [kinds[i](i, torch.clone) for i in range(THREADS)]
    check(in_threads(lambda i: kinds[i](i, place)), expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["sharded", "fully_shard", "per device"])
def test_training(mesh_2x4: DeviceMesh, kind: str, switch_interval: None) -> None:
    mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("dp",))

    def place(value: torch.Tensor) -> torch.Tensor:
        if kind == "sharded":
            return distribute_tensor(value, mesh_2x4, [Shard(0), Replicate()])
        return value.to("xla")

    def adapt(model: nn.Module) -> nn.Module:
        if kind == "sharded":
            return distribute_module(model, mesh_2x4)
        if kind == "per device":
            return model.to("xla")
        return xd.fully_shard(model, mesh=mesh)

    def work(index: int) -> list[torch.Tensor]:
        found = training(index, place, adapt)
        return [v.full_tensor() if hasattr(v, "full_tensor") else v for v in found]

    expected = [training(i, torch.clone, lambda model: model) for i in range(THREADS)]
    xd.debug.clear_caches()
    check(in_threads(work), expected)


def test_random_draws(mesh_2x4: DeviceMesh, switch_interval: None) -> None:
    """No two threads draw the same numbers, and together they draw what one thread would."""

    def draws(index: int) -> list[tuple[float, ...]]:
        found = []
        for i in range(10):
            if i % 2:
                x = torch.rand(4, device="xla")
            else:
                x = torch.distributed.tensor.rand(4, device_mesh=mesh_2x4)
            found.append(tuple(x.cpu().tolist()))
        return found

    torch.manual_seed(0)
    together = [draw for own in in_threads(draws) for draw in own]
    assert len(set(together)) == len(together) == 10 * THREADS
    torch.manual_seed(0)
    alone = {draw for i in range(THREADS) for draw in draws(i)}
    assert set(together) == alone


def test_errors_stay_in_their_thread(mesh_2x4: DeviceMesh, switch_interval: None) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
            ctx.number = number
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise ValueError(f"from thread {ctx.number}")

    def work(index: int) -> list[str]:
        found = []
        for _ in range(5):
            x = distribute_tensor(values(index, 8, 4), mesh_2x4).requires_grad_()
            with pytest.raises(ValueError, match="from thread") as error:
                Fails.apply(x, index).sum().backward()
            found.append(str(error.value))
        return found

    assert in_threads(work) == [[f"from thread {i}"] * 5 for i in range(THREADS)]


def a_step_of_ones_own(index: int, place: Place, compiled: bool) -> list[torch.Tensor]:
    """Losses and parameters of a few steps on a model of the thread's own."""
    generator = torch.Generator().manual_seed(index)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(place(parameter.detach())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = xd.compile(step) if compiled else step
    losses = [run(place(values(10 * index + i, 4, 4))).cpu() for i in range(4)]
    return [*losses, *(p.detach().cpu() for p in model.parameters())]


def test_compiled_steps(mesh_2x4: DeviceMesh) -> None:
    """Four threads trace, compile and run a step each, on one mesh."""
    place = lambda t: distribute_tensor(t, mesh_2x4, [Replicate(), Replicate()])
    results = in_threads(lambda index: a_step_of_ones_own(index, place, True))
    for index, result in enumerate(results):
        for actual, expected in zip(
            result, a_step_of_ones_own(index, lambda t: t, False), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_one_compiled_step(mesh_2x4: DeviceMesh) -> None:
    """A step that threads share runs for one after the other: no write is lost."""
    total = distribute_tensor(torch.zeros(()), mesh_2x4, None)
    step = xd.compile(lambda x: total.add_(x.sum()).clone())

    def work(index: int) -> set[float]:
        one = distribute_tensor(torch.ones(8), mesh_2x4, [Replicate(), Shard(0)])
        return {step(one).item() for _ in range(10)}

    seen = in_threads(work)
    assert total.item() == 8.0 * 10 * THREADS
    assert len(set().union(*seen)) == 10 * THREADS
    assert step.compilations == 1


def test_random_numbers_of_compiled_steps(mesh_2x4: DeviceMesh) -> None:
    steps = [xd.compile(lambda x: torch.rand_like(x)) for _ in range(THREADS)]

    def work(index: int) -> list[float]:
        x = distribute_tensor(torch.ones(1), mesh_2x4, None)
        return [steps[index](x).item() for _ in range(10)]

    drawn = [number for numbers in in_threads(work) for number in numbers]
    assert len(set(drawn)) == len(drawn)
