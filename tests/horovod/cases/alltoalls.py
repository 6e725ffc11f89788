"""alltoall."""

from __future__ import annotations

import torch

import xla_dtensor.horovod as hvd
from tests.horovod.ranks import (
    APART,
    DEVICES,
    FLOAT_PAIRS,
    PAIRS,
    PerRank,
    alone,
    case,
    check,
    data,
    everyone,
    given,
    raises,
    sets,
    values,
)
from xla_dtensor.errors import UnsupportedOpError


def splits_of(rank, size=None):
    """Rank r sends r + 1 rows to rank 0, r + 2 to rank 1, and so on."""
    return [rank + 1 + i for i in range(hvd.size() if size is None else size)]


def sent(rank, to, rest, dtype, seed=0, ranks=None):
    """What a rank sends to another."""
    ranks = list(range(hvd.size())) if ranks is None else ranks
    splits = splits_of(rank, len(ranks))
    at = ranks.index(to)
    whole = data(rank, [sum(splits), *rest], dtype, seed)
    return whole[sum(splits[:at]) : sum(splits[: at + 1])]


@case("R")
def horovod_alltoall():
    ranks = range(hvd.size())
    for dtype, dims in PAIRS:
        rest = [4] * (dims - 1)
        tensor = hvd.per_rank(lambda r, d=dtype, n=rest: data(r, [sum(splits_of(r)), *n], d))
        splits = PerRank(map(splits_of, ranks)) if alone() else splits_of(hvd.rank())
        got, received = hvd.alltoall(tensor, splits=splits)
        check(got, lambda r, d=dtype, n=rest: torch.cat([sent(o, r, n, d) for o in ranks]))
        check(
            received,
            lambda r: torch.tensor([splits_of(o)[r] for o in ranks], dtype=torch.int32),
        )


@case("R")
def horovod_alltoall_equal_split():
    """Of rank r, r + 1 rows for each."""
    ranks, size = range(hvd.size()), hvd.size()
    for dtype, dims in PAIRS[::2]:
        rest = [4] * (dims - 1)
        tensor = hvd.per_rank(lambda r, d=dtype, n=rest: data(r, [size * (r + 1), *n], d))

        def expected(r, d=dtype, n=rest):
            parts = [data(o, [size * (o + 1), *n], d) for o in ranks]
            return torch.cat([p[(o + 1) * r : (o + 1) * (r + 1)] for o, p in enumerate(parts)])

        check(hvd.alltoall(tensor), expected)
    even = given([size * 2, 3])
    check(
        hvd.alltoall(even),
        lambda r: torch.cat([data(o, [size * 2, 3])[2 * r : 2 * r + 2] for o in ranks]),
    )


@case("R")
def alltoall_of_few_rows():
    """Not all rows are sent, and some ranks send none."""
    size = hvd.size()
    splits = [1] * (size - 1) + [0]
    tensor = given([size + 2, 2])
    each = PerRank([splits] * size) if alone() else splits
    if alone():
        tensor = PerRank(values(tensor)[r] for r in range(size))
    got, received = hvd.alltoall(tensor, each)
    check(
        got,
        lambda r: (
            torch.cat([data(o, [size + 2, 2])[r : r + 1] for o in range(size)])
            if r < size - 1
            else torch.zeros(0, 2)
        ),
    )
    check(received, lambda r: torch.full((size,), int(r < size - 1), dtype=torch.int32))


@case("G", APART)
def horovod_alltoall_splits_on_gpu():
    size = hvd.size()
    splits = torch.ones(size, dtype=torch.int32, device="xla")
    got, received = hvd.alltoall(given([size]).to("xla"), splits)
    assert got.device.type == "xla" and received.tolist() == [1] * size
    check(got, lambda r: torch.stack([data(o, [size])[r] for o in range(size)]))


@case("P")
def horovod_alltoall_process_sets():
    pair = sets()
    if alone():
        count = len(pair.even.ranks)
        got = hvd.alltoall(given([2 * count, 3]), process_set=pair.own)

        def expected(r):
            members = pair.members(r)
            at = 2 * members.index(r)
            return torch.cat([data(o, [2 * count, 3])[at : at + 2] for o in members])

        check(got, expected)
    else:
        members = pair.members(hvd.rank())
        mine = splits_of(hvd.rank(), len(members))
        got, _ = hvd.alltoall(data(hvd.rank(), [sum(mine), 3]), mine, process_set=pair.own)
        f32 = torch.float32
        check(got, lambda r: torch.cat([sent(o, r, [3], f32, 0, members) for o in members]))
    pair.remove()


@case("E2", APART, fast=True)
def horovod_alltoall_type_error():
    dtype = torch.int32 if hvd.rank() % 2 == 0 else torch.float32
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.alltoall(torch.ones(2 * hvd.size(), dtype=dtype)),
        "mismatched data types",
    )


@case("E1")
def horovod_alltoall_equal_split_length_error():
    raises(hvd.HorovodInternalError, lambda: hvd.alltoall(given([hvd.size() + 1])), "don't divide")


@case("E1")
def horovod_alltoall_splits_error():
    size = hvd.size()
    raises(
        hvd.HorovodInternalError, lambda: hvd.alltoall(given([size - 1]), [1] * size), "more than"
    )
    raises(
        hvd.HorovodInternalError, lambda: hvd.alltoall(given([size]), [1] * (size + 1)), "splits"
    )


@case("E1", fast=True)
def horovod_alltoall_splits_type_error():
    raises(ValueError, lambda: hvd.alltoall(given([hvd.size()]), torch.ones(hvd.size())), "float32")
    raises(ValueError, lambda: hvd.alltoall(given([hvd.size()]), "ab"), "rows go to each rank")


@case("R", fast=True)
def alltoall_with_splits_in_a_tensor():
    """Which is per device where one process drives all ranks."""
    ranks = range(hvd.size())
    tensor = hvd.per_rank(lambda r: data(r, [sum(splits_of(r)), 2]))
    got, _ = hvd.alltoall(tensor, splits=hvd.per_rank(lambda r: torch.tensor(splits_of(r))))
    check(got, lambda r: torch.cat([sent(o, r, [2], torch.float32) for o in ranks]))


@case("E1", (DEVICES,))
def alltoall_of_a_per_device_tensor_with_splits_of_each_rank():
    splits = PerRank(map(splits_of, range(hvd.size())))
    rows = max(map(sum, splits))
    raises(
        UnsupportedOpError, lambda: hvd.alltoall(given([rows]), splits=splits), "PerRank(x.local"
    )


@case("E2", APART)
def horovod_alltoall_rank_error():
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.alltoall(torch.ones(2 * hvd.size(), 10 * (hvd.rank() + 1))),
        "mismatched shapes",
        "rank 1: ['any', 20]",
    )


@case("R", APART)
def horovod_alltoall_grad():
    size, rank = hvd.size(), hvd.rank()
    for dtype, dims in FLOAT_PAIRS:
        rest = [4] * (dims - 1)
        mine = splits_of(rank)
        tensor = data(rank, [sum(mine), *rest], dtype).requires_grad_()
        got, _ = hvd.alltoall(tensor, mine)
        (got * data(rank, got.shape, dtype, 9)).sum().backward()

        def came_back(r, d=dtype, n=rest, own=mine):
            parts = []
            for to in range(size):
                counts = [splits_of(o)[to] for o in range(size)]
                weights = data(to, [sum(counts), *n], d, 9)
                parts.append(weights[sum(counts[:r]) : sum(counts[: r + 1])])
            return torch.cat(parts)

        check(tensor.grad, came_back)


@case("V")
def horovod_alltoall_equal_split_grad():
    size = hvd.size()
    for dtype, dims in FLOAT_PAIRS:
        shape = [2 * size, *[4] * (dims - 1)]
        tensor = given(shape, dtype, grad=True)
        (hvd.alltoall(tensor) * given(shape, dtype, seed=9)).sum().backward()
        stacked = everyone(shape, dtype, seed=9)
        check(tensor.grad, lambda r, s=stacked: torch.cat(list(s[:, 2 * r : 2 * r + 2])))


@case("P")
def horovod_alltoall_grad_process_sets():
    pair = sets()
    count = len(pair.even.ranks)
    if len(pair.odd.ranks) == count:
        tensor = given([2 * count, 3], grad=True)
        got = hvd.alltoall(tensor, process_set=pair.own)
        (got * given([2 * count, 3], seed=9)).sum().backward()

        def expected(r):
            members = pair.members(r)
            at = 2 * members.index(r)
            return torch.cat([data(o, [2 * count, 3], seed=9)[at : at + 2] for o in members])

        check(tensor.grad, expected)
    pair.remove()
