"""What all collectives share: beginning one, waiting for it, and its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.horovod.collectives.collective import Done, HorovodCollective
from xla_dtensor.horovod.collectives.requests import Handle, HorovodRequest
from xla_dtensor.horovod.world.current_world import current
from xla_dtensor.horovod.world.process_sets import global_process_set
from xla_dtensor.horovod.world.rank_number import RankNumber


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
    """A collective whose gradient is the collective that Horovod says it is (`gradients`)."""

    @staticmethod
    def forward(ctx: Any, call: HorovodRequest, *tensors: Any) -> Any:
        world = current()
        handle = world.start(dataclasses.replace(call, tensors=tensors))
        results = world.synchronize(handle)
        ctx.call, ctx.handle, ctx.count = call, handle, len(tensors)
        ctx.mark_non_differentiable(*results[ctx.count :])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call, handle = ctx.call, ctx.handle

        def again(collective: HorovodCollective, grads: list[Any]) -> list[Any]:
            return synchronize(
                begin(HorovodRequest(collective, grads, None, call.process_set), list)
            )

        done = Done(handle.requests, handle.position, current(), again)
        return (None, *call.collective.gradients(done, list(grads[: ctx.count])))
