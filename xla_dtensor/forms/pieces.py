"""Which part of a sharded tensor each device has, as torch cuts it.

torch cuts a dim as `torch.chunk` does: into equal pieces, of which the last may be smaller and
others empty; what two mesh dims cut is cut twice. XLA cuts it once, into as many equal blocks. The
two are the same but where a dim that two mesh dims cut doesn't divide: 18 rows on a 4x2 mesh are
3, 2, 3, 2, 3, 2, 2, 1 to torch, and 3, 3, 3, 3, 3, 3, 0, 0 to XLA. A program reads torch's pieces;
how XLA spreads an array's memory is of no consequence to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from xla_dtensor.forms.form import Form
from xla_dtensor.mesh import dim_mesh_dims


@dataclass(frozen=True, slots=True)
class Piece:
    """A device's part.

    Attributes:
        number: the device's number.
        device: JAX's object.
        index: a slice per tensor dim.
        lead: its position along each leading axis of the array.
        is_block: whether that is also what XLA gives the device, padding aside.
    """

    number: int
    device: Any
    index: tuple[slice, ...]
    lead: tuple[int, ...]
    is_block: bool


def pieces(form: Form) -> Iterator[Piece]:
    """The parts of a sharded tensor without pending reductions, in the order of its devices."""
    frame, mesh = form.frame, form.mesh
    assert frame is not None and mesh is not None and form.placements is not None
    sizes = tuple(mesh.shape)
    orders = dim_mesh_dims(form.placements, sizes, len(form.shape))
    cuts = [
        chunks(n, [sizes[mesh_dim] for mesh_dim in order])
        for n, order in zip(form.shape, orders, strict=True)
    ]
    count = len(form.varying)
    blocks = form.sharding.devices_indices_map(form.array_shape)
    for number, device in zip(frame.device_ids, frame.jax_mesh.devices.flat, strict=True):
        lead = tuple(part.indices(1 << 30)[0] for part in blocks[device][:count])
        index, is_block = [], True
        for part, size, padded, own in zip(
            blocks[device][count:], form.shape, form.padded_shape, cuts, strict=True
        ):
            start, stop, _ = part.indices(padded)
            piece = own[start * len(own) // padded] if padded else own[0]
            block = slice(min(start, size), min(stop, size))
            is_block = is_block and piece == block
            index.append(piece)
        yield Piece(number, device, tuple(index), lead, is_block)


def chunks(size: int, counts: Sequence[int]) -> list[slice]:
    """``size`` elements cut into ``counts[0]`` pieces, each of them into ``counts[1]``, and so on.
    An empty piece is at the end of everything, as torch has it."""
    found = [slice(0, size)]
    for count in counts:
        finer = []
        for piece in found:
            step = -(-(piece.stop - piece.start) // count)
            starts = (piece.start + i * step for i in range(count))
            finer += [slice(min(s, piece.stop), min(s + step, piece.stop)) for s in starts]
        found = finer
    return [piece if piece.start < piece.stop else slice(size, size) for piece in found]
