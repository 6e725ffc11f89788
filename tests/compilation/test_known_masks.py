"""Indexing by masks that depend on no input of a compiled step: how many entries are set is known,
values and gradients are CPU torch's, and one program does for all calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xla_dtensor as xd

N = 5


def eye(x: torch.Tensor) -> torch.Tensor:
    return torch.eye(N, dtype=torch.bool, device=x.device)


def ones(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(N, N, dtype=torch.bool, device=x.device)


def one_by_one(x: torch.Tensor) -> torch.Tensor:
    mask = ones(x)
    for i in range(N):
        mask[i, i] = mask[i, (i + 2) % N] = False
    return mask


def of_a_view(x: torch.Tensor) -> torch.Tensor:
    """Written through views, before and behind what it is read for."""
    counts = torch.zeros(N, N, device=x.device)
    row, before = counts[1], counts > 0
    row += 1
    counts.t()[2:4].fill_(2)
    return before | (counts > 0)


def pairs(x: torch.Tensor) -> torch.Tensor:
    labels = torch.tensor([0, 1, 0, 2, 1], device=x.device)
    return (labels[None] == labels[:, None]).fill_diagonal_(False)


def of_what_a_mask_selects(x: torch.Tensor) -> torch.Tensor:
    """SimCLR's way to positives and negatives."""
    labels = torch.cat([torch.arange(3), torch.arange(2)]).to(x.device)
    off = ~torch.eye(N, dtype=torch.bool).to(x.device)
    same = (labels[None] == labels[:, None]).float()[off].view(N, N - 1).bool()
    rest = x[off].view(N, N - 1)
    return torch.cat([rest[same], rest[~same]])


def written(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(N, N, device=x.device).triu(1) == 1
    y = x.clone()
    y[mask] = x.t()[mask] * 2
    return y


def added(x: torch.Tensor) -> torch.Tensor:
    return x.index_put((eye(x),), x[0], accumulate=True)


def set_by_lists(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(N, N, dtype=torch.bool, device=x.device)
    mask[[1, 2]] = True
    y = x.clone()
    y[[True, False, False, True, False]] = x[:2]
    return y[mask]


def under_vmap(x: torch.Tensor) -> torch.Tensor:
    def some(row: torch.Tensor) -> torch.Tensor:
        kept = torch.tensor([True, False, True, True, False], device=x.device)
        return row[kept] * torch.as_tensor([1.0, 2.0, 3.0], device=x.device)

    return torch.func.vmap(some)(x)


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "off_the_diagonal": lambda x: x[~eye(x)].view(N, N - 1),
    "written_in_place": lambda x: x[ones(x).fill_diagonal_(False)].view(N, -1),
    "one_by_one": lambda x: x[one_by_one(x)],
    "of_a_view": lambda x: x[of_a_view(x)],
    "bytes": lambda x: x[(eye(x).byte() ^ 1) == 1],
    "on_the_host": lambda x: x[~torch.eye(N, dtype=torch.bool)],
    "of_rows": lambda x: x[:, torch.arange(N, device=x.device) % 2 == 0],
    "of_a_list": lambda x: x[torch.tensor([True, False, True, True, False], device=x.device), 1:],
    "of_a_list_as_it_is": lambda x: x[
        [True, False, True, True, False], [True, False, True, True, False]
    ],
    "made_like_another": lambda x: x[x.new_tensor([0, 1, 0, 1, 1], dtype=torch.bool)],
    "under_vmap": under_vmap,
    "beside_numbers": lambda x: x[None, eye(x)[1], 2],
    "none_set": lambda x: x[torch.zeros_like(x, dtype=torch.bool)],
    "masked_select": lambda x: x.masked_select(~eye(x)),
    "masked_select_of_rows": lambda x: x.masked_select(eye(x)[2:3]),
    "where": lambda x: x[torch.where(pairs(x))],
    "pairs": lambda x: x[pairs(x)],
    "of_what_a_mask_selects": of_what_a_mask_selects,
    "written": written,
    "set_by_lists": set_by_lists,
    "added": added,
}


def with_gradient(select: Callable, x: torch.Tensor) -> torch.Tensor:
    out = select(x)
    weights = torch.arange(1.0, out.numel() + 1, device=x.device).view(out.shape)
    (out * weights).sum().backward()
    return out.detach()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MASKS)
def test_what_a_known_mask_selects(name: str, mesh_2x4: DeviceMesh) -> None:
    torch.manual_seed(0)
    step = xd.compile(lambda x: with_gradient(MASKS[name], x))
    for _ in range(2):
        value = torch.randn(N, N)
        own = value.clone().requires_grad_()
        x = distribute_tensor(value, mesh_2x4, [Shard(0), Shard(1)]).requires_grad_()
        expected = with_gradient(MASKS[name], own)
        torch.testing.assert_close(step(x).full_tensor().cpu(), expected)
        torch.testing.assert_close(x.grad.full_tensor().cpu(), own.grad)
    assert (step.traces, len(step.compiled_programs())) == (1, 1)


def test_a_mask_of_the_host_that_is_written_later(mesh_2x4: DeviceMesh) -> None:
    value = torch.randn(N, N)
    x = distribute_tensor(value, mesh_2x4, [Shard(0), Replicate()])

    def step(x: torch.Tensor) -> torch.Tensor:
        mask = torch.eye(N, dtype=torch.bool)
        there = mask.to(x.device, copy=True)
        mask[0] = True
        return torch.cat([x[there], x[mask]])

    assert torch.equal(xd.compile(step)(x).full_tensor().cpu(), step(value))


def test_a_mask_beside_cpu_tensors_that_change(mesh_2x4: DeviceMesh) -> None:
    """What the host computes in each call says nothing of the positions that a mask has."""
    x = distribute_tensor(torch.randn(N, N), mesh_2x4, [Shard(0), Replicate()])
    count = torch.zeros(())

    def step(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return some(x) * count

    def some(x: torch.Tensor) -> torch.Tensor:
        off = ~eye(x)
        return x[off][pairs(x).float()[off] > 0]

    compiled = xd.compile(step)
    for number in (1, 2):
        expected = some(x.full_tensor().cpu()) * number
        assert torch.equal(compiled(x).full_tensor().cpu(), expected)
    assert count == 2 and compiled.traces == 1


def test_a_constant_that_thousands_of_operations_make(mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.ones(8), mesh_2x4, [Shard(0), Replicate()])

    def step(x: torch.Tensor) -> torch.Tensor:
        count = torch.zeros((), device=x.device)
        for _ in range(400):
            count += 1
        return x * count.item()

    assert xd.compile(step)(x).cpu().tolist() == [400.0] * 8


def of_values(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def of_a_mask_that_got_values(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(N, N, dtype=torch.bool, device=x.device)
    mask[0] = x[0] > 0
    mask[1] = True
    return x[mask]


def of_a_random_mask(x: torch.Tensor) -> torch.Tensor:
    return x[torch.rand(N, N, device=x.device) > 0.5]


@pytest.mark.parametrize("step", [of_values, of_a_mask_that_got_values, of_a_random_mask])
def test_a_mask_of_values_is_refused(step: Callable, mesh_2x4: DeviceMesh) -> None:
    x = distribute_tensor(torch.randn(N, N), mesh_2x4, [Shard(0), Replicate()])
    with pytest.raises(xd.DataDependentError, match="masked_fill keep the shape"):
        xd.compile(step)(x)


OF_ANOTHER_SHAPE: dict[str, Callable] = {
    "short": lambda x: x[torch.ones(N - 1, dtype=torch.bool, device=x.device)],
    "long": lambda x: x[:, torch.ones(N + 1, dtype=torch.bool, device=x.device)],
    "on_the_host": lambda x: x[torch.ones(N, N + 1, dtype=torch.bool)],
    "list": lambda x: x[[True, False]],
    "written": lambda x: x.clone().index_put_((torch.eye(N - 1, device=x.device) > 0,), x[0, :4]),
    "added": lambda x: x.index_put((torch.eye(N + 1) > 0,), x[0, 0].expand(N + 1)),
}


@pytest.mark.parametrize("name", OF_ANOTHER_SHAPE)
def test_a_mask_of_another_shape(name: str, mesh_2x4: DeviceMesh) -> None:
    """There are positions of it, too."""
    value = torch.randn(N, N)
    for step, x in (
        (OF_ANOTHER_SHAPE[name], value),
        (xd.compile(OF_ANOTHER_SHAPE[name]), distribute_tensor(value, mesh_2x4, [Shard(0)] * 2)),
    ):
        with pytest.raises(IndexError, match="shape of the mask"):
            step(x)


WITH_THE_HOST: dict[str, Callable] = {
    "masked_select": lambda x, t: torch.arange(N, device=x.device).masked_select(t > 2),
    "bincount": lambda x, t: torch.bincount(torch.arange(N, device=x.device), weights=t),
}


@pytest.mark.parametrize("name", WITH_THE_HOST)
def test_constants_with_a_cpu_tensor_from_outside(name: str, mesh_2x4: DeviceMesh) -> None:
    """The host computes it in each call."""
    held, step = torch.arange(float(N)), WITH_THE_HOST[name]
    x = distribute_tensor(torch.randn(N, N), mesh_2x4, [Shard(0), Replicate()])
    compiled = xd.compile(lambda x: step(x, held))
    for _ in range(3):
        torch.testing.assert_close(compiled(x).cpu(), step(torch.empty(N, N), held))
        held += 1


def test_a_mask_of_no_dims_on_the_host_is_refused(mesh_2x4: DeviceMesh) -> None:
    """It may have another value in the next call: what came of the first one's was a constant."""
    held = torch.arange(float(N))
    x = distribute_tensor(torch.randn(N, N), mesh_2x4, [Shard(0), Replicate()])
    step = lambda x: torch.ones(N, device=x.device).index_put((held[2] > 2,), x[0, 0])
    with pytest.raises(xd.DataDependentError, match="depends on values"):
        xd.compile(step)(x)
