"""The names under which files saved before the package had floors refer to what rebuilds them."""

from xla_dtensor.mesh.saving import rebuild_mesh
from xla_dtensor.tensors.saving import rebuild_tensor

__all__ = ["rebuild_mesh", "rebuild_tensor"]
