"""Which meshes over the same devices may be mixed in an operation: those of torch_xla's calls.

To torch two meshes are two worlds, and an operation on tensors of both is an error. To torch_xla a
mesh is how one sharding is written down, and tensors are combined whatever meshes they were marked
with. So meshes that torch_xla's calls were given are noted here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base.tables.cache import Table
from xla_dtensor.base.torch_private.attributes import device_numbers, layout_pieces, root_mesh
from xla_dtensor.errors import PlacementError
from xla_dtensor.mesh.placements import dim_mesh_dims, placements_of

# None goes, as no frame does: there is one for each list of devices that a program makes meshes of.
_meeting: Table[DeviceMesh, None] = Table(
    "meshes that meet", "one per root mesh of torch_xla's calls", clearable=False
)

Pieces = list[tuple[int, int]]


def let_meet(mesh: DeviceMesh) -> None:
    """Let operations combine tensors on ``mesh`` with tensors on others that were given to this
    function, over the same devices."""
    _meeting.setdefault(root_mesh(mesh), None)


def may_meet(meshes: Iterable[DeviceMesh]) -> bool:
    """Whether an operation may combine tensors on these: each was given to `let_meet`, and their
    devices are the same, in any order."""
    roots = {root_mesh(mesh) for mesh in meshes}
    if not roots <= _meeting.keys():
        return False
    return len({tuple(sorted(device_numbers(root).tolist())) for root in roots}) == 1


def placements_on(
    target: DeviceMesh, mesh: DeviceMesh, placements: Sequence[Placement], ndim: int
) -> tuple[tuple[Placement, ...], bool]:
    """A layout on ``mesh`` as one on ``target``, which cuts up the same devices in another way.

    Args:
        target: where to.
        mesh, placements: the layout of a tensor of ``ndim`` dims.

    Returns:
        the placements on ``target`` that are nearest to it: each tensor dim is sharded by the dims
        of ``target`` that say what comes first of its cuts. And whether they say all of it.
    """
    sizes = tuple(target.shape)
    nothing = placements_of([()] * ndim, sizes)
    try:
        orders = dim_mesh_dims(placements, tuple(mesh.shape), ndim)
    except PlacementError:  # strided, in a way that no mesh dims are
        return nothing, False
    sharded = any(orders) or any(placement.is_partial() for placement in placements)
    cuts = _common_cuts(mesh, target)
    if cuts is None:
        return nothing, not sharded
    own, others = (_cut(layout_pieces(m), cuts) for m in (mesh, target))
    exact = not any(placement.is_partial() for placement in placements)
    found: list[list[int]] = []
    for order in orders:
        left = [piece for mesh_dim in order for piece in own[mesh_dim]]
        dims: list[int] = []
        while left:
            fits = (i for i, pieces in enumerate(others) if pieces == left[: len(pieces)] != [])
            dim = next(fits, None)
            if dim is None:
                exact = False
                break
            dims.append(dim)
            left = left[len(others[dim]) :]
        found.append(dims)
    return placements_of(found, sizes), exact


def _common_cuts(*meshes: DeviceMesh) -> list[int] | None:
    """The strides at which these meshes cut their one list of devices, major to minor; None if
    their lists differ, or the strides don't divide each other (6 devices as 2x3 and as 3x2)."""
    if len({tuple(device_numbers(root_mesh(mesh)).tolist()) for mesh in meshes}) > 1:
        return None
    pieces = [piece for mesh in meshes for dim in layout_pieces(mesh) for piece in dim]
    cuts = sorted({cut for size, stride in pieces for cut in (stride, size * stride)}, reverse=True)
    if any(major % minor for major, minor in itertools.pairwise(cuts)):
        return None
    return cuts


def _cut(dims: list[Pieces], cuts: list[int]) -> list[Pieces]:
    """The pieces of mesh dims, cut at all of ``cuts``."""
    return [
        [
            (major // minor, minor)
            for size, stride in pieces
            for major, minor in itertools.pairwise(
                [cut for cut in cuts if stride <= cut <= size * stride]
            )
        ]
        for pieces in dims
    ]
