"""``context_parallel`` on xla meshes: causal attention over permuted sequence positions.

torch's context manager, or its module hooks, hand attention what the devices have as DTensors that
are sharded along the sequence. XLA attends to the whole sequence as it does in any layout, so
there is no ring to write. With load balancing (torch's default) the sequence isn't in order,
though: the first device has the first and the last chunk, and so on. torch's ring knows that. Here
the causal mask is made of the numbers that the positions had before.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from xla_dtensor.base import sequence_order, torch_private
from xla_dtensor.base.torch_private.attributes import custom_op_handlers, indices_dealt
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over

_HEAD_TAIL = "head and tail"

_dealt: Hashable = _HEAD_TAIL
"""Who dealt out the latest buffers of an xla mesh: the name of torch's default, or `_Balancer`."""


class _Balancer:
    """A load balancer that isn't torch's default, by the positions that it gives."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions.cpu().to(torch.int32)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Balancer) and torch.equal(self.positions, other.positions)

    def __hash__(self) -> int:
        return hash(tuple(self.positions.shape))


def install() -> None:
    """When torch's module is imported. Read in torch 2.13; in 2.11 it has the same names."""
    on_import(torch_private.CONTEXT_PARALLEL, _hook)


def _hook(module: Any) -> None:
    take_over(torch_private.context_parallel_buffers, _remember)
    take_over(module.context_parallel, _context)
    create_mask = torch_private.find("create_context_parallel_mask")
    if create_mask is not None:
        take_over(create_mask, _create_block_mask)

    def order() -> Hashable:
        # torch's handlers of attention on DTensors are in use between enable and disable.
        handlers: Any = custom_op_handlers(torch_private.op_dispatcher)
        balanced = torch_private.context_parallel_options.enable_load_balance
        if handlers is module.existing_custom_ops or not balanced:
            return None
        return _dealt

    sequence_order.bind(order)


def _remember(original: Any, args: Any, kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if getattr(given["mesh"], "device_type", None) == "xla":
        global _dealt
        balancer: Any = given.get("load_balancer")
        if type(balancer).__name__ in ("NoneType", "_HeadTailLoadBalancer"):
            _dealt = _HEAD_TAIL
        else:
            _dealt = _Balancer(indices_dealt(balancer))
    return original(*args, **kwargs)


def _create_block_mask(original: Any, args: Any, kwargs: Any) -> Any:
    """The block mask of each device's queries for flex_attention. torch computes with the rank,
    in tensor operations, so each device's coordinate serves."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    mesh = bound.arguments["device_mesh"]
    if mesh.device_type == "xla":
        bound.arguments["device_mesh"] = _MeshWithRanks(mesh)
    return original(*bound.args, **bound.kwargs)


class _MeshWithRanks:
    """A mesh of one dim, whose local rank is a per-device tensor."""

    device_type = "xla"

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def size(self) -> int:
        """The number of devices."""
        return self._mesh.size()

    def get_local_rank(self) -> torch.Tensor:
        """Each device's coordinate."""
        from xla_dtensor.movement.collectives import axis_index

        return axis_index(self._mesh)


def _context(original: Any, args: Any, kwargs: Any) -> Any:
    """torch gives the buffers back by writing to them what they were: each device the same, which
    can't be seen from the values that it writes over, each device's own part."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    context = original(*args, **kwargs)
    if getattr(given["mesh"], "device_type", None) != "xla":
        return context
    kept = given.get("no_restore_buffers") or ()
    buffers = [b for b in given.get("buffers") or () if not any(b is other for other in kept)]
    return _restoring(context, buffers)


@contextlib.contextmanager
def _restoring(context: Any, buffers: list[Any]) -> Iterator[None]:
    from xla_dtensor.movement.vary import forget_variation

    varied = [getattr(buffer, "varying", None) for buffer in buffers]
    with context:
        yield
    for buffer, axes in zip(buffers, varied, strict=True):
        if axes is not None and buffer.varying != axes:
            forget_variation(buffer, axes)


def causal_mask(
    query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None
) -> torch.Tensor | None:
    """What each query may see, where the sequences have been dealt out; None where they haven't.

    Returns:
        a boolean tensor ``[length, length]`` (``[batch, 1, length, length]`` of a balancer that
        treats each sequence by itself), laid out as the queries are.

    Raises:
        UnsupportedOpError: there is a mask as well, which can't know of the order; the lengths
            differ; or they aren't those that were dealt out.
    """
    order = sequence_order.current()
    if order is None:
        return None
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = getattr(query, "device_mesh", None)
    if mesh is None:
        return None
    sequence = query.ndim - 2
    placements: Any = getattr(query, "placements", ())
    dims = [i for i, p in enumerate(placements) if p.is_shard(sequence)]
    if not dims:  # it isn't dealt out
        return None
    call = "scaled_dot_product_attention in context_parallel with load balancing"
    way_out = (
        "turn it off: torch.distributed.tensor.experimental._attention._cp_options"
        ".enable_load_balance = False"
    )
    if attn_mask is not None:
        raise UnsupportedOpError(
            f"{call}: attn_mask has its columns in the order of the sequence, and the keys aren't; "
            f"use is_causal=True alone, or {way_out}"
        )
    length, devices = query.shape[-2], 1
    for dim in dims:
        devices *= mesh.size(dim)
    if key.shape[-2] != length:
        raise UnsupportedOpError(
            f"{call}: is_causal=True needs as many keys as queries, got {length} queries and "
            f"{key.shape[-2]} keys"
        )
    if order == _HEAD_TAIL and length % (2 * devices) == 0:
        chunks = torch.arange(length, dtype=torch.int32).reshape(2 * devices, -1)
        pairs = torch.stack([chunks[:devices], chunks.flip(0)[:devices]], 1)
        positions = pairs.reshape(1, length)
    elif isinstance(order, _Balancer) and order.positions.shape[-1] == length:
        positions = order.positions
    else:
        raise UnsupportedOpError(
            f"{call}: a sequence of {length} on {devices} devices isn't what the load balancer has "
            f"dealt out; give the buffers of this length to it, or {way_out}"
        )
    rows = [Shard(1) if i in dims else Replicate() for i in range(mesh.ndim)]
    own = distribute_tensor(positions.unsqueeze(-1), mesh, rows)
    others = distribute_tensor(positions.unsqueeze(-2), mesh, [Replicate()] * mesh.ndim)
    visible = own >= others
    return visible.squeeze(0) if len(positions) == 1 else visible.unsqueeze(1)
