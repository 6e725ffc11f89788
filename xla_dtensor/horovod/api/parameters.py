"""The parameters of each collective, and what they mean: the one place where they are written.

A function here has the parameters, and the docstring, of the public function of its name, and makes
the request that these mean. `variants` makes the public functions of them.
"""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.base.numbers.row_counts import is_count
from xla_dtensor.base.ours import is_ours
from xla_dtensor.base.source_line import user_line
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.horovod.api.compression import Compression
from xla_dtensor.horovod.collectives.kinds import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Reducescatter,
)
from xla_dtensor.horovod.collectives.reductions import Average, ReduceOp, reduction
from xla_dtensor.horovod.collectives.requests import HorovodRequest
from xla_dtensor.horovod.world.process_sets import global_process_set
from xla_dtensor.horovod.world.rank_number import PerRank


def allreduce(
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
    collective = Allreduce(reduction(op, average), prescale_factor, postscale_factor)
    return HorovodRequest(collective, [tensor], name, process_set, compression)


def reducescatter(
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
    collective = Reducescatter(ReduceOp(op), prescale_factor, postscale_factor)
    return HorovodRequest(collective, [tensor], name, process_set, compression)


def allgather(
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
    return HorovodRequest(Allgather(), [tensor], name, process_set)


def broadcast(
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
    return HorovodRequest(Broadcast(int(root_rank)), [tensor], name, process_set)


def alltoall(
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
        UnsupportedOpError: splits that are values on the devices, in a compiled step.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        n = hvd.size()
        x = torch.ones(n, device="xla") * hvd.rank()
        got, received = hvd.alltoall(x, splits=[1] * n)
        assert got.local_values()[0].tolist() == list(range(n)) and received.tolist() == [1] * n
    """
    return HorovodRequest(Alltoall(_integers(splits)), [tensor], name, process_set)


def _integers(splits: Any) -> Any:
    if splits is None:
        return None
    if isinstance(splits, PerRank):
        return PerRank(map(_integers, splits))
    if is_ours(splits) and splits._form.varying and executor.current().has_values:
        each = [_integers(own) for own in splits.local_values()]
        return PerRank(each) if len(each) > 1 else each[0]
    if not (isinstance(splits, list | tuple) and any(map(is_count, splits))):
        try:
            tensor = torch.as_tensor(splits)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"alltoall with splits={splits!r}: they are how many rows go to each rank, a list "
                "or a tensor of integers; where they depend on the rank, and one process drives "
                "all ranks, hvd.per_rank(lambda rank: [...])"
            ) from error
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            raise ValueError(f"alltoall with splits of {tensor.dtype}: they are numbers of rows")
        splits = tuple(tensor.reshape(-1).tolist())
    if any(map(is_count, splits)):
        raise UnsupportedOpError(
            f"alltoall with splits that are values on the devices{user_line()}\nHorovod's are "
            "known when it is called. Let torch's all_to_all_single have such ones "
            "(counts.tolist()), or give a list of numbers"
        )
    return splits
