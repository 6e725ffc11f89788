"""Who is who, beginning and end, barriers, the timeline."""

from __future__ import annotations

import json
import os
import tempfile
import time

import torch

import xla_dtensor as xd
import xla_dtensor.horovod as hvd
from tests.horovod.ranks import (
    ALL,
    APART,
    DEVICES,
    PROCESSES,
    alone,
    case,
    check,
    data,
    everyone,
    given,
    raises,
    same,
    sets,
)


@case("B", APART)
def horovod_reinit():
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    check(hvd.allreduce(torch.ones(2), op=hvd.Sum), same(torch.full((2,), float(size))))


@case("B")
def horovod_is_initialized():
    assert hvd.is_initialized()
    hvd.shutdown()
    assert not hvd.is_initialized()
    raises(ValueError, hvd.size, "hvd.init()")
    raises(ValueError, lambda: hvd.allreduce(torch.ones(1)), "hvd.init()")
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()


@case("V", fast=True)
def horovod_rank():
    size = hvd.size()
    check(given([1], seed=3) * 0 + hvd.rank(), lambda r: torch.tensor([float(r)]))
    if alone():
        number = hvd.rank()
        check((number * 2 + 1) % size, lambda r: torch.tensor((r * 2 + 1) % size))
        check(torch.where(number == 1, 5, 7), lambda r: torch.tensor(5 if r == 1 else 7))
        for use in (lambda: bool(number == 0), lambda: range(number), lambda: [1, 2][number],
                    lambda: int(number), lambda: f"{number:d}"):  # fmt: skip
            raises((xd.PerDeviceValueError, TypeError), use)
        raises(xd.PerDeviceValueError, lambda: range(number), "is_coordinator", "per_rank")
    else:
        assert 0 <= hvd.rank() < size and isinstance(hvd.rank(), int)
        assert hvd.allgather_object(hvd.rank()) == list(range(size))
        assert 0 <= hvd.local_rank() < hvd.local_size()
        assert hvd.cross_rank() == 0 and hvd.is_coordinator() == (hvd.rank() == 0)


@case("V", fast=True)
def horovod_size():
    assert hvd.size() == hvd.local_size() > 1 and hvd.cross_size() == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


# --- process sets --------------------------------------------------------------------------------


@case("X", fast=True)
def sets_of_ranks():
    pair = sets()
    assert pair.even.process_set_id != pair.odd.process_set_id != 0
    assert pair.even.size() == len(pair.even.ranks) == -(-hvd.size() // 2)
    raises(ValueError, lambda: hvd.add_process_set(pair.even.ranks), "already")
    raises(ValueError, lambda: hvd.ProcessSet([0, 0]), "once")
    if not alone():
        other = pair.odd if hvd.rank() % 2 == 0 else pair.even
        raises(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=other), "no member")
        raises(ValueError, other.rank, "no member")
        assert pair.own.ranks[pair.own.rank()] == hvd.rank()
    pair.remove()
    assert pair.even.process_set_id is None
    raises(ValueError, pair.even.size, "registered")
    assert not hvd.remove_process_set(pair.even)


@case("E2", APART, fast=True)
def sets_that_differ():
    one = [0] if hvd.rank() == 0 else [1]
    raises(hvd.HorovodInternalError, lambda: hvd.add_process_set(one), "[0]", "[1]", "rank 0")


# --- barriers ------------------------------------------------------------------------------------


@case("T", APART)
def process_set_barrier_op():
    pair = sets()
    hvd.barrier()
    began = time.monotonic()
    if hvd.rank() == 0:
        time.sleep(1.0)
    hvd.barrier(pair.own)
    if hvd.rank() % 2 == 0:
        assert hvd.rank() or time.monotonic() - began >= 1.0
    hvd.barrier()
    pair.remove()


@case("T", APART, fast=True)
def global_barrier_op():
    path = hvd.broadcast_object(tempfile.mktemp())
    if hvd.rank() == 0:
        time.sleep(0.3)
        with open(path, "w") as file:
            file.write("there")
    hvd.barrier()
    assert os.path.exists(path)
    hvd.barrier()
    if hvd.rank() == 0:
        os.unlink(path)


@case("P")
def barrier_with_multiple_collectives():
    for i in range(3):
        first = hvd.allreduce_async(given([4]), op=hvd.Sum, name=f"first{i}")
        hvd.barrier()
        second = hvd.allreduce_async(given([4]), op=hvd.Sum, name=f"second{i}")
        hvd.barrier()
        assert torch.equal(hvd.synchronize(first).cpu(), hvd.synchronize(second).cpu())


# --- the timeline --------------------------------------------------------------------------------


@case("T", fast=True)
def timeline_api():
    path = tempfile.mktemp(".json")
    if not hvd.is_coordinator():
        for _ in range(2):
            hvd.allreduce(torch.ones(3), name="in the timeline")
        hvd.allgather(torch.ones(3))
        return
    hvd.start_timeline(path, mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="in the timeline")
    raises(ValueError, lambda: hvd.start_timeline(path), "stop_timeline")
    hvd.stop_timeline()
    events = read(path)
    names = [event["name"] for event in events]
    assert names.count("NEGOTIATE_ALLREDUCE") >= 2  # its beginning and its end
    assert "ALLREDUCE" in names and "CYCLE_START" in names
    rows = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert any("in the timeline" in row for row in rows)
    hvd.start_timeline(path)
    hvd.allreduce(torch.ones(3), name="in the timeline")
    hvd.stop_timeline()
    names = [event["name"] for event in read(path)]
    assert "NEGOTIATE_ALLREDUCE" in names and "CYCLE_START" not in names
    hvd.allgather(torch.ones(3))


def read(path):
    with open(path) as file:
        events = json.load(file)
    os.unlink(path)
    return events


@case("E2", APART, fast=True)
def ranks_that_wait_for_different_names():
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.allreduce(torch.ones(1), name=f"mine{hvd.rank()}"),
        "deadlock",
        "'mine0'",
        "'mine1'",
        "rank 0 waiting",
    )
    assert hvd.allreduce(torch.ones(1)).item() == 1


@case("E2", APART)
def ranks_that_do_something_else():
    function = hvd.allreduce if hvd.rank() == 0 else hvd.allgather
    raises(
        hvd.HorovodInternalError,
        lambda: function(torch.ones(2)),
        "mismatched collectives",
        "rank 0: allreduce",
    )
    op = hvd.Sum if hvd.rank() == 0 else hvd.Average
    raises(hvd.HorovodInternalError, lambda: hvd.allreduce(torch.ones(2), op=op), "reductions")
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + hvd.rank()),
        "prescale",
    )


@case("X", ALL, fast=True)
def what_is_built():
    assert not (hvd.mpi_threads_supported() or hvd.mpi_enabled() or hvd.mpi_built())
    assert not (hvd.gloo_enabled() or hvd.gloo_built() or hvd.nccl_built() or hvd.ddl_built())
    assert not (hvd.ccl_built() or hvd.cuda_built() or hvd.rocm_built())
    raises(ValueError, lambda: hvd.init(comm=[0, 1]), "ProcessSet")


@case("P", fast=True)
def process_sets_static():
    """Given to init, on all ranks in the same order."""
    hvd.shutdown()
    first, second = hvd.ProcessSet([0]), hvd.ProcessSet([1])
    hvd.init(process_sets=[first, second])
    assert (hvd.global_process_set.process_set_id, first.process_set_id) == (0, 1)
    assert second.process_set_id == 2 and hvd.global_process_set.size() == hvd.size()
    got = hvd.allreduce(given([3]), op=hvd.Sum, process_set=hvd.global_process_set)
    check(got, same(everyone([3]).sum(0)))
    if not alone():
        assert first.included() == (hvd.rank() == 0)
    hvd.remove_process_set(second)
    hvd.remove_process_set(first)


@case("X", APART)
def a_set_of_ones_own_between_two_of_all():
    """All launch the same programs: what one rank does alone in between splits nobody's."""
    first = hvd.add_process_set([0])
    x = torch.full((3,), float(hvd.rank()))
    if hvd.rank() == 0:
        time.sleep(1)  # so that its part comes last, and all three are in one list of responses
    handles = [hvd.allreduce_async(x, op=hvd.Sum, name="before")]
    if first.included():
        handles.append(hvd.allreduce_async(x + 5, op=hvd.Sum, name="own", process_set=first))
    handles.append(hvd.allreduce_async(x, op=hvd.Sum, name="after"))
    found = [hvd.synchronize(handle)[0].item() for handle in reversed(handles)]
    total = sum(range(hvd.size()))
    assert found == ([total, 5.0, total] if hvd.rank() == 0 else [total, total])
    hvd.remove_process_set(first)


@case("X", fast=True)
def all_asynchronous_forms():
    size = hvd.size()
    tensor = given([size])
    handles = [
        hvd.allreduce_async_(tensor, op=hvd.Sum),
        hvd.grouped_allreduce_async([given([2]), given([3])], op=hvd.Max),
        hvd.alltoall_async(given([size], seed=4)),
        hvd.alltoall_async(given([size], seed=4), splits=[1] * size),
    ]
    assert hvd.synchronize(handles[0]) is tensor
    check(tensor, same(everyone([size]).sum(0)))
    for got, shape in zip(hvd.synchronize(handles[1]), ([2], [3]), strict=True):
        check(got, same(everyone(shape).amax(0)))
    swapped = everyone([size], seed=4).t()
    check(hvd.synchronize(handles[2]), lambda r: swapped[r])
    got, received = hvd.synchronize(handles[3])
    check(got, lambda r: swapped[r])
    assert received.tolist() == [1] * size
    assert hvd.poll(handles[3])


@case("X", (DEVICES, PROCESSES), fast=True)
def tensors_on_the_ranks_devices():
    """As compiled steps take them."""
    assert hvd.mesh().size() >= hvd.size()
    x = hvd.per_rank(lambda rank: data(rank, [4]), device="xla")
    assert x.device.type == "xla"
    check(hvd.allreduce(x, op=hvd.Sum), same(everyone([4]).sum(0)))
    raises(ValueError, lambda: hvd.per_rank(lambda rank: 1.0, device="cpu"), "'xla'")


@case("X", fast=True)
def elastic_state():
    """What is committed is gone back to; all ranks get rank 0's."""
    state = hvd.elastic.TorchState(step=1, rank=None if alone() else hvd.rank())
    state.step = 2
    state.commit()
    state.step = 3
    state.restore()
    assert state.step == 2
    state.sync()
    assert state.rank == (None if alone() else 0)
    sampler = hvd.elastic.ElasticSampler(range(3 * hvd.size()), shuffle=False)
    mine = list(sampler)
    assert len(mine) == (3 * hvd.size() if alone() else 3)
