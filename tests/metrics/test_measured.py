"""Metrics of a training run."""

from __future__ import annotations

import gc
import threading
import time
import weakref
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
    for value in ("abc", None, [1.0]):
        with pytest.raises(TypeError, match=r"after_step\(loss=.*give a number"):
            metrics.after_step(2, loss=value)


def test_nothing_is_kept_alive(told: Told) -> None:
    """Programs that are gone take what is known of them along, when the next window ends."""
    step = xd.compile(lambda x: x.sum())
    programs = []
    with xd.metrics.to(tell_to(told), step, every=1) as metrics:
        for number in range(3):
            step(torch.ones(2 + number, device="xla"))
            programs += map(weakref.ref, step.programs())
            metrics.after_step(number)
            step.clear_cache()
    assert [values["step/tokens_per_second"] > 0 for _, values in told] == [True] * 3
    gc.collect()
    assert [program() is None for program in programs] == [True, True, False]
    assert len(metrics._reports) == 1


def of_steps(values: dict[str, float]) -> float:
    """The tokens of a step."""
    return values["step/tokens_per_second"] * values["step/seconds"]


def test_what_ran_before_is_not_counted(told: Told) -> None:
    """Steps before the metrics were made, as after a warm-up, or under another `Metrics`."""
    step = xd.compile(lambda x: (x @ x).sum())
    x = torch.ones(8, 8, device="xla")
    for _ in range(20):
        step(x)
    with xd.metrics.to(tell_to(told), step, every=2) as metrics:
        for number in range(2):
            step(x)
            metrics.after_step(number)
    assert of_steps(told[0][1]) == pytest.approx(8)


def test_what_a_step_does_aside_is_not_counted(told: Told) -> None:
    """An evaluation by the step itself, in the step's programs and in a new one."""
    step = xd.compile(lambda x: (x @ x).sum())
    x = torch.ones(8, 8, device="xla")
    with xd.metrics.to(tell_to(told), step, every=2) as metrics:
        for number in range(4):
            step(x)
            with metrics.aside("evaluation"):
                for size in (8, 8, 16):
                    step(torch.ones(size, size, device="xla"))
            metrics.after_step(number)
    assert [of_steps(values) for _, values in told] == pytest.approx([8, 8])
    assert told[1][1]["step/tflops"] * told[1][1]["step/seconds"] * 1e12 == pytest.approx(2 * 8**3)


def test_blocks_in_blocks_and_reports_in_them(told: Told) -> None:
    """Each has its own time, and none of the steps'; a window may end in one."""
    metrics = xd.metrics.to(tell_to(told), every=2)
    for number in range(2):
        time.sleep(0.1)
        with metrics.aside("outer"):
            time.sleep(0.05)
            with metrics.aside("inner"):
                time.sleep(0.2)
        metrics.after_step(number)
    ((_, values),) = told
    assert values["step/seconds"] >= 0.1
    assert values["aside/inner_seconds"] >= 0.4
    assert 0.1 <= values["aside/outer_seconds"] < 0.4
    told.clear()
    with metrics.aside("outer"):
        time.sleep(0.2)
        metrics.after_step(1)
        metrics.after_step(2)
        time.sleep(0.1)
    time.sleep(0.1)
    metrics.after_step(3)
    metrics.close()
    assert told[0][1]["step/seconds"] < 0.1 <= told[1][1]["step/seconds"]
    found = [values["aside/outer_seconds"] for _, values in told]
    assert found[0] >= 0.2 and found[1] >= 0.1


def test_what_other_threads_compile_takes_no_time_of_the_steps(told: Told) -> None:
    begin = time.monotonic()  # before: a step's time begins with the metrics
    metrics = xd.metrics.to(tell_to(told), every=1)
    long = xd.compile(lambda x: sum((x * i).sin().sum() for i in range(60)))
    thread = threading.Thread(target=long, args=(torch.ones(8, device="xla"),))
    thread.start()
    thread.join()
    metrics.after_step(1)
    taken = time.monotonic() - begin
    ((_, values),) = told
    assert 0 < values["compile/seconds"] < values["step/seconds"] <= taken


def test_programs_that_are_gone_have_run(told: Told) -> None:
    step = xd.compile(lambda x: (x @ x).sum())
    x = torch.ones(8, 8, device="xla")
    step(x)
    with xd.metrics.to(tell_to(told), step, every=4) as metrics:
        for number in range(4):
            step(x)
            metrics.after_step(number)
            if number == 1:
                step.clear_cache()
    assert of_steps(told[0][1]) == pytest.approx(8)
