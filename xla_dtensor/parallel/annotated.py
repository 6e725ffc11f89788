"""Plain parameters, each device's part, that say by annotations how they make up whole ones.

``fully_shard(dp_mesh_dims=...)`` takes ``DTensor``s on the whole mesh, or such parameters: the
package ``spmd_types`` writes types per mesh axis on tensors, which torch 2.14's ``fully_shard``
reads. Here whoever knows annotations of a kind is asked (`readers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement

from xla_dtensor.movement.local_view import from_local, to_local

if TYPE_CHECKING:
    from xla_dtensor.parallel._mesh import DataParallel


@dataclass(frozen=True)
class Annotation:
    """How a plain parameter is laid out over the whole mesh.

    Attributes:
        placements: of the ``DTensor`` that the devices' parts make up.
        grad_placements: of its gradient, which modules compute for their parts.
        restore: writes the annotation on the tensor that modules compute with.
    """

    placements: tuple[Placement, ...]
    grad_placements: tuple[Placement, ...]
    restore: Callable[[torch.Tensor], None]

    def stored(self, parameter: Any, parallel: DataParallel) -> Any:
        """The parameter as a ``DTensor``."""
        assert parallel.whole_mesh is not None
        return from_local(parameter.detach(), parallel.whole_mesh, self.placements)

    def handed_out(self, whole: Any, parallel: DataParallel) -> Any:
        """Each device's part of the whole parameter, for modules; differentiable. Along
        data-parallel dims devices' gradients are parts of a sum."""
        own = parallel.numbers_in_whole_mesh
        grads = [Partial() if i in own else p for i, p in enumerate(self.grad_placements)]
        part = to_local(whole, grads)
        self.restore(part)
        return part


Reader = Callable[[Any, "DataParallel"], Annotation | None]

readers: list[Reader] = []
"""Each says of a parameter, and where it is to be managed, what its annotation means, or None."""


def annotation_of(parameter: Any, parallel: DataParallel) -> Annotation | None:
    """What a plain parameter's annotation means, if it has one."""
    if parallel.whole_mesh is None:
        return None
    found = (read(parameter, parallel) for read in readers)
    return next((annotation for annotation in found if annotation is not None), None)
