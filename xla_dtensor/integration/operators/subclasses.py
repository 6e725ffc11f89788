"""Tensors of users' subclasses: ``as_subclass``, ``_make_subclass``, ``Image(x)``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from xla_dtensor.base import thread_state, torch_private
from xla_dtensor.base.ours import is_ours
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over

_Tensor: Any = torch.Tensor
_found: Any = None  # `tensors.subclasses`, when there are xla tensors


def install() -> None:
    """Once per process, and at once: libraries keep torch's functions under names of their own."""
    on_import("xla_dtensor.tensors.base", _load)
    made, new = torch_private.make_subclass, _Tensor.__new__

    # Of a tensor elsewhere: the class may be that of an xla tensor, ``type(x)``.
    @functools.wraps(made)
    def make_subclass(cls: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(data):
            return _found.make_subclass(cls, data, *args, **kwargs)
        return made(_shown_class(cls), data, *args, **kwargs)

    # torch makes an alias here, too.
    @functools.wraps(new)
    def of_tensor(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and is_ours(args[0]):
            return _found.as_subclass(args[0], cls)
        return new(cls, *args, **kwargs)

    # Where fastai has been imported before, the method is its own, and calls torch's by this name.
    owner: Any = torch if hasattr(torch, "as_subclass") else _Tensor
    owner.as_subclass = _as_subclass(owner.as_subclass)
    torch_private.replace("make_subclass", staticmethod(make_subclass))
    _Tensor.__new__ = staticmethod(of_tensor)
    take_over(torch.utils.swap_tensors, _swap)


def _as_subclass(original: Any) -> Any:
    @functools.wraps(original)
    def as_subclass(self: Any, cls: Any) -> Any:
        if is_ours(self):
            return _found.as_subclass(self, cls)
        return original(self, _shown_class(cls))

    return as_subclass


def _load(base: Any) -> None:
    global _found
    from xla_dtensor.tensors import subclasses

    _found = subclasses


def _shown_class(cls: Any) -> Any:
    return cls if _found is None else _found.shown_class(cls)


def _swap(original: Any, args: Any, kwargs: Any) -> None:
    with thread_state.swapping_tensors():
        original(*args, **kwargs)
