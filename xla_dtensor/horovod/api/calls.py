"""What all collectives share: beginning one, waiting for it, and its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.horovod.current_world import current
from xla_dtensor.horovod.process_sets import global_process_set
from xla_dtensor.horovod.rank_number import RankNumber
from xla_dtensor.horovod.reductions import Average, Sum
from xla_dtensor.horovod.world import Handle, HorovodRequest


def begin(call: HorovodRequest, unpack: Callable[[list[Any]], Any]) -> Handle:
    """An asynchronous collective; it has no gradient, as Horovod's.

    Args:
        call: what is asked for.
        unpack: what `synchronize` returns of the list of results.
    """
    call = dataclasses.replace(call, tensors=[_plain(tensor) for tensor in call.tensors])
    handle = current().start(call)
    handle.unpack = unpack
    return handle


def run(call: HorovodRequest, unpack: Callable[[list[Any]], Any]) -> Any:
    """A collective that is waited for; differentiable unless it writes to its tensors.

    Args:
        call: what is asked for.
        unpack: what is returned of the list of results.
    """
    if call.compression is not None:
        return unpack(_compressed(call))
    tensors = [_plain(tensor) for tensor in call.tensors]
    call = dataclasses.replace(call, tensors=tensors)
    wanted = torch.is_grad_enabled() and call.targets is None
    if wanted and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        # Autograd sees tensors that are arguments, not those in an argument's attributes.
        found = list(_Differentiable.apply(dataclasses.replace(call, tensors=()), *tensors))
    else:
        found = synchronize(begin(call, list))
    return unpack(found)


def _compressed(call: HorovodRequest) -> list[Any]:
    compression = call.compression
    pairs = [compression.compress(tensor) for tensor in call.tensors]
    small = [tensor for tensor, _ in pairs]
    results = run(dataclasses.replace(call, tensors=small, compression=None), list)
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


def single(results: list[Any]) -> Any:
    """The only result; of an alltoall with splits a pair, with how many rows have come."""
    return results[0] if len(results) == 1 else tuple(results)


def _plain(tensor: Any) -> Any:
    return tensor.tensor if isinstance(tensor, RankNumber) else tensor


def poll(handle: Any) -> bool:
    """Whether `synchronize` of a handle would not wait.

    Args:
        handle: what an asynchronous operation has returned.

    Returns:
        True or False. Devices may be done at once, so nothing may be made of a False that is
        expected.

    Raises:
        HorovodInternalError: what `synchronize` would raise.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        handle = hvd.allreduce_async(torch.ones(3, device="xla"))
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle).tolist() == [1, 1, 1]
    """
    return current().poll(handle) if isinstance(handle, Handle) else True


def synchronize(handle: Any) -> Any:
    """Wait for an asynchronous operation.

    Args:
        handle: what it has returned.

    Returns:
        what the operation without ``_async`` returns.

    Raises:
        HorovodInternalError: the ranks don't agree on it, wait for different ones, or one has
            ended.

    Example::

        import torch, xla_dtensor.horovod as hvd

        hvd.init()
        handle = hvd.broadcast_async(torch.ones(3, device="xla"), root_rank=0)
        assert hvd.synchronize(handle).tolist() == [1, 1, 1]
    """
    if not isinstance(handle, Handle):
        return handle()  # of a sparse allreduce
    return handle.unpack(current().synchronize(handle))


def barrier(process_set: Any = global_process_set) -> None:
    """Go on once all ranks of a set have come here.

    Args:
        process_set: the ranks.

    Raises:
        HorovodInternalError: a rank has ended, or waits for something else.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        hvd.barrier()
        assert hvd.is_initialized()
    """
    current().barrier(process_set)


def join(device: int = -1) -> int:
    """Wait until all ranks have come here, and take part in their sums and averages with zeros.

    Args:
        device: has no effect.

    Returns:
        the rank that came last.

    Raises:
        HorovodInternalError: the others do something that has no zeros, as an allgather; they get
            it.

    Example::

        import xla_dtensor.horovod as hvd

        hvd.init()
        assert hvd.join() == hvd.size() - 1  # all devices come at once
    """
    return current().join()


class _Differentiable(torch.autograd.Function):
    """A collective whose gradient is the collective that Horovod says it is."""

    @staticmethod
    def forward(ctx: Any, call: HorovodRequest, *tensors: Any) -> Any:
        world = current()
        handle = world.start(dataclasses.replace(call, tensors=tensors))
        results = world.synchronize(handle)
        ctx.call, ctx.rows, ctx.count = call, handle.rows, len(tensors)
        if call.kind == "alltoall":
            ctx.received, ctx.sent = handle.received, tensors[0].shape[0]
            ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        backward = _BACKWARD[ctx.call.kind]
        found = backward(ctx, list(grads[: ctx.count]))
        return (None, *found)


def _same_again(ctx: Any, grads: list[Any]) -> list[Any]:
    call = ctx.call
    if call.op not in (Average, Sum):
        raise UnsupportedOpError(
            f"the gradient of an allreduce with {call.op!r}: there is one of Average and of Sum"
        )
    return _again(call, grads, "allreduce", op=call.op)


def _again(call: HorovodRequest, grads: list[Any], kind: str, **changes: Any) -> list[Any]:
    """A collective of gradients, in the same process set, without a name."""
    changes = {"kind": kind, "name": None, "tensors": grads, **changes}
    return synchronize(begin(dataclasses.replace(call, **changes), list))


def _own_rows(ctx: Any, grads: list[Any]) -> list[Any]:
    """Of an allgather: the average of what the ranks say of this one's rows."""
    if ctx.rows is None:  # of devices, which have equally many
        return _again(ctx.call, grads, "reducescatter", op=Average)
    averages = _again(ctx.call, grads, "allreduce", op=Average)
    position = ctx.call.process_set.rank()
    return [
        average.narrow(0, sum(rows[:position]), rows[position])
        for average, rows in zip(averages, ctx.rows, strict=True)
    ]


def _at_root(ctx: Any, grads: list[Any]) -> list[Any]:
    averages = _again(ctx.call, grads, "allreduce", op=Average, root=-1)
    is_root = current().rank == ctx.call.root
    if isinstance(is_root, RankNumber):
        return [torch.where(is_root.tensor, average, 0) for average in averages]
    return averages if is_root else [torch.zeros_like(average) for average in averages]


def _sent_back(ctx: Any, grads: list[Any]) -> list[Any]:
    (grad,) = _again(ctx.call, grads, "alltoall", splits=ctx.received)[:1]
    kept = ctx.sent - grad.shape[0]  # rows that went to nobody
    if kept:
        grad = torch.cat([grad, grad.new_zeros(kept, *grad.shape[1:])])
    return [grad]


def _gathered(ctx: Any, grads: list[Any]) -> list[Any]:
    call = ctx.call
    if call.op not in (Average, Sum):
        raise UnsupportedOpError(
            f"the gradient of a reducescatter with {call.op!r}: there is one of Average and Sum"
        )
    factor = call.prescale * call.postscale
    if call.op == Sum:
        sets = call.process_set
        factor *= (sets if hasattr(sets, "size") else sets[0]).size()
    scaled = grads if factor == 1 else [grad * factor for grad in grads]
    return _again(call, scaled, "allgather", prescale=1.0, postscale=1.0)


_BACKWARD: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "allreduce": _same_again,
    "allgather": _own_rows,
    "broadcast": _at_root,
    "alltoall": _sent_back,
    "reducescatter": _gathered,
}
