"""`SpmdError`: what torch_xla raises by ``assert`` for meshes and shards that don't fit."""

from __future__ import annotations

from xla_dtensor.errors import XlaDTensorError


class SpmdError(XlaDTensorError, AssertionError, ValueError, RuntimeError):
    """Raised for a mesh, a partition spec or shards that don't fit. torch_xla raises an
    AssertionError, a ValueError or a RuntimeError in these places; it is all of them.

    Example::

        import xla_dtensor.compat.torch_xla.distributed.spmd as xs

        xs.Mesh([0, 0], (2,))  # one device twice
    """
