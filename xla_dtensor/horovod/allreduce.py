"""Reductions of what the ranks have, which all of them get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_dtensor.horovod.calls import begin, check_tensors, first, run, synchronize
from xla_dtensor.horovod.compression import Compression
from xla_dtensor.horovod.gathering import allgather_async
from xla_dtensor.horovod.process_sets import global_process_set
from xla_dtensor.horovod.rank_number import PerRank
from xla_dtensor.horovod.reductions import Average, ReduceOp, Sum, reduction
from xla_dtensor.horovod.state import current
from xla_dtensor.horovod.world import Call, Handle


def _call(
    tensors: Sequence[Any],
    average: bool | None,
    name: str | None,
    op: int | None,
    factors: tuple[float, float],
    process_set: Any,
    in_place: bool = False,
) -> Call:
    return Call(
        "allreduce", tensors, name, reduction(op, average), *factors, process_set=process_set,
        targets=tensors if in_place else None,
    )  # fmt: skip


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Any:
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
    small, context = compression.compress(tensor)
    factors = prescale_factor, postscale_factor
    reduced = run(_call([small], average, name, op, factors, process_set), first)
    return compression.decompress(reduced, context)


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Handle:
    """`allreduce` that is not waited for, without a gradient.

    Args:
        tensor, average, name, op, prescale_factor, postscale_factor, process_set: as of
            `allreduce`.

    Returns:
        a handle for `synchronize` and `poll`.

    Raises:
        ValueError: one of this name hasn't been waited for yet; `synchronize` raises the rest.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        handle = hvd.allreduce_async(torch.ones(3, device="xla"), op=hvd.Sum)
        assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
    """
    factors = prescale_factor, postscale_factor
    return begin(_call([tensor], average, name, op, factors, process_set), first)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Any:
    """`allreduce` into its tensor, without a gradient.

    Args:
        tensor, average, name, op, prescale_factor, postscale_factor, process_set: as of
            `allreduce`.

    Returns:
        ``tensor``.

    Raises:
        HorovodInternalError: as of `allreduce`.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.ones(3, device="xla")
        assert hvd.allreduce_(x, op=hvd.Sum) is x and x.tolist() == [hvd.size()] * 3
    """
    factors = prescale_factor, postscale_factor
    return synchronize(
        begin(_call([tensor], average, name, op, factors, process_set, in_place=True), first)
    )


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Handle:
    """`allreduce_` that is not waited for: `synchronize` says when the tensor has the result.

    Args:
        tensor, average, name, op, prescale_factor, postscale_factor, process_set: as of
            `allreduce`.

    Returns:
        a handle for `synchronize` and `poll`.

    Raises:
        ValueError: as of `allreduce_async`.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.ones(3, device="xla")
        assert hvd.synchronize(hvd.allreduce_async_(x)) is x
    """
    factors = prescale_factor, postscale_factor
    return begin(_call([tensor], average, name, op, factors, process_set, in_place=True), first)


# --- several at once -----------------------------------------------------------------------------


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> list[Any]:
    """`allreduce` of several tensors in one launch. Differentiable.

    Args:
        tensors: as many on all ranks.
        average, name, compression, op, prescale_factor, postscale_factor, process_set: as of
            `allreduce`.

    Returns:
        a list of tensors.

    Raises:
        HorovodInternalError: as of `allreduce`.
        ValueError: there are no tensors.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        a, b = hvd.grouped_allreduce([torch.ones(3, device="xla"), torch.zeros(2, device="xla")])
        assert a.tolist() == [1, 1, 1] and b.tolist() == [0, 0]
    """
    check_tensors("grouped_allreduce", tensors)
    pairs = [compression.compress(tensor) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    small = [tensor for tensor, _ in pairs]
    reduced = run(_call(small, average, name, op, factors, process_set), list)
    return [
        compression.decompress(tensor, context)
        for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Handle:
    """`grouped_allreduce` that is not waited for, without a gradient.

    Args:
        tensors, average, name, op, prescale_factor, postscale_factor, process_set: as of
            `grouped_allreduce`.

    Returns:
        a handle for `synchronize` and `poll`.

    Raises:
        ValueError: as of `allreduce_async`, or there are no tensors.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        handle = hvd.grouped_allreduce_async([torch.ones(3, device="xla")])
        assert [x.tolist() for x in hvd.synchronize(handle)] == [[1, 1, 1]]
    """
    check_tensors("grouped_allreduce_async", tensors)
    factors = prescale_factor, postscale_factor
    return begin(_call(tensors, average, name, op, factors, process_set), list)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> list[Any]:
    """`grouped_allreduce` into its tensors, without a gradient.

    Args:
        tensors, average, name, op, prescale_factor, postscale_factor, process_set: as of
            `grouped_allreduce`.

    Returns:
        ``tensors``.

    Raises:
        HorovodInternalError: as of `allreduce`.
        ValueError: there are no tensors.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.ones(3, device="xla")
        hvd.grouped_allreduce_([x], op=hvd.Sum)
        assert x.tolist() == [hvd.size()] * 3
    """
    check_tensors("grouped_allreduce_", tensors)
    factors = prescale_factor, postscale_factor
    return synchronize(
        begin(_call(tensors, average, name, op, factors, process_set, in_place=True), list)
    )


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Handle:
    """`grouped_allreduce_` that is not waited for.

    Args:
        tensors, average, name, op, prescale_factor, postscale_factor, process_set: as of
            `grouped_allreduce`.

    Returns:
        a handle for `synchronize` and `poll`.

    Raises:
        ValueError: as of `allreduce_async`, or there are no tensors.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.ones(3, device="xla")
        hvd.synchronize(hvd.grouped_allreduce_async_([x], op=hvd.Sum))
        assert x.tolist() == [hvd.size()] * 3
    """
    check_tensors("grouped_allreduce_async_", tensors)
    factors = prescale_factor, postscale_factor
    return begin(_call(tensors, average, name, op, factors, process_set, in_place=True), list)


# --- sparse --------------------------------------------------------------------------------------


def sparse_allreduce_async(
    tensor: Any, name: str | None = None, op: int = Average, process_set: Any = global_process_set
) -> Callable[[], Any]:
    """The reduction of sparse tensors, whose places may differ: by gathering them.

    Args:
        tensor: a sparse COO tensor on the CPU (the xla device has dense ones only); where one
            process drives all ranks it may be a `PerRank` of them.
        name: under which the ranks find each other; numbered by default.
        op: `Average` or `Sum`.
        process_set: the ranks that take part.

    Returns:
        a function that waits for it and returns a sparse tensor, not coalesced; `synchronize` takes
        it as well.

    Raises:
        NotImplementedError: another reduction.
        ValueError: as of `allreduce_async`.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        x = torch.sparse_coo_tensor([[0, 2]], [1.0, 3.0], (4,), check_invariants=True)
        handle = hvd.sparse_allreduce_async(x, name="rows")
        assert hvd.synchronize(handle).to_dense().tolist() == [1, 0, 3, 0]
    """
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"sparse_allreduce_async(op={ReduceOp(op)!r}): sparse tensors are averaged or summed"
        )
    own = tensor if isinstance(tensor, PerRank) else [tensor]
    whole = [each.coalesce() for each in own]
    wrap: Any = PerRank if isinstance(tensor, PerRank) else first
    parts = {
        "indices": wrap([each.indices().t().contiguous() for each in whole]),
        "values": wrap([each.values() for each in whole]),
    }
    handles = {
        part: allgather_async(
            value, name=None if name is None else f"{name}.{part}", process_set=process_set
        )
        for part, value in parts.items()
    }
    members = process_set.size()
    world = current()

    def wait() -> Any:
        indices, values = (world.synchronize(handles[part])[0] for part in parts)
        if op == Average:
            values = values / members
        shape = whole[0].shape
        return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False)

    return wait
