"""Collectives that bring the ranks' values to others: allgather, broadcast, alltoall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.horovod.calls import begin, check_tensors, first, run, synchronize
from xla_dtensor.horovod.process_sets import global_process_set
from xla_dtensor.horovod.rank_number import PerRank
from xla_dtensor.horovod.world import Call, Handle


def allgather(tensor: Any, name: str | None = None, process_set: Any = global_process_set) -> Any:
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
    return run(Call("allgather", [tensor], name, process_set=process_set), first)


def allgather_async(
    tensor: Any, name: str | None = None, process_set: Any = global_process_set
) -> Handle:
    """`allgather` that is not waited for, without a gradient.

    Args:
        tensor, name, process_set: as of `allgather`.

    Returns:
        a handle for `synchronize` and `poll`.

    Raises:
        ValueError: one of this name hasn't been waited for yet.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        handle = hvd.allgather_async(torch.ones(2, device="xla"))
        assert hvd.synchronize(handle).shape == (2 * hvd.size(),)
    """
    return begin(Call("allgather", [tensor], name, process_set=process_set), first)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """`allgather` of several tensors in one launch. Differentiable.

    Args:
        tensors: as many on all ranks.
        name, process_set: as of `allgather`.

    Returns:
        a list of tensors.

    Raises:
        HorovodInternalError: as of `allgather`.
        ValueError: there are no tensors.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        (x,) = hvd.grouped_allgather([torch.ones(2, device="xla")])
        assert x.shape == (2 * hvd.size(),)
    """
    check_tensors("grouped_allgather", tensors)
    return run(Call("allgather", tensors, name, process_set=process_set), list)


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: Any = global_process_set
) -> Handle:
    """`grouped_allgather` that is not waited for, without a gradient.

    Args:
        tensors, name, process_set: as of `grouped_allgather`.

    Returns:
        a handle for `synchronize` and `poll`.

    Raises:
        ValueError: one of this name hasn't been waited for yet, or there are no tensors.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        handle = hvd.grouped_allgather_async([torch.ones(2, device="xla")])
        assert hvd.synchronize(handle)[0].shape == (2 * hvd.size(),)
    """
    check_tensors("grouped_allgather_async", tensors)
    return begin(Call("allgather", tensors, name, process_set=process_set), list)


# --- broadcast -----------------------------------------------------------------------------------


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> Any:
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
    return run(_broadcast(tensor, root_rank, name, process_set), first)


def _broadcast(tensor: Any, root: int, name: str | None, process_set: Any, to: Any = None) -> Call:
    return Call("broadcast", [tensor], name, root=int(root), process_set=process_set, targets=to)


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> Handle:
    """`broadcast` that is not waited for, without a gradient.

    Args:
        tensor, root_rank, name, process_set: as of `broadcast`.

    Returns:
        a handle for `synchronize` and `poll`.

    Raises:
        ValueError: one of this name hasn't been waited for yet.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        handle = hvd.broadcast_async(torch.ones(2, device="xla"), 0)
        assert hvd.synchronize(handle).tolist() == [1, 1]
    """
    return begin(_broadcast(tensor, root_rank, name, process_set), first)


def broadcast_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """`broadcast` into its tensor, without a gradient.

    Args:
        tensor, root_rank, name, process_set: as of `broadcast`.

    Returns:
        ``tensor``.

    Raises:
        HorovodInternalError: as of `broadcast`.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.ones(2, device="xla") * hvd.rank()
        hvd.broadcast_(x, root_rank=0)
        assert x.tolist() == [0, 0]
    """
    return synchronize(begin(_broadcast(tensor, root_rank, name, process_set, [tensor]), first))


def broadcast_async_(
    tensor: Any, root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> Handle:
    """`broadcast_` that is not waited for.

    Args:
        tensor, root_rank, name, process_set: as of `broadcast`.

    Returns:
        a handle for `synchronize` and `poll`.

    Raises:
        ValueError: one of this name hasn't been waited for yet.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.ones(2, device="xla") * hvd.rank()
        assert hvd.synchronize(hvd.broadcast_async_(x, 0)) is x and x.tolist() == [0, 0]
    """
    return begin(_broadcast(tensor, root_rank, name, process_set, [tensor]), first)


# --- alltoall ------------------------------------------------------------------------------------


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
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
    unpack = first if splits is None else tuple
    call = Call("alltoall", [tensor], name, splits=_integers(splits), process_set=process_set)
    return run(call, unpack)


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Handle:
    """`alltoall` that is not waited for, without a gradient.

    Args:
        tensor, splits, name, process_set: as of `alltoall`.

    Returns:
        a handle for `synchronize` and `poll`.

    Raises:
        ValueError: one of this name hasn't been waited for yet, or splits that are no integers.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        handle = hvd.alltoall_async(torch.ones(hvd.size(), device="xla"))
        assert hvd.synchronize(handle).shape == (hvd.size(),)
    """
    unpack = first if splits is None else tuple
    call = Call("alltoall", [tensor], name, splits=_integers(splits), process_set=process_set)
    return begin(call, unpack)


def _integers(splits: Any) -> Any:
    if splits is None:
        return None
    if isinstance(splits, PerRank):
        return PerRank(map(_integers, splits))
    tensor = torch.as_tensor(splits)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise ValueError(f"alltoall with splits of {tensor.dtype}: they are numbers of rows")
    return tensor.reshape(-1).tolist()
