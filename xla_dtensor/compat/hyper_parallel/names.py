"""HyperParallel's attributes of ``x.layout`` that `xla_dtensor.Layout` doesn't have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.compat.hyper_parallel.layout import Layout
from xla_dtensor.mesh import layout as of_package


def mutable(layout: of_package.Layout) -> Layout:
    """A layout of the package as one of these."""
    if isinstance(layout, Layout):
        return layout
    made = Layout.from_device_mesh(layout.mesh)
    made.set_placements(layout.placements)
    if layout.ndim is not None:
        made.placement_to_tensor_map(layout.ndim)
    return made


def build_layout(mesh: DeviceMesh, placements: Sequence[Placement], tensor_dim: int) -> Layout:
    """The layout of a tensor of ``tensor_dim`` dims.

    Raises:
        PlacementError: the placements don't fit.
    """
    made = Layout.from_device_mesh(mesh)
    made.set_placements(list(placements))
    made.placement_to_tensor_map(tensor_dim)
    return made


_OF_LAYOUT = frozenset(
    {
        "alias_name",
        "alias_placements",
        "compact_str",
        "get_dev_axis_apply_shard_axis",
        "get_dim_split_num",
        "get_global_shape",
        "is_dev_axis_apply_shard",
        "mesh_shape",
        "rank_list",
        "repeat_num",
        "to_dict",
        "to_string",
    }
)


def _find(self: of_package.Layout, name: str) -> Any:
    """What ``x.layout`` has no name for: as this class's layout of the same has it."""
    if name not in _OF_LAYOUT or isinstance(self, Layout):
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    return getattr(mutable(self), name)


of_package.Layout.__getattr__ = _find  # type: ignore[attr-defined]
