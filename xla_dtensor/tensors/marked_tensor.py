"""`MarkedTensor`: a per-device tensor object that has become a sharded one.

torch_xla's ``mark_sharding`` shards the tensor that it is given, which modules, optimizers and
autograd's graph hold already. Python doesn't let an object of `XLATensor` become one of
`XLAShardedTensor`, whose base ``DTensor`` has slots. So it becomes one of a third class, which has
a sharded tensor's methods and passes for one in ``isinstance(x, XLAShardedTensor)``. What is
computed from it are ordinary sharded tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.tensors.base import TensorMethods
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.printing import text_of
from xla_dtensor.tensors.sharded_tensor import (
    STAND_INS,
    XLAShardedTensor,
    keep_leaf_gradients_sharded,
)


class MarkedTensor(TensorMethods, torch.Tensor):
    """A tensor that has been sharded in place: what `XLAShardedTensor` is, but no ``DTensor``.

    Made by `shard_in_place`, of an object that exists.
    """

    _xla_local: Any = None
    _summed: tuple[int, ...] = ()
    _spec: Any = None

    @staticmethod
    def __new__(cls: Any, storage: Any, form: Any, steps: Any = (), requires_grad: Any = False):
        # Who makes another tensor of this one's class means one of this kind.
        wanted: Any = XLAShardedTensor if form.mesh is not None else XLATensor
        return wanted.__new__(wanted, storage, form, steps, requires_grad)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One per mesh dim."""
        return self._spec.placements

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """As `XLAShardedTensor`'s."""
        super().requires_grad_(requires_grad)
        if requires_grad:
            keep_leaf_gradients_sharded(self)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        where = [f"device_mesh={self.device_mesh!r}", f"placements={self.placements}"]
        return text_of(self, "XLAShardedTensor", where)

    redistribute = XLAShardedTensor.redistribute
    full_tensor = XLAShardedTensor.full_tensor
    to_local = XLAShardedTensor.to_local
    reduce_partial = XLAShardedTensor.reduce_partial
    layout = XLAShardedTensor.layout
    local_shards = XLAShardedTensor.local_shards
    _has_become = XLAShardedTensor._has_become
    _copy = XLAShardedTensor._copy


STAND_INS.add(MarkedTensor)


def shard_in_place(tensor: Any, sharded: XLAShardedTensor) -> None:
    """Let ``tensor``, sharded or not, show the memory of ``sharded``, in its layout.

    Its history, its gradient and its hooks stay what they are: ``sharded`` has the same value.

    Raises:
        UnsupportedOpError: ``tensor`` is of a subclass of the user's.
    """
    if type(tensor) is XLATensor:
        tensor.__class__ = MarkedTensor
    elif isinstance(tensor, XLATensor):
        raise UnsupportedOpError(
            f"a {type(tensor).__name__} can't be sharded in place: shard "
            "x.as_subclass(torch.Tensor), or use distribute_tensor"
        )
    tensor._become(sharded)


def unshard_in_place(tensor: Any, whole: XLATensor) -> None:
    """The way back from `shard_in_place`, for a `MarkedTensor`."""
    hook = getattr(tensor, "_xla_grad_hook", None)
    if hook is not None:
        hook.remove()
        del tensor._xla_grad_hook
    tensor.__class__ = XLATensor
    for name in ("_spec", "_xla_local"):
        vars(tensor).pop(name, None)
    tensor._become(whole)
