"""`all_to_all_single` of as many rows as Python numbers say that are values on the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.base.numbers.row_counts import CountNode
from xla_dtensor.base.source_line import user_line
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.mesh.group import MeshGroup
from xla_dtensor.movement import collectives, row_exchange
from xla_dtensor.ragged.by_rule import ragged, resized, unwrapped
from xla_dtensor.ragged.tensor import RaggedTensor, filled
from xla_dtensor.ragged.values import check, check_lengths, node_of, number_of, scalar, vector


def exchange(
    tensor: Any, output_sizes: Sequence[Any], input_sizes: Sequence[Any], group: MeshGroup
) -> Any:
    """Rows to each device and from each device.

    They go through buffers with room for all rows that a device has to send to another, so nothing
    is dropped, wherever they go. How many that are at most follows from the tensor that is sent.

    Args:
        tensor: an xla tensor, or one of so many rows.
        output_sizes, input_sizes: ints or numbers of rows, one for each device.
        group: the devices.

    Raises:
        UnsupportedOpError: there aren't as many sizes as devices; rows aren't dim 0.
        RuntimeError: the sizes don't add up to the rows there are.
    """
    if not len(output_sizes) == len(input_sizes) == group.size():
        raise UnsupportedOpError(
            f"all_to_all_single with {len(input_sizes)} sizes to send and {len(output_sizes)} to "
            f"receive, in a group of {group.size()} devices: one for each{user_line()}"
        )
    dim = tensor.along if isinstance(tensor, RaggedTensor) else 0
    if dim:
        raise UnsupportedOpError("all_to_all_single sends rows, and dim 0 has one length here")
    check_lengths(input_sizes, "all_to_all_single")
    total = _total(input_sizes)
    _check_total(tensor, total)
    buffer = unwrapped(tensor)
    slots = _slots(buffer.shape[0], output_sizes, input_sizes)
    sent, to_come = vector(input_sizes), vector(output_sizes)
    _check_matched(sent, to_come, output_sizes, input_sizes, group)
    total = _total(output_sizes)
    total.learn(group.size() * slots, exactly=False)
    most = total.most()
    assert most is not None
    pieces = row_exchange.send(buffer, sent, slots, group)
    return ragged(row_exchange.packed(pieces, most, to_come, slots), 0, total)


def exchange_into(
    output: Any, tensor: Any, group: MeshGroup, output_sizes: Any, input_sizes: Any
) -> list[Any]:
    """``torch.distributed.all_to_all_single`` likewise."""
    with torch.no_grad():
        found = exchange(tensor, output_sizes, input_sizes, group)
        if not isinstance(output, RaggedTensor):
            output.copy_(found)
        elif isinstance(found, RaggedTensor) and output.rows.same(found.rows):
            if output.buffer is None:
                output.buffer = filled(found)
            else:
                room = output.buffer.shape[0]
                output.buffer.copy_(resized(filled(found), 0, room))
            torch.autograd.graph.increment_version(output)
        else:
            raise RuntimeError(
                f"all_to_all_single of {number_of(_total(output_sizes))} rows into a tensor of "
                f"{number_of(output.rows)}{user_line()}"
            )
    return [output]


def _total(sizes: Sequence[Any]) -> CountNode:
    total = CountNode({}, 0)
    for size in sizes:
        total = total.add(node_of(size))
    return total


def _check_total(tensor: Any, total: CountNode) -> None:
    """The rows to send are all that there are, as torch demands; from here on it is known."""
    if isinstance(tensor, RaggedTensor):
        rows: Any = torch.SymInt(tensor.rows)
        known = tensor.rows.same(total)
    else:
        rows = tensor.shape[0]
        exact = total.exact()
        known = None if exact is None else exact == rows
    if known is None:
        message = f"all_to_all_single: the sizes to send don't add up to the rows{user_line()}"
        check(scalar(number_of(total)) == scalar(rows), message)
        total.is_the_same_as(node_of(rows))
    elif not known:
        raise RuntimeError(
            f"Split sizes doesn't match total dim 0 size: {number_of(total)} rows to send of "
            f"{rows}{user_line()}"
        )


def _slots(rows: int, output_sizes: Sequence[Any], input_sizes: Sequence[Any]) -> int:
    """How many rows a device sends to another at most; all sizes are known to be at most that."""

    def most(sizes: Sequence[Any]) -> int:
        known = [node_of(size).most() for size in sizes]
        return max(rows if n is None else min(n, rows) for n in known)

    # What one device sends another expects: each list says it of all.
    outputs = [node_of(size).most() for size in output_sizes]
    slots = most(input_sizes)
    if all(n is not None for n in outputs):
        slots = min(slots, max(n for n in outputs if n is not None))
    for size in (*output_sizes, *input_sizes):
        node_of(size).learn(slots, exactly=False)
    return slots


def _check_matched(
    sent: Any, to_come: Any, output_sizes: Any, input_sizes: Any, group: MeshGroup
) -> None:
    """Each device gets as many rows as it expects; torch would hang or read beyond."""
    lists = tuple(tuple(node_of(n).key for n in sizes) for sizes in (output_sizes, input_sizes))
    counts = {c for n in (*output_sizes, *input_sizes) for c, _ in node_of(n).terms_of}
    if any(lists in c.matched or lists[::-1] in c.matched for c in counts):
        return
    arrived = collectives.all_to_all(sent, group)
    check(
        arrived == to_come,
        "all_to_all_single: a device expects another number of rows than the other one sends"
        f"{user_line()}",
    )
    for c in counts:
        c.matched.add(lists)
