"""Old names of functions that rebuild objects, for files saved before modules were moved."""

from xla_dtensor.mesh.saving import rebuild_mesh
from xla_dtensor.tensors.saving import rebuild_tensor

__all__ = ["rebuild_mesh", "rebuild_tensor"]
