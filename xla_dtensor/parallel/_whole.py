"""Bookkeeping of gathered (whole) parameters, and of where modules hold their parameters."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private.attributes import parameters_of
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.storage import Storage

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Location:
    """Where a module holds a parameter."""

    module: nn.Module
    name: str

    def get(self) -> torch.Tensor:
        """What is there now."""
        tensor = parameters_of(self.module)[self.name]
        assert tensor is not None
        return tensor

    def put(self, tensor: torch.Tensor) -> None:
        """Put ``tensor`` there, which need not be a leaf."""
        before = parameters_of(self.module)[self.name]
        parameters_of(self.module)[self.name] = tensor
        # nn.RNNBase keeps its own list, and makes another one where its references say so.
        flat = self.module.__dict__.get("_flat_weights", ())
        for i in [i for i, weight in enumerate(flat) if weight is before]:
            flat[i] = tensor
            self.module.__dict__["_flat_weight_refs"][i] = weakref.ref(tensor)


class Accumulated:
    """The gradient of a whole parameter that waits for its reduction, as ``.grad``.

    A compiled step treats it as it treats a leaf: whether there is a gradient when the step begins
    is part of the program, and what the step leaves is put in place after each run.
    """

    requires_grad = True
    is_leaf = True

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.grad: Any = None

    def add(self, grad: Any) -> None:
        """Keep ``grad`` for later."""
        self._look()
        if self.grad is None:
            self.grad = grad.clone()
        else:
            self.grad.add_(grad)

    def take(self) -> Any:
        """What has been kept, or None; nothing is left."""
        self._look()
        grad, self.grad = self.grad, None
        return grad

    def _look(self) -> None:
        executor.current().touched(self)


class UnshardedStorage:
    """A whole parameter's storage: where it came from.

    Attributes:
        parameter: the managed parameter.
        global_view, form: how it was handed out.
        reshard: whether autograd is to keep it sharded and gather it again.
        version: of the sharded parameter when it was gathered.
        trace: in which that was.
        kept: with an int ``reshard_after_forward``, its storage sharded over fewer devices.
    """

    __slots__ = ("form", "global_view", "kept", "parameter", "reshard", "trace", "version")

    def __init__(self, parameter: Any, global_view: bool, form: Form, version: Any) -> None:
        self.parameter, self.global_view, self.form = parameter, global_view, form
        self.reshard = False
        self.version = version
        self.trace = executor.trace()
        self.kept: Any = None


# Which whole parameter a storage is.
wholes: weakref.WeakKeyDictionary[Storage, UnshardedStorage] = weakref.WeakKeyDictionary()


def same_whole(known: UnshardedStorage | None, wanted: UnshardedStorage, trace: Any) -> bool:
    """Whether a whole parameter that still exists is the one to gather."""
    return (
        known is not None
        and not known.reshard
        and known.trace is trace
        and known.version == wanted.version
        and known.form is wanted.form
    )
