"""An all-to-all of varying numbers of rows, in buffers of static shapes (expert parallelism).

torch's ``all_to_all_single`` with split sizes makes tensors whose length depends on values. Here
every device has a buffer of so many slots for every other, of which the first are filled; what is
in the rest is zero. Expert parallelism sends its tokens so. Counts are tensors: nothing is asked of
the host, and where rows go is no part of a compiled step's program.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xla_dtensor.movement import collectives
from xla_dtensor.movement.collectives import Group

__all__ = ["by_kind", "give_back", "kept", "packed", "send", "slots_for"]


def slots_for(rows: int, devices: int, capacity: float | None) -> int:
    """How many rows a device has room for, from each other.

    Args:
        rows: that a device has to send in all.
        devices: to which.
        capacity: over the mean of ``rows / devices``; ``None`` for room for all.

    Returns:
        the number of rows.

    Example::

        import xla_dtensor as xd

        assert xd.row_exchange.slots_for(100, 4, 1.25) == 32
        assert xd.row_exchange.slots_for(100, 4, None) == 100
    """
    if capacity is None:
        return rows
    return max(1, min(rows, math.ceil(rows / devices * capacity)))


def kept(counts: Tensor, slots: int) -> Tensor:
    """The part of ``counts`` for which there are slots.

    Args:
        counts: int, ``(devices, kinds)``: how many rows of each kind go to each device; the kinds
            lie one after another.
        slots: for each device.

    Returns:
        the same, without the last rows of a device that has no room for all.

    Example::

        import torch, xla_dtensor as xd

        counts = torch.tensor([[2, 3], [1, 0]])
        assert xd.row_exchange.kept(counts, 4).tolist() == [[2, 2], [1, 0]]
    """
    ends = counts.cumsum(1)
    return ends.clamp(max=slots) - (ends - counts).clamp(max=slots)


def send(rows: Tensor, counts: Tensor, slots: int, group: Group) -> Tensor:
    """Send rows that lie in the order of the devices they go to; differentiable.

    Args:
        rows: ``(rows, ...)``, per device.
        counts: int, ``(devices,)``: how many of them go where.
        slots: for each device; further rows aren't sent.
        group: the devices: as of ``xd.collectives.all_reduce``.

    Returns:
        ``(devices * slots, ...)``: what came from each device, zeros in the slots that it left.

    Raises:
        UnsupportedOpError: ``rows`` is no per-device tensor.
        MeshError: no such mesh dim.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2,), mesh_dim_names=("ep",))
        rows = xd.from_device_values([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], mesh)
        counts = xd.from_device_values([torch.tensor([2, 0]), torch.tensor([1, 1])], mesh)
        got = xd.row_exchange.send(rows, counts, 2, mesh)
        arrived = xd.collectives.all_to_all(counts, mesh)
        assert got.local_values()[0].tolist() == [1, 2, 3, 0]
        assert arrived.local_values()[0].tolist() == [2, 1]
    """
    starts = (counts.cumsum(0) - counts).unsqueeze(1)
    slot = torch.arange(slots, device=rows.device)
    filled = slot < counts.unsqueeze(1)
    chosen = torch.where(filled, starts + slot, 0).flatten()
    filled = filled.flatten().view(-1, *[1] * (rows.ndim - 1))
    return collectives.all_to_all(torch.where(filled, rows[chosen], 0), group)


def by_kind(counts: Tensor, slots: int) -> Tensor:
    """The slots of what came, by kind of row, and within a kind by the device that sent it.

    Args:
        counts: int, ``(devices, kinds)``: how many rows of each kind have come from each.
        slots: for each device.

    Returns:
        int64, ``(devices * slots,)``: a permutation; the slots that weren't filled are last.

    Example::

        import torch, xla_dtensor as xd

        came = torch.tensor([[1, 1], [2, 0]])  # from two devices, of two kinds
        assert xd.row_exchange.by_kind(came, 2).tolist() == [0, 2, 3, 1]
    """
    slot = torch.arange(slots, device=counts.device).view(1, -1, 1)
    kind = (slot >= counts.cumsum(1).unsqueeze(1)).sum(-1)  # one more than the last: not filled
    return torch.argsort(kind.flatten(), stable=True)


def give_back(buffer: Tensor, rows: int, counts: Tensor, slots: int, group: Group) -> Tensor:
    """What `send` has sent, back to where it came from; differentiable.

    Args:
        buffer: ``(devices * slots, ...)``, as `send` gives it.
        rows, counts, slots, group: of the call of `send`.

    Returns:
        ``(rows, ...)``, with zeros for what wasn't sent.

    Raises:
        UnsupportedOpError: ``buffer`` is no per-device tensor.
        MeshError: no such mesh dim.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2,), mesh_dim_names=("ep",))
        rows = xd.from_device_values([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], mesh)
        counts = xd.from_device_values([torch.tensor([2, 0]), torch.tensor([1, 1])], mesh)
        got = xd.row_exchange.send(rows, counts, 2, mesh)
        back = xd.row_exchange.give_back(got * 10, 2, counts, 2, mesh)
        assert [x.tolist() for x in back.local_values()] == [[10, 20], [30, 40]]
    """
    return packed(collectives.all_to_all(buffer, group), rows, counts, slots)


def packed(buffer: Tensor, rows: int, counts: Tensor, slots: int) -> Tensor:
    """The slots that are filled, one after another; differentiable.

    Args:
        buffer: ``(devices * slots, ...)``, as `send` gives it.
        rows: of the result.
        counts: int, ``(devices,)``: how many have come from where.
        slots: for each device.

    Returns:
        ``(rows, ...)``, with zeros for rows without a slot and behind the last.

    Example::

        import torch, xla_dtensor as xd

        buffer, counts = torch.tensor([[1], [0], [2], [3]]), torch.tensor([1, 2])
        assert xd.row_exchange.packed(buffer, 4, counts, 2).tolist() == [[1], [2], [3], [0]]
    """
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=buffer.device)
    device = (row.unsqueeze(1) >= ends).sum(1).clamp(max=len(counts) - 1)
    slot = row - (ends - counts)[device]
    sent = (slot < slots) & (row < ends[-1])
    place = torch.where(sent, device * slots + slot, 0)
    return torch.where(sent.view(-1, *[1] * (buffer.ndim - 1)), buffer[place], 0)
