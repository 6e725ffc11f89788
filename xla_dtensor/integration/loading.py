"""``torch.load`` with ``weights_only=True``, the default, rebuilds tensors and meshes."""

from __future__ import annotations

from typing import Any

import torch


def _rebuild_tensor(*arguments: Any) -> Any:
    from xla_dtensor.tensors.saving import rebuild_tensor

    return rebuild_tensor(*arguments)


def _rebuild_mesh(*arguments: Any) -> Any:
    from xla_dtensor.mesh.saving import rebuild_mesh

    return rebuild_mesh(*arguments)


def install() -> None:
    """Allow what files refer to, besides plain data, also by the names that it had first. What it
    is takes long to import."""
    torch.serialization.add_safe_globals(
        [
            (_rebuild_tensor, "xla_dtensor.tensors.saving.rebuild_tensor"),
            (_rebuild_mesh, "xla_dtensor.mesh.saving.rebuild_mesh"),
            (_rebuild_tensor, "xla_dtensor._pickling.rebuild_tensor"),
            (_rebuild_mesh, "xla_dtensor._pickling.rebuild_mesh"),
        ]
    )
