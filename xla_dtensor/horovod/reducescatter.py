"""Reductions of what the ranks have, of which each gets its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_dtensor.errors import HorovodInternalError
from xla_dtensor.horovod.calls import begin, check_tensors, first, run
from xla_dtensor.horovod.compression import Compression
from xla_dtensor.horovod.process_sets import global_process_set
from xla_dtensor.horovod.reductions import Adasum, Average, ReduceOp
from xla_dtensor.horovod.world import Call, Handle


def _call(
    tensors: Sequence[Any], name: str | None, op: int, factors: tuple[float, float], sets: Any
) -> Call:
    if op == Adasum:
        raise HorovodInternalError(
            "reducescatter with Adasum: the ranks' whole tensors make its factors, so use "
            "hvd.allreduce(tensor, op=hvd.Adasum) and take the rows"
        )
    return Call("reducescatter", tensors, name, ReduceOp(op), *factors, process_set=sets)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
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
    small, context = compression.compress(tensor)
    factors = prescale_factor, postscale_factor
    return compression.decompress(
        run(_call([small], name, op, factors, process_set), first), context
    )


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`reducescatter` that is not waited for, without a gradient.

    Args:
        tensor, name, op, process_set, prescale_factor, postscale_factor: as of `reducescatter`.

    Returns:
        a handle for `synchronize` and `poll`.

    Raises:
        ValueError: one of this name hasn't been waited for yet.
        HorovodInternalError: `Adasum`.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        handle = hvd.reducescatter_async(torch.ones(hvd.size(), 3, device="xla"))
        assert hvd.synchronize(handle).shape == (1, 3)
    """
    factors = prescale_factor, postscale_factor
    return begin(_call([tensor], name, op, factors, process_set), first)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of several tensors in one launch. Differentiable.

    Args:
        tensors: as many on all ranks.
        name, compression, op, process_set, prescale_factor, postscale_factor: as of
            `reducescatter`.

    Returns:
        a list of the rank's rows of each.

    Raises:
        HorovodInternalError: as of `reducescatter`.
        ValueError: there are no tensors.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        (own,) = hvd.grouped_reducescatter([torch.ones(hvd.size(), 3, device="xla")])
        assert own.shape == (1, 3)
    """
    check_tensors("grouped_reducescatter", tensors)
    pairs = [compression.compress(tensor) for tensor in tensors]
    factors = prescale_factor, postscale_factor
    found = run(_call([small for small, _ in pairs], name, op, factors, process_set), list)
    return [
        compression.decompress(rows, context)
        for rows, (_, context) in zip(found, pairs, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`grouped_reducescatter` that is not waited for, without a gradient.

    Args:
        tensors, name, op, process_set, prescale_factor, postscale_factor: as of
            `grouped_reducescatter`.

    Returns:
        a handle for `synchronize` and `poll`.

    Raises:
        ValueError: one of this name hasn't been waited for yet, or there are no tensors.
        HorovodInternalError: `Adasum`.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        handle = hvd.grouped_reducescatter_async([torch.ones(hvd.size(), 3, device="xla")])
        assert hvd.synchronize(handle)[0].shape == (1, 3)
    """
    check_tensors("grouped_reducescatter_async", tensors)
    factors = prescale_factor, postscale_factor
    return begin(_call(tensors, name, op, factors, process_set), list)
