"""Metrics of a training run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import xla_dtensor as xd
from tests.conftest import make_mesh

Told = list[tuple[int, dict[str, float]]]


@pytest.fixture
def told() -> Told:
    return []


def tell_to(told: Told) -> Any:
    return lambda values, step: told.append((step, values))


def rows(mesh: DeviceMesh, count: int) -> torch.Tensor:
    placements = [xd.Shard(0), *[xd.Replicate()] * (mesh.ndim - 1)]
    return xd.distribute_tensor(torch.ones(count, 16), mesh, placements)


def test_operations_are_counted_by_each_run(mesh: DeviceMesh, told: Told) -> None:
    """A step of two shapes, called as often as one likes between two reports."""
    weight = xd.distribute_tensor(torch.ones(16, 32), mesh, [xd.Replicate()] * mesh.ndim)
    step = xd.compile(lambda x: (x @ weight).sum())
    metrics = xd.metrics.to(tell_to(told), step, every=3)
    begin = time.monotonic()
    for number, counts in enumerate([[8], [8, 24], [8, 24, 24]], 1):
        for count in counts:
            loss = step(rows(mesh, count))
        metrics.after_step(number, loss=loss)
    taken = time.monotonic() - begin
    ((number, values),) = told
    assert number == 3 and values["loss"] == 24 * 16 * 32
    whole = 2 * 16 * 32 * (3 * 8 + 3 * 24)
    seconds = 3 * values["step/seconds"]
    assert values["step/tflops"] * seconds * 1e12 * mesh.size() == pytest.approx(whole)
    assert values["step/tokens_per_second"] * seconds == pytest.approx(3 * 8 + 3 * 24)
    # Two compilations are in no step.
    assert values["compile/seconds"] > 0
    assert seconds + values["compile/seconds"] < taken
    step(rows(mesh, 8))
    metrics.after_step(4)
    metrics.close()
    assert told[-1][0] == 4 and told[-1][1]["compile/seconds"] == 0
    again = told[-1][1]["step/tokens_per_second"] * told[-1][1]["step/seconds"]
    assert again == pytest.approx(8)


def test_tokens(told: Told) -> None:
    """The elements of the largest argument of integers, or what is said."""
    step = xd.compile(lambda x, ids: x[ids].sum())
    arguments = torch.ones(9, 2).to("xla"), torch.zeros(4, 6, dtype=torch.long).to("xla")
    for tokens, expected in ((None, 24), (7, 7)):
        with xd.metrics.to(tell_to(told), step, every=1, tokens=tokens) as metrics:
            for number in range(2):  # the first metrics look at a program that has run before
                step(*arguments)
                metrics.after_step(number)
        values = told[-1][1]
        assert values["step/tokens_per_second"] * values["step/seconds"] == pytest.approx(expected)


def test_tokens_of_each_device(told: Told) -> None:
    """A per-device batch is another one on each device, as for a plan."""
    mesh = make_mesh("4x2")
    ids = xd.from_device_values([torch.full((2, 5), i) for i in range(8)], mesh)
    step = xd.compile(lambda x, ids: (x + ids).sum())
    with xd.metrics.to(tell_to(told), step, every=1) as metrics:
        step(torch.ones(2, 5).to("xla"), ids)
        metrics.after_step(1)
    values = told[0][1]
    assert values["step/tokens_per_second"] * values["step/seconds"] == pytest.approx(8 * 10)


def test_what_collectives_move(mesh_2x4: DeviceMesh, told: Told) -> None:
    model = nn.Linear(16, 4)
    xd.distribute_module(model, mesh_2x4)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    step = xd.compile(step)
    x = rows(mesh_2x4, 8)
    with xd.metrics.to(tell_to(told), step, every=2) as metrics:
        for number in range(4):
            model.zero_grad()
            metrics.after_step(number, loss=step(x))
    # The gradients of both parameters, and the loss.
    assert told[-1][1]["step/communicated_megabytes"] * 1e6 == 4 * (16 * 4 + 4 + 1)


def test_aside_and_checkpoints_are_no_steps(tmp_path: Path, told: Told) -> None:
    model = nn.Linear(4, 4).to("xla")
    step = xd.compile(lambda x: model(x).sum())
    x = torch.ones(2, 4, device="xla")
    step(x)
    options: dict[str, Any] = {"every": 1, "asynchronous": False}
    with (
        xd.checkpoint.CheckpointManager(tmp_path, {"model": model}, **options) as manager,
        xd.metrics.to(tell_to(told), step, every=2) as metrics,
    ):
        for number in range(1, 5):
            step(x)
            with metrics.aside("evaluation"):
                time.sleep(0.2)
            manager.after_step(number)
            metrics.after_step(number)
    for _, values in told:
        assert 0.4 <= values["aside/evaluation_seconds"] < 1
        assert values["checkpoint/seconds"] >= values["checkpoint/writing_seconds"] > 0
        assert values["step/seconds"] < 0.2


def test_an_exception_tells_nothing(told: Told) -> None:
    with (
        pytest.raises(KeyError),
        xd.metrics.to(tell_to(told)) as metrics,
    ):
        metrics.after_step(1)
        raise KeyError
    assert told == []


def test_values_are_numbers(mesh_2x4: DeviceMesh, told: Told) -> None:
    metrics = xd.metrics.to(tell_to(told), every=1)
    loss = rows(mesh_2x4, 8).sum().requires_grad_()
    metrics.after_step(1, loss=loss, cpu=torch.ones(1), plain=2)
    assert {k: told[0][1][k] for k in ("loss", "cpu", "plain")} == {
        "loss": 128,
        "cpu": 1,
        "plain": 2,
    }
    with pytest.raises(ValueError, match="shape"):
        metrics.after_step(2, loss=torch.ones(2))


def test_nothing_is_kept_alive(told: Told) -> None:
    """Programs that are gone take what is known of them along."""
    step = xd.compile(lambda x: x.sum())
    with xd.metrics.to(tell_to(told), step, every=1) as metrics:
        for number in range(3):
            step(torch.ones(2 + number, device="xla"))
            metrics.after_step(number)
            step.clear_cache()
    assert [values["step/tokens_per_second"] > 0 for _, values in told] == [True] * 3
    assert len(metrics._programs) == 0
