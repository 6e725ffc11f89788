"""The table of Horovod's collectives: each has a function that makes its request, and variants.

A function here has the parameters of a public one, and returns the request that these mean. What is
done with it, the name and the docstring are the variant's (`variants`). A collective has a second
function where a variant has other parameters: ``compression`` is only of those that wait, and a
grouped one takes ``tensors``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.errors import HorovodInternalError
from xla_dtensor.horovod.api.variants import (
    ASYNC,
    ASYNC_IN_PLACE,
    GROUPED,
    GROUPED_ASYNC,
    GROUPED_ASYNC_IN_PLACE,
    GROUPED_IN_PLACE,
    IN_PLACE,
    WAITED,
)
from xla_dtensor.horovod.compression import Compression
from xla_dtensor.horovod.process_sets import global_process_set
from xla_dtensor.horovod.rank_number import PerRank
from xla_dtensor.horovod.reductions import Adasum, Average, ReduceOp, reduction
from xla_dtensor.horovod.world import HorovodRequest

# --- allreduce -----------------------------------------------------------------------------------


def _allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> HorovodRequest:
    """The average, or another reduction, of the ranks' tensors. Differentiable: the gradient is the
    same reduction of the ranks' gradients, of `Average` and `Sum`.

    Args:
        tensor: of one shape and dtype on all ranks: a CPU tensor, or one on the xla device. Where
            one process drives all ranks, a per-device tensor, or a tensor that all of them have.
        average: deprecated; ``op``.
        name: under which the ranks find each other; numbered by default.
        compression: of `Compression`, what it travels as.
        op: `Average`, the default, `Sum`, `Adasum`, `Min`, `Max` or `Product`. Averages of integers
            are rounded down.
        prescale_factor, postscale_factor: factors before and after the reduction.
        process_set: the ranks that take part. Where one process drives all ranks, devices outside
            of it keep their values, and it may be a list of disjoint sets of one size.

    Returns:
        a tensor of the shape and dtype, on the device of ``tensor``.

    Raises:
        HorovodInternalError: the ranks differ in shape, dtype, ``op`` or factors, or one has ended.
        ValueError: ``op`` and ``average`` are given.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.full((3,), 2.0, device="xla") * (hvd.rank() + 1)
        n = hvd.size()
        assert hvd.allreduce(x).tolist() == [n + 1.0] * 3
        assert hvd.allreduce(x, op=hvd.Max).tolist() == [2.0 * n] * 3
    """
    how = reduction(op, average), prescale_factor, postscale_factor
    return HorovodRequest("allreduce", [tensor], name, process_set, *how, compression)


def _allreduce_as_is(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> HorovodRequest:
    how = reduction(op, average), prescale_factor, postscale_factor
    return HorovodRequest("allreduce", [tensor], name, process_set, *how)


def _allreduce_grouped(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> HorovodRequest:
    how = reduction(op, average), prescale_factor, postscale_factor
    return HorovodRequest("allreduce", tensors, name, process_set, *how, compression)


def _allreduce_grouped_as_is(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> HorovodRequest:
    how = reduction(op, average), prescale_factor, postscale_factor
    return HorovodRequest("allreduce", tensors, name, process_set, *how)


# --- reducescatter -------------------------------------------------------------------------------


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HorovodRequest:
    """The average, or another reduction, of the ranks' tensors, of which each gets its rows.
    Differentiable: the gradient is an allgather of the ranks' gradients.

    Args:
        tensor: of one shape and dtype on all ranks, with one dim or more. Its rows are shared out
            evenly; the first ranks get one more where they don't divide, which per-device tensors
            can't.
        name: under which the ranks find each other; numbered by default.
        compression: of `Compression`, what it travels as.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        process_set: the ranks that take part, as of `allreduce`.
        prescale_factor, postscale_factor: factors before and after the reduction.

    Returns:
        the rank's rows.

    Raises:
        HorovodInternalError: the tensor has no dims, `Adasum`, or the ranks differ.
        UnsupportedOpError: rows of a per-device tensor that don't divide.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        n = hvd.size()
        own = hvd.reducescatter(torch.arange(float(n), device="xla"), op=hvd.Sum)
        assert [x.item() for x in own.local_values()] == [n * i for i in range(n)]
    """
    how = _scattering(op), prescale_factor, postscale_factor
    return HorovodRequest("reducescatter", [tensor], name, process_set, *how, compression)


def _reducescatter_as_is(
    tensor: Any,
    name: str | None = None,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HorovodRequest:
    how = _scattering(op), prescale_factor, postscale_factor
    return HorovodRequest("reducescatter", [tensor], name, process_set, *how)


def _reducescatter_grouped(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HorovodRequest:
    how = _scattering(op), prescale_factor, postscale_factor
    return HorovodRequest("reducescatter", tensors, name, process_set, *how, compression)


def _reducescatter_grouped_as_is(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HorovodRequest:
    how = _scattering(op), prescale_factor, postscale_factor
    return HorovodRequest("reducescatter", tensors, name, process_set, *how)


def _scattering(op: int) -> ReduceOp:
    if op == Adasum:
        raise HorovodInternalError(
            "reducescatter with Adasum: the ranks' whole tensors make its factors, so use "
            "hvd.allreduce(tensor, op=hvd.Adasum) and take the rows"
        )
    return ReduceOp(op)


# --- allgather, broadcast, alltoall --------------------------------------------------------------


def _allgather(
    tensor: Any, name: str | None = None, process_set: Any = global_process_set
) -> HorovodRequest:
    """The ranks' rows, one after the other. Differentiable: a rank's rows get the average of what
    the ranks' gradients say of them.

    Args:
        tensor: with one dim or more; the first may differ from rank to rank, the others and the
            dtype not. Where one process drives all ranks, different first dims come as a `PerRank`.
        name: under which the ranks find each other; numbered by default.
        process_set: the ranks that take part, as of `allreduce`.

    Returns:
        a tensor with all rows, in the order of the ranks.

    Raises:
        HorovodInternalError: the ranks differ in dtype or another dim, or one has ended.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.ones(1, device="xla") * hvd.rank()
        assert hvd.allgather(x).tolist() == list(range(hvd.size()))
    """
    return HorovodRequest("allgather", [tensor], name, process_set)


def _allgather_grouped(
    tensors: Sequence[Any], name: str | None = None, process_set: Any = global_process_set
) -> HorovodRequest:
    return HorovodRequest("allgather", tensors, name, process_set)


def _broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> HorovodRequest:
    """One rank's tensor, on all. Differentiable: the root gets the average of the ranks' gradients,
    the others zeros.

    Args:
        tensor: of one shape and dtype on all ranks.
        root_rank: whose it is; a rank, also in a process set.
        name: under which the ranks find each other; numbered by default.
        process_set: the ranks that take part, as of `allreduce`.

    Returns:
        a tensor of the shape and dtype.

    Raises:
        HorovodInternalError: the ranks differ in shape, dtype or root, or the root takes no part.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.ones(2, device="xla") * hvd.rank()
        last = hvd.size() - 1
        assert hvd.broadcast(x, root_rank=last).tolist() == [last, last]
    """
    return HorovodRequest("broadcast", [tensor], name, process_set, root=int(root_rank))


def _alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> HorovodRequest:
    """Each rank's rows go to the ranks, the first ones to rank 0. Differentiable: the gradient goes
    back the same ways.

    Args:
        tensor: with one dim or more; the first may differ from rank to rank. Where one process
            drives all ranks, different ones come as a `PerRank`.
        splits: how many rows go to each rank, a list or a tensor of integers; equally many by
            default. It may differ from rank to rank (there as a `PerRank` as well).
        name: under which the ranks find each other; numbered by default.
        process_set: the ranks that take part, as of `allreduce`.

    Returns:
        the rows that have come, in the order of the ranks; with ``splits`` a pair, of these and of
        how many have come from each, an int32 CPU tensor.

    Raises:
        HorovodInternalError: the splits don't fit the rows or the ranks, or the ranks differ in
            dtype or another dim.
        ValueError: splits that are no integers.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        n = hvd.size()
        x = torch.ones(n, device="xla") * hvd.rank()
        got, received = hvd.alltoall(x, splits=[1] * n)
        assert got.local_values()[0].tolist() == list(range(n)) and received.tolist() == [1] * n
    """
    return HorovodRequest("alltoall", [tensor], name, process_set, splits=_integers(splits))


def _integers(splits: Any) -> Any:
    if splits is None:
        return None
    if isinstance(splits, PerRank):
        return PerRank(map(_integers, splits))
    tensor = torch.as_tensor(splits)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise ValueError(f"alltoall with splits of {tensor.dtype}: they are numbers of rows")
    return tensor.reshape(-1).tolist()


# --- the functions -------------------------------------------------------------------------------

allreduce = WAITED.of("allreduce", _allreduce)
allreduce_async = ASYNC.of("allreduce", _allreduce_as_is)
allreduce_ = IN_PLACE.of("allreduce", _allreduce_as_is)
allreduce_async_ = ASYNC_IN_PLACE.of("allreduce", _allreduce_as_is)
grouped_allreduce = GROUPED.of("allreduce", _allreduce_grouped)
grouped_allreduce_async = GROUPED_ASYNC.of("allreduce", _allreduce_grouped_as_is)
grouped_allreduce_ = GROUPED_IN_PLACE.of("allreduce", _allreduce_grouped_as_is)
grouped_allreduce_async_ = GROUPED_ASYNC_IN_PLACE.of("allreduce", _allreduce_grouped_as_is)

_NO_ADASUM = "HorovodInternalError: `Adasum`."
reducescatter = WAITED.of("reducescatter", _reducescatter)
reducescatter_async = ASYNC.of("reducescatter", _reducescatter_as_is, _NO_ADASUM)
grouped_reducescatter = GROUPED.of("reducescatter", _reducescatter_grouped)
grouped_reducescatter_async = GROUPED_ASYNC.of(
    "reducescatter", _reducescatter_grouped_as_is, _NO_ADASUM
)

allgather = WAITED.of("allgather", _allgather)
allgather_async = ASYNC.of("allgather", _allgather)
grouped_allgather = GROUPED.of("allgather", _allgather_grouped)
grouped_allgather_async = GROUPED_ASYNC.of("allgather", _allgather_grouped)

broadcast = WAITED.of("broadcast", _broadcast)
broadcast_async = ASYNC.of("broadcast", _broadcast)
broadcast_ = IN_PLACE.of("broadcast", _broadcast)
broadcast_async_ = ASYNC_IN_PLACE.of("broadcast", _broadcast)

alltoall = WAITED.of("alltoall", _alltoall)
alltoall_async = ASYNC.of("alltoall", _alltoall, "ValueError: splits that are no integers.")
