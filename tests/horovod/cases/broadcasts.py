"""broadcast."""

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
    values,
)


@case("V")
def horovod_broadcast():
    for i, (dtype, dims) in enumerate((*PAIRS, (torch.bool, 1))):
        root = i % hvd.size()
        shape = [4] * dims
        tensor = given(shape, dtype)
        check(hvd.broadcast(tensor, root), same(data(root, shape, dtype)))
        check(tensor, lambda rank, s=shape, d=dtype: data(rank, s, d))
    zero = hvd.per_rank(lambda rank: torch.tensor([-0.0 if rank == 1 else 1.0]))
    signs = [torch.signbit(value).item() for value in values(hvd.broadcast(zero, 1)).values()]
    assert all(signs)


@case("V")
def horovod_broadcast_inplace():
    for i, (dtype, dims) in enumerate(PAIRS):
        root = i % hvd.size()
        tensor = given([4] * dims, dtype)
        assert hvd.broadcast_(tensor, root) is tensor
        check(tensor, same(data(root, [4] * dims, dtype)))
    tensor = given([3])
    hvd.synchronize(hvd.broadcast_async_(tensor, 1))
    check(tensor, same(data(1, [3])))


@case("P")
def horovod_broadcast_process_sets():
    pair = sets()
    for dtype, dims in PAIRS:
        shape = [4] * dims
        # The first of each set.
        root = 0 if alone() or hvd.rank() % 2 == 0 else 1
        got = hvd.broadcast(given(shape, dtype), root, process_set=pair.own)
        check(got, lambda r, s=shape, d=dtype: data(pair.members(r)[0], s, d))
    pair.remove()


@case("E2", APART, fast=True)
def horovod_broadcast_error():
    rank = hvd.rank()
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.broadcast(torch.ones(17, 10 * (rank + 1)), 0),
        "mismatched shapes",
        "rank 1: [17, 20]",
    )


@case("E2", APART)
def horovod_broadcast_type_error():
    dtype = torch.int32 if hvd.rank() % 2 == 0 else torch.float32
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.broadcast(torch.ones(17, dtype=dtype), 0),
        "mismatched data types",
    )


@case("E2", APART)
def horovod_broadcast_rank_error():
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.broadcast(torch.ones(3), hvd.rank()),
        "mismatched root ranks",
        "rank 0: 0",
        "rank 1: 1",
    )


@case("E1", fast=True)
def broadcast_from_nobody():
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.broadcast(given([3]), hvd.size()),
        f"root rank {hvd.size()}",
    )


@case("E2")
def horovod_broadcast_duplicate_name_error():
    duplicates(lambda name: hvd.broadcast_async(given([3]), 0, name=name))


@case("V")
def horovod_broadcast_grad():
    for i, (dtype, dims) in enumerate(FLOAT_PAIRS):
        root, shape = i % hvd.size(), [4] * dims
        tensor = given(shape, dtype, grad=True)
        (hvd.broadcast(tensor, root) * given(shape, dtype, seed=9)).sum().backward()
        average = everyone(shape, dtype, seed=9).sum(0) / hvd.size()
        check(
            tensor.grad,
            lambda r, a=average, o=root: a if r == o else torch.zeros_like(a),
            rtol=1e-3,
        )


@case("P")
def horovod_broadcast_grad_process_sets():
    pair = sets()
    tensor = given([4, 2], grad=True)
    if alone():
        root, members, sets_ = 0, pair.even.ranks, pair.even
    else:
        members, sets_ = pair.members(hvd.rank()), pair.own
        root = members[0]
    (hvd.broadcast(tensor, root, process_set=sets_) * given([4, 2], seed=9)).sum().backward()
    average = everyone([4, 2], seed=9, ranks=members).mean(0)
    check(tensor.grad, lambda r: average if r == root else torch.zeros(4, 2), ranks=members)
    pair.remove()
