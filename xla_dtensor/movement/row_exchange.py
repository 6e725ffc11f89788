"""An all-to-all of varying numbers of rows, in buffers of static shapes (expert parallelism).

torch's ``all_to_all_single`` with split sizes makes tensors whose length depends on values. Here
every device has a buffer of so many slots for every other, of which the first are filled; what is
in the rest is zero. Expert parallelism sends its tokens so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xla_dtensor.mesh.group import MeshGroup
from xla_dtensor.movement import collectives


def slots_for(rows: int, devices: int, capacity: float | None) -> int:
    """How many rows a device has room for, from each other.

    Args:
        rows: that a device has to send in all.
        devices: to which.
        capacity: over the mean of ``rows / devices``; ``None`` for room for all.
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
    """
    ends = counts.cumsum(1)
    return ends.clamp(max=slots) - (ends - counts).clamp(max=slots)


def send(rows: Tensor, counts: Tensor, slots: int, group: MeshGroup) -> Tensor:
    """Send rows that lie in the order of the devices they go to.

    Args:
        rows: ``(rows, ...)``, per device.
        counts: int, ``(devices,)``: how many of them go where.
        slots: for each device; further rows aren't sent.
        group: the devices.

    Returns:
        ``(devices * slots, ...)``: what came from each device, zeros in the slots that it left.
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
    """
    slot = torch.arange(slots, device=counts.device).view(1, -1, 1)
    kind = (slot >= counts.cumsum(1).unsqueeze(1)).sum(-1)  # one more than the last: not filled
    return torch.argsort(kind.flatten(), stable=True)


def give_back(buffer: Tensor, rows: int, counts: Tensor, slots: int, group: MeshGroup) -> Tensor:
    """What `send` has sent, back to where it came from.

    Args:
        buffer: ``(devices * slots, ...)``, as `send` gives it.
        rows, counts, slots, group: of the call of `send`.

    Returns:
        ``(rows, ...)``, with zeros for what wasn't sent.
    """
    back = collectives.all_to_all(buffer, group)
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=buffer.device)
    device = (row.unsqueeze(1) >= ends).sum(1).clamp(max=len(counts) - 1)
    slot = row - (ends - counts)[device]
    sent = (slot < slots) & (row < ends[-1])
    place = torch.where(sent, device * slots + slot, 0)
    return torch.where(sent.view(-1, *[1] * (back.ndim - 1)), back[place], 0)
