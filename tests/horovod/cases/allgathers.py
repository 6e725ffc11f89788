"""allgather and grouped_allgather."""

from __future__ import annotations

import torch

import xla_dtensor.horovod as hvd
from tests.horovod.cases.allreduces import duplicates
from tests.horovod.ranks import (
    APART,
    FLOAT_PAIRS,
    PAIRS,
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


def rows(rank):
    """How many rows a rank has, where they differ."""
    return 3 * rank % 5 + 1


def concatenated(shape, dtype, seed=0, ranks=None):
    return torch.cat(list(everyone(shape, dtype, seed, ranks)))


@case("V", fast=True)
def horovod_allgather():
    for dtype, dims in (*PAIRS, (torch.bool, 2)):
        shape = [4] * dims
        check(hvd.allgather(given(shape, dtype)), same(concatenated(shape, dtype)))


@case("R", fast=True)
def horovod_allgather_variable_size():
    for dtype, dims in PAIRS:
        tensor = hvd.per_rank(lambda r, d=dtype, n=dims: data(r, [rows(r), *[4] * (n - 1)], d))
        expected = torch.cat(
            [data(r, [rows(r), *[4] * (dims - 1)], dtype) for r in range(hvd.size())]
        )
        check(hvd.allgather(tensor), same(expected))
    some = hvd.per_rank(lambda r: data(r, [2 * (r % 2), 3]))  # of some ranks nothing
    check(
        hvd.allgather(some), same(torch.cat([data(r, [2 * (r % 2), 3]) for r in range(hvd.size())]))
    )
    nothing = hvd.per_rank(lambda r: torch.zeros(0, 3))
    check(hvd.allgather(nothing), same(torch.zeros(0, 3)))


@case("V")
def horovod_allgather_async_fused():
    handles = [
        (hvd.allgather_async(given([4] * dims, dtype, seed)), [4] * dims, dtype)
        for seed, (dtype, dims) in enumerate(PAIRS)
    ]
    for seed, (handle, shape, dtype) in enumerate(handles):
        while not hvd.poll(handle):
            pass
        check(hvd.synchronize(handle), same(concatenated(shape, dtype, seed)))


@case("P")
def horovod_allgather_process_sets():
    pair = sets()
    for dtype, dims in PAIRS:
        shape = [4] * dims
        got = hvd.allgather(given(shape, dtype), process_set=pair.own)
        check(got, lambda r, s=shape, d=dtype: concatenated(s, d, 0, pair.members(r)))
    pair.remove()


@case("E2", APART)
def horovod_allgather_error():
    rank = hvd.rank()
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.allgather(torch.ones(17, 10 * (rank + 1))),
        "mismatched shapes",
        "rank 0: ['any', 10]",
        "rank 1: ['any', 20]",
    )
    raises(hvd.HorovodInternalError, lambda: hvd.allgather(torch.tensor(1.0)), "without dims")


@case("E2", APART)
def horovod_allgather_type_error():
    dtype = torch.int32 if hvd.rank() % 2 == 0 else torch.float32
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.allgather(torch.ones(17, dtype=dtype)),
        "mismatched data types",
    )


@case("E2")
def horovod_allgather_duplicate_name_error():
    duplicates(lambda name: hvd.allgather_async(given([3]), name=name))


@case("R", fast=True)
def horovod_allgather_grad():
    """A rank's rows get the average of the ranks' gradients of them."""
    size = hvd.size()
    for dtype, dims in FLOAT_PAIRS:
        tensor = given([3] * dims, dtype, grad=True)
        weights = given([3 * size, *[3] * (dims - 1)], dtype, seed=9)
        (hvd.allgather(tensor) * weights).sum().backward()
        average = everyone([3 * size, *[3] * (dims - 1)], dtype, seed=9).sum(0) / size
        check(tensor.grad, lambda r, a=average: a[3 * r : 3 * r + 3], rtol=1e-3)
    if not alone():
        mine = data(hvd.rank(), [rows(hvd.rank()), 2]).requires_grad_()
        count = sum(map(rows, range(size)))
        (hvd.allgather(mine) * given([count, 2], seed=9)).sum().backward()
        start = sum(map(rows, range(hvd.rank())))
        average = everyone([count, 2], seed=9).mean(0)
        check(mine.grad, lambda r: average[start : start + rows(r)])


@case("P")
def horovod_allgather_grad_process_sets():
    pair = sets()
    count = len(pair.even.ranks)
    if len(pair.odd.ranks) == count:
        tensor = given([3, 2], grad=True)
        weights = given([3 * count, 2], seed=9)
        (hvd.allgather(tensor, process_set=pair.own) * weights).sum().backward()

        def expected(rank):
            members = pair.members(rank)
            at = 3 * members.index(rank)
            return everyone([3 * count, 2], seed=9, ranks=members).mean(0)[at : at + 3]

        check(tensor.grad, expected)
    pair.remove()


@case("V")
def horovod_grouped_allgather():
    for dtype, dims in PAIRS:
        tensors = [given([4] * dims, dtype, seed) for seed in range(3)]
        for seed, got in enumerate(hvd.grouped_allgather(tensors)):
            check(got, same(concatenated([4] * dims, dtype, seed)))
    handle = hvd.grouped_allgather_async([given([4])])
    check(hvd.synchronize(handle)[0], same(concatenated([4], torch.float32)))


@case("P")
def horovod_grouped_allgather_process_sets():
    pair = sets()
    tensors = [given([4, 2], seed=seed) for seed in range(3)]
    for seed, got in enumerate(hvd.grouped_allgather(tensors, process_set=pair.own)):
        check(
            got,
            lambda r, s=seed: concatenated([4, 2], torch.float32, s, pair.members(r)),
        )
    pair.remove()


@case("R")
def horovod_grouped_allgather_grad():
    size = hvd.size()
    tensors = [given([3, 2], seed=seed, grad=True) for seed in range(3)]
    got = hvd.grouped_allgather(tensors)
    sum((one * given([3 * size, 2], seed=20 + i)).sum() for i, one in enumerate(got)).backward()
    for i, tensor in enumerate(tensors):
        average = everyone([3 * size, 2], seed=20 + i).mean(0)
        check(tensor.grad, lambda r, a=average: a[3 * r : 3 * r + 3])
