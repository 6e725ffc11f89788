"""reducescatter and grouped_reducescatter."""

from __future__ import annotations

import torch

import xla_dtensor.horovod as hvd
from tests.horovod.cases.allreduces import duplicates, scaled, total
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
    sets,
)


def part(whole, rank, ranks=None):
    """A rank's rows, of which the first have one more where they don't divide."""
    ranks = list(range(hvd.size())) if ranks is None else ranks
    least, more = divmod(len(whole), len(ranks))
    at = ranks.index(rank)
    start = at * least + min(at, more)
    return whole[start : start + least + (at < more)]


def shape_of(dims):
    return [4 * hvd.size(), *[3] * (dims - 1)]


def scattered(op, factors=(1.0, 1.0), many=False):
    for dtype, dims in PAIRS:
        shape = shape_of(dims)
        options = {"op": op, "prescale_factor": factors[0], "postscale_factor": factors[1]}
        stacked = scaled(everyone(shape, dtype), factors[0], dtype)
        if op == hvd.Sum:
            whole = stacked.sum(0, dtype=dtype)
        else:
            whole = total(shape, dtype, op)
        whole = scaled(whole, factors[1], dtype)
        if many:
            found = hvd.grouped_reducescatter([given(shape, dtype)] * 3, **options)
        else:
            found = [hvd.reducescatter(given(shape, dtype), **options)]
        for got in found:
            check(got, lambda r, w=whole: part(w, r), rtol=1e-3)


@case("V")
def horovod_reducescatter():
    scattered(hvd.Sum)
    for op in (hvd.Min, hvd.Max):
        scattered(op)
    if not alone():
        shape = [4 * hvd.size() + 1, 2]
        whole = everyone(shape).sum(0)
        check(hvd.reducescatter(given(shape), op=hvd.Sum), lambda r: part(whole, r))


@case("V")
def horovod_reducescatter_average():
    scattered(hvd.Average)


@case("V")
def horovod_reducescatter_prescale():
    scattered(hvd.Sum, (0.75, 1.0))


@case("V")
def horovod_reducescatter_postscale():
    scattered(hvd.Sum, (1.0, 0.75))


@case("E1")
def horovod_reducescatter_scalar_error():
    number = hvd.per_rank(lambda rank: torch.tensor(float(rank)))
    raises(hvd.HorovodInternalError, lambda: hvd.reducescatter(number), "without dims")


@case("E1", fast=True)
def horovod_reducescatter_adasum():
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.reducescatter(given(shape_of(1)), op=hvd.Adasum),
        "Adasum",
    )


@case("V")
def horovod_reducescatter_async_fused():
    handles = [
        hvd.reducescatter_async(given(shape_of(dims), dtype, seed), op=hvd.Sum)
        for seed, (dtype, dims) in enumerate(PAIRS)
    ]
    for seed, (handle, (dtype, dims)) in enumerate(zip(handles, PAIRS, strict=True)):
        while not hvd.poll(handle):
            pass
        whole = total(shape_of(dims), dtype, hvd.Sum, seed)
        check(hvd.synchronize(handle), lambda r, w=whole: part(w, r))


@case("E2", APART)
def horovod_reducescatter_error():
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.reducescatter(torch.ones(8, 10 * (hvd.rank() + 1))),
        "mismatched shapes",
        "rank 1: [8, 20]",
    )
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.reducescatter(torch.ones([8] * (1 + hvd.rank() % 2))),
        "mismatched ranks of tensors",
    )


@case("E2", APART)
def horovod_reducescatter_type_error():
    dtype = torch.int32 if hvd.rank() % 2 == 0 else torch.float32
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.reducescatter(torch.ones(8, dtype=dtype)),
        "mismatched data types",
    )


@case("E2")
def horovod_reducescatter_duplicate_name_error():
    duplicates(lambda name: hvd.reducescatter_async(given(shape_of(1)), name=name))


def gradient(op):
    size = hvd.size()
    for dtype, dims in FLOAT_PAIRS:
        shape = shape_of(dims)
        tensor = given(shape, dtype, grad=True)
        small = [4, *shape[1:]]
        (hvd.reducescatter(tensor, op=op) * given(small, dtype, seed=9)).sum().backward()
        whole = torch.cat(list(everyone(small, dtype, seed=9)))
        check(tensor.grad, lambda r, w=whole: w * size if op == hvd.Sum else w)


@case("V")
def horovod_reducescatter_grad():
    gradient(hvd.Sum)


@case("V")
def horovod_reducescatter_grad_average():
    gradient(hvd.Average)


@case("P")
def horovod_reducescatter_process_sets():
    pair = sets()
    for dtype, dims in PAIRS[::2]:
        shape = shape_of(dims)
        got = hvd.reducescatter(given(shape, dtype), op=hvd.Sum, process_set=pair.own)

        def expected(r, s=shape, d=dtype):
            members = pair.members(r)
            return part(total(s, d, hvd.Sum, 0, members), r, members)

        check(got, expected)
    pair.remove()


@case("P")
def horovod_reducescatter_grad_process_sets():
    pair = sets()
    count = len(pair.even.ranks)
    if len(pair.odd.ranks) == count:
        tensor = given([4 * count, 2], grad=True)
        got = hvd.reducescatter(tensor, op=hvd.Sum, process_set=pair.own)
        (got * given([4, 2], seed=9)).sum().backward()
        check(
            tensor.grad,
            lambda r: torch.cat([data(o, [4, 2], seed=9) for o in pair.members(r)]) * count,
        )
    pair.remove()


# --- grouped -------------------------------------------------------------------------------------


@case("V")
def horovod_grouped_reducescatter():
    scattered(hvd.Sum, many=True)


@case("V")
def horovod_grouped_reducescatter_average():
    scattered(hvd.Average, many=True)


@case("V")
def horovod_grouped_reducescatter_prescale():
    scattered(hvd.Sum, (0.75, 1.0), many=True)


@case("V")
def horovod_grouped_reducescatter_postscale():
    scattered(hvd.Sum, (1.0, 0.75), many=True)


@case("E1")
def horovod_grouped_reducescatter_scalar_error():
    number = hvd.per_rank(lambda rank: torch.tensor(float(rank)))
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.grouped_reducescatter([given(shape_of(1)), number]),
        "without dims",
    )


@case("P")
def horovod_grouped_reducescatter_process_sets():
    pair = sets()
    shape = shape_of(2)
    tensors = [given(shape, seed=seed) for seed in range(3)]
    found = hvd.grouped_reducescatter(tensors, op=hvd.Sum, process_set=pair.own)
    for seed, got in enumerate(found):

        def expected(r, s=seed):
            members = pair.members(r)
            return part(total(shape, torch.float32, hvd.Sum, s, members), r, members)

        check(got, expected)
    handle = hvd.grouped_reducescatter_async(tensors, op=hvd.Sum, process_set=pair.own)
    assert len(hvd.synchronize(handle)) == 3
    pair.remove()


@case("V")
def horovod_grouped_reducescatter_grad():
    size = hvd.size()
    tensors = [given(shape_of(2), seed=seed, grad=True) for seed in range(3)]
    got = hvd.grouped_reducescatter(tensors, op=hvd.Sum)
    sum((one * given([4, 3], seed=20 + i)).sum() for i, one in enumerate(got)).backward()
    for i, tensor in enumerate(tensors):
        whole = torch.cat(list(everyone([4, 3], seed=20 + i))) * size
        check(tensor.grad, lambda r, w=whole: w)
