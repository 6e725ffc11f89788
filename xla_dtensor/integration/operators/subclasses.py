"""Tensors of users' subclasses: ``as_subclass``, ``_make_subclass``, ``Image(x)``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from xla_dtensor.base import torch_private
from xla_dtensor.tensors import subclasses
from xla_dtensor.tensors.base import TensorMethods

_Tensor: Any = torch.Tensor


@functools.cache
def install() -> None:
    """Once per process, with the first xla tensor."""
    original, made, new = _Tensor.as_subclass, torch_private.make_subclass, _Tensor.__new__

    # The class may be that of an xla tensor, ``type(x)``; a CPU tensor becomes what that shows.
    @functools.wraps(original)
    def as_subclass(self: Any, cls: Any) -> Any:
        if isinstance(self, TensorMethods):
            return subclasses.as_subclass(self, cls)
        return original(self, subclasses.shown_class(cls))

    @functools.wraps(made)
    def make_subclass(cls: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, TensorMethods):
            return subclasses.make_subclass(cls, data, *args, **kwargs)
        return made(subclasses.shown_class(cls), data, *args, **kwargs)

    # torch makes an alias here, too.
    @functools.wraps(new)
    def of_tensor(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], TensorMethods):
            return subclasses.as_subclass(args[0], cls)
        return new(cls, *args, **kwargs)

    _Tensor.as_subclass = as_subclass
    torch_private.replace("make_subclass", staticmethod(make_subclass))
    _Tensor.__new__ = staticmethod(of_tensor)
