"""The functions above this floor that tensor classes call: dispatch, redistribute, ...

The one place where the package reaches up. `xla_dtensor.integration` says, when it is installed,
where to find it; it is loaded with the first tensor's first operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class Backend(Protocol):
    """What `xla_dtensor.movement.backend` offers."""

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any], /) -> Any:
        """Execute an aten overload."""

    def distribute_tensor(
        self, tensor: Any, device_mesh: Any = None, placements: Any = None, /
    ) -> Any:
        """A sharded tensor of a value."""

    def redistribute(
        self,
        tensor: Any,
        device_mesh: DeviceMesh | None,
        placements: Sequence[Placement] | None,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
        /,
    ) -> Any:
        """The tensor in another layout; differentiable."""

    def to_form(self, tensor: Any, target: Any, /) -> Any:
        """The same in another form `with_placements`; below autograd."""

    def full_tensor(self, tensor: Any, grad_placements: Sequence[Placement] | None, /) -> Any:
        """The whole logical tensor as an `XLATensor`; differentiable."""

    def to_local(self, tensor: Any, grad_placements: Sequence[Placement] | None, /) -> Any:
        """What each device holds, as an `XLATensor`; differentiable."""

    def as_sharded(self, tensor: Any, mesh: DeviceMesh, /) -> Any:
        """A tensor as a sharded one on ``mesh``."""

    def local_shards(self, tensor: Any, /) -> Any:
        """What each device holds of a sharded tensor, on the host."""

    def to_jax(self, tensor: Any, /) -> Any:
        """The value as a ``jax.Array``."""

    def from_host(self, value: torch.Tensor, form: Any, /) -> Any:
        """A tensor of a form, of values that have its varying axes in front."""

    def local_values(self, tensor: Any, /) -> list[torch.Tensor]:
        """The values of a per-device tensor, on the host."""


_load: Callable[[], Backend]


def bind(load: Callable[[], Backend]) -> None:
    """Let ``load`` give the backend, when it is wanted."""
    global _load
    _load = load
    backend.cache_clear()


@functools.cache
def backend() -> Backend:
    """What the tensor classes call."""
    return _load()
