"""allreduce and grouped_allreduce."""

from __future__ import annotations

import torch

import xla_dtensor.horovod as hvd
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

EDGE = 5


def total(shape, dtype, op, seed=0, ranks=None):
    """The reduction of what the ranks have."""
    stacked = everyone(shape, dtype, seed, ranks)
    if op == hvd.Sum:
        return stacked.sum(0, dtype=dtype)
    if op == hvd.Average:
        wide = stacked.sum(0, dtype=torch.int64) if not dtype.is_floating_point else stacked.sum(0)
        count = len(stacked)
        return (wide // count if not dtype.is_floating_point else wide / count).to(dtype)
    if op == hvd.Min:
        return stacked.amin(0)
    if op == hvd.Max:
        return stacked.amax(0)
    return stacked.prod(0, dtype=dtype)


def reduced(op, pairs=PAIRS):
    for dtype, dims in pairs:
        shape = [EDGE] * dims
        tensor = given(shape, dtype)
        check(hvd.allreduce(tensor, op=op), same(total(shape, dtype, op)), rtol=1e-3)
        check(tensor, lambda rank, s=shape, d=dtype: data(rank, s, d))  # as it was


@case("V", fast=True)
def horovod_allreduce():
    reduced(hvd.Sum)


@case("V")
def horovod_allreduce_average():
    reduced(hvd.Average)


@case("V")
def horovod_allreduce_min():
    reduced(hvd.Min)


@case("V")
def horovod_allreduce_max():
    reduced(hvd.Max)


@case("V")
def horovod_allreduce_product():
    reduced(hvd.Product, PAIRS[3:])


@case("V")
def horovod_allreduce_inplace():
    for dtype, dims in PAIRS:
        shape = [EDGE] * dims
        tensor = given(shape, dtype)
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        check(tensor, same(total(shape, dtype, hvd.Sum)))


@case("V", fast=True)
def horovod_allreduce_async_fused():
    handles = []
    for seed, (dtype, dims) in enumerate(PAIRS):
        shape = [EDGE] * dims
        handles.append((hvd.allreduce_async(given(shape, dtype, seed), op=hvd.Sum), shape, dtype))
    for handle, _, _ in handles:
        while not hvd.poll(handle):
            pass
    for seed, (handle, shape, dtype) in enumerate(handles):
        check(hvd.synchronize(handle), same(total(shape, dtype, hvd.Sum, seed)))


def scaled(values, factor, dtype):
    """As Horovod scales: integers in float64, truncated."""
    if dtype.is_floating_point:
        return (values.to(torch.promote_types(dtype, torch.float32)) * factor).to(dtype)
    return (values.to(torch.float64) * factor).to(dtype)


@case("V")
def horovod_allreduce_prescale():
    for dtype, dims in PAIRS:
        shape = [EDGE] * dims
        got = hvd.allreduce(given(shape, dtype), op=hvd.Sum, prescale_factor=0.75)
        expected = scaled(everyone(shape, dtype), 0.75, dtype).sum(0, dtype=dtype)
        check(got, same(expected), rtol=1e-3)


@case("V")
def horovod_allreduce_postscale():
    for dtype, dims in PAIRS:
        shape = [EDGE] * dims
        got = hvd.allreduce(given(shape, dtype), op=hvd.Sum, postscale_factor=0.75)
        expected = scaled(everyone(shape, dtype).sum(0, dtype=dtype), 0.75, dtype)
        check(got, same(expected), rtol=1e-3)


@case("P", fast=True)
def horovod_allreduce_process_sets():
    pair = sets()
    for dtype, dims in PAIRS:
        shape = [EDGE] * dims
        got = hvd.allreduce(given(shape, dtype), op=hvd.Sum, process_set=pair.own)
        check(
            got,
            lambda r, s=shape, d=dtype: total(s, d, hvd.Sum, ranks=pair.members(r)),
        )
    pair.remove()


@case("E2", APART, fast=True)
def horovod_allreduce_error():
    rank = hvd.rank()
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.allreduce(torch.ones(17 + rank)),
        "mismatched shapes",
        "rank 0: [17]",
        "rank 1: [18]",
    )
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.allreduce(torch.ones([3] * (1 + rank % 2))),
        "mismatched ranks of tensors",
        "1 dims",
        "2 dims",
    )
    check(hvd.allreduce(torch.ones(2)), same(torch.ones(2)))  # and it goes on


@case("E2", APART)
def horovod_allreduce_type_error():
    dtype = torch.int32 if hvd.rank() % 2 == 0 else torch.float32
    raises(
        hvd.HorovodInternalError,
        lambda: hvd.allreduce(torch.ones(17, dtype=dtype)),
        "mismatched data types",
        "int32",
        "float32",
    )


@case("E2", APART, name="horovod_allreduce_cpu_gpu_error")
def horovod_allreduce_of_host_and_device():
    """Not an error here: tensors of the host and of devices go the same way."""
    place = "xla" if hvd.rank() % 2 else "cpu"
    got = hvd.allreduce(torch.full((3,), float(hvd.rank())).to(place), op=hvd.Sum)
    assert got.device.type == place
    check(got, same(torch.full((3,), sum(range(hvd.size())) * 1.0)))


def duplicates(function):
    """Of two of one name that are on their way at once, the second is refused: first on rank 0,
    then on the others."""
    handles = []
    for turn in (True, False):
        if alone() or (hvd.rank() == 0) == turn:
            handles.append(function("duplicate_name"))
            raises(ValueError, lambda: function("duplicate_name"), "duplicate_name")
        hvd.barrier()
        if alone():
            break
    for handle in handles:
        hvd.synchronize(handle)
    hvd.synchronize(function("duplicate_name"))


@case("E2")
def horovod_allreduce_duplicate_name_error():
    duplicates(lambda name: hvd.allreduce_async(given([3]), name=name))


def allreduce_gradient(op):
    for dtype, dims in FLOAT_PAIRS:
        shape = [EDGE] * dims
        tensor = given(shape, dtype, grad=True)
        weights = given(shape, dtype, seed=9)
        (hvd.allreduce(tensor, op=op) * weights).sum().backward()
        check(tensor.grad, same(total(shape, dtype, op, seed=9)), rtol=1e-3)


@case("V", fast=True)
def horovod_allreduce_grad():
    allreduce_gradient(hvd.Sum)


@case("V")
def horovod_allreduce_grad_average():
    allreduce_gradient(hvd.Average)


@case("P")
def horovod_allreduce_grad_process_sets():
    pair = sets()
    tensor = given([EDGE, EDGE], grad=True)
    weights = given([EDGE, EDGE], seed=9)
    (hvd.allreduce(tensor, op=hvd.Sum, process_set=pair.own) * weights).sum().backward()
    check(
        tensor.grad,
        lambda r: total([EDGE, EDGE], torch.float32, hvd.Sum, 9, pair.members(r)),
    )
    pair.remove()


# --- grouped -------------------------------------------------------------------------------------


def group(dims, dtype, grad=False):
    """Five tensors."""
    return [given([EDGE + i] * dims, dtype, seed=i, grad=grad) for i in range(5)]


def grouped(op):
    for dtype, dims in PAIRS:
        got = hvd.grouped_allreduce(group(dims, dtype), op=op)
        for i, one in enumerate(got):
            check(one, same(total([EDGE + i] * dims, dtype, op, seed=i)), rtol=1e-3)


@case("V", fast=True)
def horovod_grouped_allreduce():
    grouped(hvd.Sum)


@case("V")
def horovod_grouped_allreduce_average():
    grouped(hvd.Average)


@case("V")
def horovod_grouped_allreduce_inplace():
    for dtype, dims in PAIRS[::3]:
        tensors = group(dims, dtype)
        hvd.grouped_allreduce_(tensors, op=hvd.Sum)
        for i, tensor in enumerate(tensors):
            check(tensor, same(total([EDGE + i] * dims, dtype, hvd.Sum, seed=i)))
    tensors = group(1, torch.float32)
    hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=hvd.Max))
    check(tensors[2], same(total([EDGE + 2], torch.float32, hvd.Max, seed=2)))


@case("P")
def horovod_grouped_allreduce_process_sets():
    pair = sets()
    for dtype, dims in PAIRS[::2]:
        got = hvd.grouped_allreduce(group(dims, dtype), op=hvd.Sum, process_set=pair.own)
        for i, one in enumerate(got):
            shape = [EDGE + i] * dims
            check(
                one,
                lambda r, s=shape, d=dtype, i=i: total(s, d, hvd.Sum, i, pair.members(r)),
            )
    pair.remove()


@case("E2", APART, name="horovod_grouped_allreduce_cpu_gpu_error")
def horovod_grouped_allreduce_of_host_and_device():
    """Not an error here: a group may have tensors of both."""
    got = hvd.grouped_allreduce([torch.ones(2), torch.ones(3, device="xla")], op=hvd.Sum)
    assert [one.device.type for one in got] == ["cpu", "xla"]
    for one in got:
        check(one, same(torch.full(one.shape, float(hvd.size()))))


@case("X", APART)
def grouped_allreduce_of_different_numbers():
    tensors = [torch.ones(2)] * (2 + hvd.rank() % 2)
    raises(hvd.HorovodInternalError, lambda: hvd.grouped_allreduce(tensors), "numbers of tensors")


def grouped_gradient(op):
    for dtype, dims in FLOAT_PAIRS[1:]:
        tensors = group(dims, dtype, grad=True)
        got = hvd.grouped_allreduce(tensors, op=op)
        sum(
            (one * given(one.shape, dtype, seed=20 + i)).sum() for i, one in enumerate(got)
        ).backward()
        for i, tensor in enumerate(tensors):
            check(tensor.grad, same(total([EDGE + i] * dims, dtype, op, seed=20 + i)), rtol=1e-3)


@case("V")
def horovod_grouped_allreduce_grad():
    grouped_gradient(hvd.Sum)


@case("V")
def horovod_grouped_allreduce_grad_average():
    grouped_gradient(hvd.Average)


@case("P")
def horovod_grouped_allreduce_grad_process_sets():
    pair = sets()
    tensors = group(2, torch.float32, grad=True)
    got = hvd.grouped_allreduce(tensors, op=hvd.Sum, process_set=pair.own)
    sum((one * given(one.shape, seed=20 + i)).sum() for i, one in enumerate(got)).backward()
    for i, tensor in enumerate(tensors):
        shape = [EDGE + i] * 2
        check(
            tensor.grad,
            lambda r, s=shape, i=i: total(s, torch.float32, hvd.Sum, 20 + i, pair.members(r)),
        )
    pair.remove()


@case("V")
def compression_fp16():
    for compression, dtype in ((hvd.Compression.fp16, torch.float16),
                               (hvd.Compression.bf16, torch.bfloat16)):  # fmt: skip
        for wide in (torch.float32, torch.float64):
            small, context = compression.compress(given([EDGE], wide))
            assert small.dtype == dtype
            assert compression.decompress(small, context).dtype == wide
            got = hvd.allreduce(given([EDGE], wide), op=hvd.Sum, compression=compression)
            check(got, same(total([EDGE], wide, hvd.Sum)))
        kept, context = compression.compress(given([EDGE], torch.int32))
        assert kept.dtype == torch.int32 and context is None


@case("X", fast=True)
def a_gradient_that_there_is_none_of():
    tensor = given([EDGE], grad=True)
    result = hvd.allreduce(tensor, op=hvd.Max)
    raises(NotImplementedError, lambda: result.sum().backward(), "Average")
    raises(ValueError, lambda: hvd.allreduce(given([1]), average=True, op=hvd.Sum), "average")
