"""Batches: what is written down and run later is what running it at once would have given."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd
from tests.dispatch.launches import launches
from xla_dtensor.dispatch import batched
from xla_dtensor.execution import batch

pytestmark = pytest.mark.usefixtures("strict_eager")


@pytest.fixture
def x(mesh_2x4: DeviceMesh) -> torch.Tensor:
    value = torch.arange(24.0).view(8, 3)
    return distribute_tensor(value, mesh_2x4, [Shard(0), Shard(1)])  # uneven, so padded


def test_the_counter_counts(x: torch.Tensor) -> None:
    x + 1, torch.ones(2, device="xla") * 2
    assert launches(lambda: [x + 1 for _ in range(3)]) == 3
    one = torch.ones(2, device="xla")
    assert launches(lambda: [one * 2 for _ in range(4)]) == 4
    assert launches(lambda: None) == 0


def test_one_launch_and_values_in_order(x: torch.Tensor) -> None:
    expected = x.cpu()

    def work(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        x.add_(y)
        first = x + 0.5
        x[1:5].mul_(y[1:5] - 3)
        return first, x.sum(0)

    wanted = work(expected)
    results: list[torch.Tensor] = []

    def run() -> None:
        with batched():
            results.extend(work(x))

    # The views read and write their storage in further launches; nothing else does.
    assert launches(run) <= 4
    for result, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(result.cpu(), want)
    torch.testing.assert_close(x.cpu(), expected)


def test_without_views_one_launch_whatever_the_numbers(x: torch.Tensor) -> None:
    def work(scale: float) -> torch.Tensor:
        with batched():
            y = x * scale + 1
            x.add_(y, alpha=scale)
            return torch._foreach_add([y, x], [scale, scale])[0]

    expected = x.cpu()
    for scale in (2.0, 3.0, 0.25):
        results: list[torch.Tensor] = []
        known = len(batch.executables)
        assert launches(lambda scale=scale, r=results: r.append(work(scale))) == 1
        assert len(batch.executables) == known + (scale == 2.0)
        y = expected * scale + 1
        expected = expected + y * scale
        torch.testing.assert_close(results[0].cpu(), y + scale)
        torch.testing.assert_close(x.cpu(), expected)


def test_looking_at_a_value_runs_what_it_needs(x: torch.Tensor) -> None:
    value = x.cpu()
    with batched():
        y = x.exp() - 1
        assert y.sum().item() == pytest.approx(value.expm1().sum().item(), rel=1e-5)
        z = y * 2
        torch.testing.assert_close(z.cpu(), value.expm1() * 2)
        last = z + y
    torch.testing.assert_close(last.cpu(), value.expm1() * 3)


def test_views_as_operands_and_targets(mesh_2x4: DeviceMesh) -> None:
    flat = torch.randn(24)
    ours = distribute_tensor(flat, mesh_2x4, [Shard(0), Replicate()])

    def work(flat: torch.Tensor) -> torch.Tensor:
        a, b = flat[:12].view(3, 4), flat[12:].view(4, 3)
        a.add_(1)
        b.mul_(a.t())
        return a @ b

    expected = work(flat)
    with batched():
        result = work(ours)
    torch.testing.assert_close(result.cpu(), expected)
    torch.testing.assert_close(ours.cpu(), flat)


def test_what_was_done_before_an_error_is_done(x: torch.Tensor) -> None:
    expected = x.cpu() + 1
    with pytest.raises(RuntimeError, match="broadcast"), batched():
        x.add_(1)
        x.add_(torch.ones(5))
    torch.testing.assert_close(x.cpu(), expected)
    y = x + 1  # and nothing is written down any more
    assert y._storage_.value is y._storage_.array


def test_random_numbers_are_the_same(x: torch.Tensor) -> None:
    torch.manual_seed(3)
    expected = torch.rand_like(x) + x, torch.rand_like(x)
    torch.manual_seed(3)
    with batched():
        results = torch.rand_like(x) + x, torch.rand_like(x)
    for result, want in zip(results, expected, strict=True):
        assert torch.equal(result.cpu(), want.cpu())


def test_results_share_no_buffer(x: torch.Tensor) -> None:
    value = x.cpu()
    with batched():
        y = x.clone()
        z = y.clone()
    pointers = {t.jax_array.addressable_shards[0].data.unsafe_buffer_pointer() for t in (x, y, z)}
    assert len(pointers) == 3
    y.add_(1)
    torch.testing.assert_close(x.cpu(), value)
    torch.testing.assert_close(z.cpu(), value)


def test_equal_numbers_of_a_list_are_one_input_but_zeros_keep_their_signs(x: torch.Tensor) -> None:
    with batched():
        results = torch._foreach_div([x.abs() + 1] * 4, [0.0, -0.0, 2.0, 2.0])
    signs = [result.cpu().signbit().any().item() for result in results]
    assert signs == [False, True, False, False]


def test_tensors_of_different_devices(x: torch.Tensor) -> None:
    other_mesh = xd.init_device_mesh("xla", (4,), mesh_dim_names=("x",))
    other = distribute_tensor(torch.ones(8), other_mesh, [Shard(0)])
    x + 1, other + 1
    results: list[torch.Tensor] = []

    def run() -> None:
        with batched():
            results.extend((x + 1, x * 2, other + 1, other * 2))

    run()
    results.clear()
    assert launches(run) == 2
    for result, want in zip(results, (x + 1, x * 2, other + 1, other * 2), strict=True):
        assert torch.equal(result.cpu(), want.cpu())


def test_a_cpu_tensor_is_taken_as_it_is_now(x: torch.Tensor) -> None:
    count = torch.tensor(1.0)
    with batched():
        first = x * count
        count += 1
        second = x * count
    torch.testing.assert_close((first * 2).cpu(), second.cpu())


@pytest.mark.slow
def test_batches_hold_no_arrays(x: torch.Tensor) -> None:
    import jax

    def work() -> None:
        with batched():
            y = x * 2
            x.copy_(y - x)

    work()
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(5):
        work()
    gc.collect()
    assert len(jax.live_arrays()) == before
