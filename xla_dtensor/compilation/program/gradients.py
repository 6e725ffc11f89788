"""Whether the ``.grad`` of the leaves that a step uses are as its program was compiled for."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.base.torch_private import disable_function_of_subclasses
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.trace.external_tensors import ExternalTensor
from xla_dtensor.mesh import Frame
from xla_dtensor.tensors.base import grad_of, grad_of_tensor


class _Found:
    """What a program needs to know of a gradient that it has found; a view can only be itself."""

    __slots__ = ("anchor", "cls", "form", "view")

    def __init__(self, grad: Any, anchor: Frame | None) -> None:
        self.cls, self.form, self.anchor = type(grad), grad._form.placed(anchor), anchor
        self.view = grad if grad._steps else None

    def is_like(self, grad: Any) -> bool:
        """Whether a gradient of now does as well."""
        if grad._steps or self.view is not None:
            return grad is self.view
        return type(grad) is self.cls and grad._form.placed(self.anchor) is self.form


class Gradients:
    """The ``.grad`` of the leaves that a step uses, as its trace found them. That of a leaf which
    the step was seen to clear before it looked doesn't matter.

    Args:
        outside: the tensors from outside of the step.
        arguments: of the first call.
        storages: the ids of other memory that the step uses.
        anchor: `Traced.anchor`.

    Attributes:
        leaves: those whose gradients matter.
    """

    def __init__(
        self,
        outside: Sequence[ExternalTensor],
        arguments: Arguments,
        storages: frozenset[int],
        anchor: Frame | None,
    ) -> None:
        self._storages = storages
        self.leaves = [o for o in outside if o.takes_gradient and not o.cleared]
        grads = [o.grad for o in self.leaves if o.grad is not None]
        # The leaves, if none has a gradient when the step begins: then one loop in C checks all.
        self._without: list[Any] | None = None
        if not grads and all(o.is_fixed for o in self.leaves):
            leaves = [o.get() for o in self.leaves]
            if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                self._without = leaves
        self._no_grads = [None] * len(self.leaves)
        self._share = self._sharing(grads, arguments) if grads else None
        self._before = [None if o.grad is None else _Found(o.grad, anchor) for o in self.leaves]

    def mismatch(self, arguments: Arguments) -> str | None:
        """What is another gradient now, or None."""
        if self._without is not None:
            # torch asks each for a __torch_function__, which takes as long as reading .grad.
            with disable_function_of_subclasses():
                none = all(map(operator.is_, map(grad_of_tensor, self._without), self._no_grads))
            if none:
                return None  # none had a gradient, and none has
        grads = []
        for outside, before in zip(self.leaves, self._before, strict=True):
            leaf = outside.of(arguments)
            if leaf is None:
                continue
            grad = grad_of(leaf)
            if (grad is None) != (before is None) or not (before is None or before.is_like(grad)):
                return _text(leaf, before)
            if grad is not None:
                grads.append(grad)
        if grads and self._sharing(grads, arguments) != self._share:
            return "which memory the gradients are in"
        return None

    def _sharing(self, grads: list[Any], arguments: Arguments) -> Any:
        """Which gradients are in the same memory, or in that of something else that the step uses;
        None if each has its own."""
        storages = [id(grad._storage_) for grad in grads]
        others = self._storages | {id(getattr(t, "_storage_", None)) for t in arguments.tensors}
        if len(set(storages)) == len(storages) and not others.intersection(storages):
            return None
        first: dict[int, int] = {}
        return [(first.setdefault(s, i), s in others) for i, s in enumerate(storages)]


def _text(leaf: Any, before: _Found | None) -> str:
    shape = list(leaf.shape)
    if (leaf.grad is None) == (before is None):
        return f"the layout of the .grad of a parameter of shape {shape}"
    was, now = ("None" if x is None else "a tensor" for x in (before, leaf.grad))
    return f"the .grad of a parameter of shape {shape}: from {was} to {now}"
