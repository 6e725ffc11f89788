"""What differs between the supported torch versions (2.11 to 2.15), in one place.

Checked on 2.11.0, 2.12.1, 2.13.0 and 2.15.0; what differs is written where it matters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from xla_dtensor.base import interrupts

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


class _DispatchToClasses(TorchDispatchMode):
    """Gives operations on xla tensors to the tensor classes.

    Before torch 2.13, DTensor's C++ fast path took over for subclasses of DTensor too, and never
    called their ``__torch_dispatch__``. A dispatch mode comes before the fast path.
    """

    @interrupts.atomic
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from xla_dtensor.dispatch import dispatch
        from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

        if not any(issubclass(t, XLAShardedTensor) for t in types):
            return func(*args, **(kwargs or {}))
        with self:  # for the operations that the handling of this one calls
            return dispatch(func, args, kwargs or {})


_mode: _DispatchToClasses | None = None


def let_subclasses_dispatch() -> None:
    """Make ``XLAShardedTensor.__torch_dispatch__`` take effect, where torch needs help with it."""
    global _mode
    if TORCH_VERSION < (2, 13) and _mode is None:
        _mode = _DispatchToClasses()
        _mode.__enter__()


def layout_pieces(mesh: DeviceMesh) -> list[list[tuple[int, int]]]:
    """Per mesh dim its (size, stride) pieces in the root's flat device list, major to minor.

    torch >= 2.13 keeps a canonical layout object per mesh dim; before, the mesh's layout had nested
    ``shape`` and ``stride`` tuples.
    """
    layout = mesh._layout
    if hasattr(layout, "axes"):
        return [list(zip(axis.shape, axis.stride, strict=True)) for axis in layout.axes]
    return [
        list(zip(_flat(shape), _flat(stride), strict=True))
        for shape, stride in zip(_as_tuple(layout.shape), _as_tuple(layout.stride), strict=True)
    ]


def _as_tuple(x: object) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def _flat(x: object) -> list[int]:
    if isinstance(x, tuple):
        return [leaf for item in x for leaf in _flat(item)]
    return [x]  # type: ignore[list-item]
