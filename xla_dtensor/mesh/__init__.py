"""torch's DeviceMesh as a JAX mesh, submeshes, groups, placements and layouts. Knows no ops."""

from xla_dtensor.base.torch_private.attributes import root_mesh
from xla_dtensor.mesh.current import current_mesh, get_mesh, set_mesh
from xla_dtensor.mesh.device_mesh import XLADeviceMesh
from xla_dtensor.mesh.frame import Axis, Frame, frame_of, frames_stay, mesh_dim_axes
from xla_dtensor.mesh.placements import (
    dim_axes,
    dim_mesh_dims,
    from_partition_spec,
    normalize_placements,
    placements_of,
    to_partition_spec,
)

__all__ = [
    "Axis",
    "Frame",
    "XLADeviceMesh",
    "current_mesh",
    "dim_axes",
    "dim_mesh_dims",
    "frame_of",
    "frames_stay",
    "from_partition_spec",
    "get_mesh",
    "mesh_dim_axes",
    "normalize_placements",
    "placements_of",
    "root_mesh",
    "set_mesh",
    "to_partition_spec",
]
