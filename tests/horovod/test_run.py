"""`hvd.run`: threads that are ranks."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_dtensor as xd
import xla_dtensor.horovod as hvd
from xla_dtensor.horovod.ranks import exchange


def test_arguments_and_results() -> None:
    def add(a: int, b: int = 0) -> tuple[int, int]:
        return hvd.rank(), a + b

    assert hvd.run(add, args=(1,), kwargs={"b": 2}, np=3) == [(0, 3), (1, 3), (2, 3)]
    assert len(hvd.run(hvd.size, num_proc=2, verbose=1)) == 2
    assert hvd.run(hvd.size) == [8] * 8


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="torchrun"):
        hvd.run(hvd.rank, np=2, hosts="a:1,b:1")
    with pytest.raises(ValueError, match=r"8 devices.*JAX_NUM_CPU_DEVICES=9"):
        hvd.run(hvd.rank, np=9)
    assert not hvd.is_initialized() or hvd.size()


def test_each_rank_has_the_callers_random_numbers() -> None:
    """As processes that are started alike have; and the caller's go on as if nothing was."""

    def drawn() -> list[float]:
        first = [torch.rand(1).item(), random.random(), float(np.random.rand())]
        hvd.barrier()
        torch.manual_seed(hvd.rank())
        hvd.barrier()
        return [*first, torch.rand(1).item()]

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    found = hvd.run(drawn, np=3)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    assert [each[:3] for each in found] == [expected] * 3
    for rank, each in enumerate(found):
        assert each[3] == torch.rand(1, generator=torch.Generator().manual_seed(rank)).item()


def test_an_exception_is_the_callers_with_its_rank() -> None:
    def train() -> None:
        if hvd.rank() == 1:
            raise KeyError("a bad batch")
        hvd.allreduce(torch.ones(1))

    with pytest.raises(KeyError, match="a bad batch") as found:
        hvd.run(train, np=3)
    assert found.value.__notes__ == ["raised by rank 1 of 3 of hvd.run"]


def test_the_others_can_catch_it() -> None:
    def train() -> str:
        if hvd.rank() == 1:
            return "gone"
        try:
            hvd.allreduce(torch.ones(1), name="loss")
        except hvd.HorovodInternalError as error:
            return str(error)
        return ""

    first, _, last = hvd.run(train, np=3)
    assert first == last
    assert first == "allreduce 'loss': ranks 0 and 2 waited, but rank 1 has come to its end"


def test_a_rank_that_joins_while_another_is_gone() -> None:
    def train() -> int:
        return hvd.join() if hvd.rank() else -1

    with pytest.raises(hvd.HorovodInternalError, match="rank 0 has come to its end"):
        hvd.run(train, np=2)


def test_no_threads_are_left() -> None:
    before = threading.active_count()

    def train() -> None:
        hvd.allreduce(torch.ones(1), name=f"{hvd.rank()}")

    with pytest.raises(hvd.HorovodInternalError, match="deadlock"):
        hvd.run(train, np=4)
    assert threading.active_count() <= before


def test_what_xla_cannot_do_is_every_ranks_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    def train() -> str:
        handle = hvd.allreduce_async(torch.ones(1), name="big")
        try:
            hvd.synchronize(handle)
        except hvd.HorovodInternalError as error:
            return str(error)
        return ""

    monkeypatch.setattr(exchange, "run", broken)
    assert hvd.run(train, np=2) == ["allreduce 'big': RuntimeError: RESOURCE_EXHAUSTED"] * 2


def test_waiting_operations_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    original = exchange.run

    def counted(responses: Any, *rest: Any) -> Any:
        launches.append(len(responses))
        return original(responses, *rest)

    monkeypatch.setattr(exchange, "run", counted)

    def train() -> list[float]:
        handles = [
            hvd.allreduce_async(torch.full((3,), float(i)), op=hvd.Sum, name=f"g{i}")
            for i in range(10)
        ]
        return [hvd.synchronize(handle)[0].item() for handle in reversed(handles)]

    assert hvd.run(train, np=2) == [[2.0 * i for i in reversed(range(10))]] * 2
    assert launches == [10]
    launches.clear()
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    hvd.run(train, np=2)
    assert launches == [1] * 10


def test_models_on_the_device() -> None:
    """Each thread's own model and optimizer, on "xla"."""

    def train() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1, bias=False).to("xla")
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
        )
        start = model.weight.detach().cpu().clone()
        x = torch.full((2, 3), float(hvd.rank()), device="xla")
        model(x).mean().backward()
        optimizer.step()
        return (start - model.weight.detach().cpu()).flatten().tolist()

    for change in hvd.run(train, np=4):
        assert change == pytest.approx([1.5] * 3, abs=1e-6)


def test_in_place_on_views_and_without_contiguity() -> None:
    def train() -> list[list[float]]:
        base = torch.full((2, 3), float(hvd.rank()))
        hvd.allreduce_(base[1], op=hvd.Sum)
        turned = (torch.arange(6.0).reshape(2, 3) + hvd.rank()).t()
        return [*base.tolist(), *hvd.allreduce(turned, op=hvd.Sum).tolist()]

    first, second = hvd.run(train, np=2)
    assert first[:2] == [[0, 0, 0], [1, 1, 1]] and second[:2] == [[1, 1, 1], [1, 1, 1]]
    assert first[2:] == second[2:] == [[1, 7], [3, 9], [5, 11]]


def test_a_tensor_that_changes_while_it_waits() -> None:
    """It is what it was when the operation began."""

    def train() -> float:
        x = torch.ones(2)
        handle = hvd.allreduce_async(x, op=hvd.Sum)
        x.fill_(100.0)
        return hvd.synchronize(handle)[0].item()

    assert hvd.run(train, np=2) == [2.0, 2.0]


def test_a_timeline_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(path))

    def train() -> None:
        hvd.init()
        hvd.allreduce(torch.ones(1), name="loss")
        hvd.barrier()
        hvd.shutdown()

    hvd.run(train, np=2)
    assert not path.exists()  # the ranks had begun
    hvd.shutdown()
    hvd.init()
    hvd.allreduce(torch.ones(1), name="loss")
    hvd.shutdown()
    names = {event["name"] for event in json.loads(path.read_text())}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= names


def test_sharded_tensors_and_per_device_ones_are_refused() -> None:
    mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("x",))
    sharded = xd.distribute_tensor(torch.ones(8), mesh, [xd.Shard(0)])

    def train() -> None:
        hvd.allreduce(sharded)

    with pytest.raises(NotImplementedError, match="its own"):
        hvd.run(train, np=2)
