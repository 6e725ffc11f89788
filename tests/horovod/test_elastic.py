"""Elastic training: what is committed, gone back to, and found again by a new process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_dtensor.horovod as hvd
from tests import launch
from tests.horovod.test_compiled import network
from xla_dtensor.errors import HostsUpdatedInterrupt
from xla_dtensor.horovod.elastic.state import ADDED, REMOVED

pytestmark = pytest.mark.usefixtures("ranks")


def test_commit_and_restore() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=1, log=[1])
    weight = model[0].weight.detach().clone()
    state.epoch, state.log = 2, [1, 2]
    with torch.no_grad():
        model[0].weight.add_(1)
    state.restore()
    assert (state.epoch, state.log) == (1, [1])
    assert torch.equal(model[0].weight, weight)
    with torch.no_grad():
        model[0].weight.add_(1)
    state.epoch = 5
    state.commit()
    state.log.append(9)  # a list that is committed is a copy
    state.restore()
    assert (state.epoch, state.log) == (5, [1]) and torch.equal(model[0].weight, weight + 1)
    other = network()
    state.model = other
    assert state.model is other
    state.restore()


def test_a_failure_goes_back_to_what_was_committed() -> None:
    seen: list[int] = []

    @hvd.elastic.run
    def train(state: Any, last: int) -> str:
        while state.step < last:
            state.step += 1
            seen.append(state.step)
            if seen.count(3) == 1 and state.step == 3:
                raise hvd.HorovodInternalError("a rank is gone")
            if state.step % 2 == 0:
                state.commit()
        return "done"

    state = hvd.elastic.TorchState(step=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    assert train(state, 5) == "done"
    assert seen == [1, 2, 3, 3, 4, 5] and resets == [8]


def test_a_failure_that_comes_again_is_raised() -> None:
    @hvd.elastic.run
    def train(state: Any) -> None:
        raise hvd.HorovodInternalError("always")

    with pytest.raises(hvd.HorovodInternalError, match="always"):
        train(hvd.elastic.TorchState(step=0))


def test_hosts_that_come_and_go() -> None:
    state = hvd.elastic.TorchState(step=3)
    state.commit()
    state.on_hosts_updated(1.0, ADDED)
    with pytest.raises(HostsUpdatedInterrupt) as found:
        state.commit()
    assert not found.value.skip_sync
    state.commit()  # told once
    state.on_hosts_updated(0.5, REMOVED)  # older than what is known
    state.check_host_updates()
    state.on_hosts_updated(2.0, REMOVED)
    with pytest.raises(HostsUpdatedInterrupt) as found:
        state.check_host_updates()
    assert found.value.skip_sync
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> int:
        calls.append(state.step)
        if len(calls) == 1:
            state.step = 4
            state.on_hosts_updated(3.0, ADDED)
            state.commit()
        return state.step

    assert train(state) == 4 and calls == [3, 4]


def test_the_ranks_have_rank_0s_state() -> None:
    def train() -> tuple[int, float, Any]:
        model = network()
        with torch.no_grad():
            model[0].weight.fill_(hvd.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (hvd.rank() + 1), momentum=0.9)
        sampler = hvd.elastic.ElasticSampler(range(20), shuffle=False)
        if hvd.rank() == 0:
            sampler.record_batch(0, 4)
        state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=hvd.rank() + 7)
        state.sync()
        lr = optimizer.param_groups[0]["lr"]
        return state.epoch, model[0].weight.unique().tolist(), lr, list(sampler)

    found = hvd.run(train, np=2)
    assert [each[:3] for each in found] == [(7, [0.0], 0.1)] * 2
    assert found[0][3] == [8, 10, 12, 14, 16, 18] and found[1][3] == [9, 11, 13, 15, 17, 19]


def test_the_rows_that_are_left() -> None:
    def rows() -> list[list[int]]:
        sampler = hvd.elastic.ElasticSampler(range(11), seed=3)
        first = list(sampler)
        assert len(first) == len(sampler) == 6
        sampler.record_batch(0, 2)
        sampler.record_indices([sampler.remaining_indices[4]])
        kept = sampler.state_dict()
        again = hvd.elastic.ElasticSampler(range(11), seed=3)
        again.load_state_dict(kept)
        left = list(again)
        again.set_epoch(1)
        assert again.remaining_indices != sampler.remaining_indices
        return [first, left]

    (first0, left0), (first1, left1) = hvd.run(rows, np=2)
    assert set(first0) | set(first1) == set(range(11)) and len(first0) == len(first1)
    order = [x for pair in zip(first0, first1, strict=True) for x in pair][:11]
    assert set(left0) | set(left1) == set(order[4:]) - {order[4]}
    alone = hvd.elastic.ElasticSampler(range(11), shuffle=False)
    assert list(alone) == list(range(11))  # one process has the rows of all ranks


def test_a_new_job_finds_what_was_committed(tmp_path: Path) -> None:
    state = hvd.elastic.TorchState(model=network(), epoch=0, log=[])
    assert state.keep_in(tmp_path, asynchronous=False) == 0
    state.epoch, state.log = 4, [1, 2]
    with torch.no_grad():
        state.model[0].weight.fill_(2.5)
    state.commit()
    state.epoch = 5  # not committed
    state.close()
    new = hvd.elastic.TorchState(model=network(), epoch=0, log=[])
    assert new.keep_in(tmp_path, asynchronous=False) == 1
    assert (new.epoch, new.log) == (4, [1, 2])
    assert new.model[0].weight.unique().tolist() == [2.5]
    new.restore()
    assert new.epoch == 4 and new.model[0].weight.unique().tolist() == [2.5]
    new.close()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_and_a_restart(tmp_path: Path, victim: int) -> None:
    """torchrun starts all processes again, and they go on from the last commit."""
    command = [
        "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2",
        f"--master-port={launch.free_port()}", "-m", "tests.horovod.programs.elastic",
        str(tmp_path), str(victim),
    ]  # fmt: skip
    variables = {"JAX_PLATFORMS": "cpu", "XLA_DTENSOR_HEARTBEAT_TIMEOUT": "8"}
    (result,) = launch.Processes(command, [variables]).wait(180)
    assert result.code == 0, result.output
    assert result.output.count("all of it") == 2
    assert "went on after 4" in result.output
