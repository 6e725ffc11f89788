"""Ranks that are done before others."""

from __future__ import annotations

import torch

import xla_dtensor.horovod as hvd
from tests.horovod.ranks import ALL, APART, case, check, raises, same


@case("J", APART, fast=True)
def horovod_join_allreduce():
    size, rank = hvd.size(), hvd.rank()
    for dtype in (torch.int32, torch.int64, torch.float32, torch.float64):
        for first in range(size):
            if rank != first:
                sum_, average = (
                    hvd.allreduce_async(torch.full((3,), 4, dtype=dtype), op=op, name=f"{op!r}")
                    for op in (hvd.Sum, hvd.Average)
                )
                check(hvd.synchronize(sum_), same(torch.full((3,), 4 * (size - 1), dtype=dtype)))
                expected = 4 * (size - 1) / size
                value = expected if dtype.is_floating_point else int(expected)
                check(hvd.synchronize(average), same(torch.full((3,), value, dtype=dtype)))
            last = hvd.join()
            assert last != first or size == 1
            assert len(set(hvd.allgather_object(last))) == 1


@case("J", APART)
def horovod_join_allgather():
    error = hvd.HorovodInternalError
    if hvd.rank() != 0:
        raises(error, lambda: hvd.allgather(torch.ones(2), name="x"), "rank 0 joined")
    hvd.join()


@case("J", APART)
def horovod_join_broadcast():
    error = hvd.HorovodInternalError
    if hvd.rank() != 0:
        raises(error, lambda: hvd.broadcast(torch.ones(2), 1, name="x"), "rank 0 joined")
        raises(error, lambda: hvd.allreduce(torch.ones(2), op=hvd.Max), "rank 0 joined")
    hvd.join()


@case("X", APART)
def unequal_numbers_of_batches():
    """What join is for: ranks have different numbers of steps, and all go on after it."""
    for _ in range(hvd.rank() + 1):
        hvd.allreduce(torch.ones(1))
    assert hvd.join() == hvd.size() - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@case("X", ALL)
def join_at_once():
    last = hvd.join()
    assert 0 <= last < hvd.size()
