"""The default mesh: that of a ``with mesh:`` block, or what `set_mesh` was given."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base.torch_private import mesh_resources
from xla_dtensor.errors import MeshError

_default: DeviceMesh | None = None


def set_mesh(mesh: DeviceMesh | None) -> None:
    """Make ``mesh`` the one that functions use which are given none, in all threads: of this
    package and of torch, ``distribute_tensor(x, placements=...)``, `distribute_module`,
    ``torch.distributed.tensor.zeros``, ``parallelize_module``, `fully_shard`, and so on. A
    ``with mesh:`` block comes first.

    Args:
        mesh: an xla mesh; None for none.

    Raises:
        MeshError: it is no xla mesh.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        xd.set_mesh(mesh)
        x = xd.distribute_tensor(torch.ones(8, 4), placements=[xd.Shard(0), xd.Replicate()])
        assert x.device_mesh == mesh and xd.get_mesh() is mesh
        xd.set_mesh(None)
    """
    if mesh is not None and getattr(mesh, "device_type", None) != "xla":
        raise MeshError(
            f"set_mesh({mesh!r}): give a mesh of init_device_mesh('xla', ...), or None for none"
        )
    global _default
    _default = mesh


def get_mesh() -> DeviceMesh:
    """The mesh that functions use which are given none.

    Returns:
        that of the innermost ``with mesh:`` block, else what `set_mesh` was given.

    Raises:
        MeshError: there is none.

    Example::

        import xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (8,))
        with mesh:
            assert xd.get_mesh() is mesh
    """
    mesh = current_mesh()
    if mesh is None:
        raise MeshError("no mesh is current: call xla_dtensor.set_mesh(mesh), or use `with mesh:`")
    return mesh


def current_mesh() -> DeviceMesh | None:
    """`get_mesh`, or None."""
    stack = mesh_resources.mesh_stack
    return stack[-1] if stack else _default
