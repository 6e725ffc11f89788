"""Tensors from outside that a step uses: flags, hooks and gradients as the trace found them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from xla_dtensor.base.torch_private import set_version_counter
from xla_dtensor.base.torch_private.attributes import (
    hooks_after_accumulation,
    hooks_of_tensor,
    is_leaf,
)
from xla_dtensor.tensors.base import grad_of


class ExternalTensor:
    """A tensor from outside of the step, as the trace found it.

    Attributes:
        get: gives the tensor; None for a view that the step made and has dropped. Only during the
            trace by a weak reference: torch swaps no tensor that has one (``module.half()``).
        index: which argument of the step it is, if it is one and nothing else.
        leaf: likewise, the leaf (an `ExternalTensor`) whose ``.grad`` it is.
        only_optimizer: whether it was an optimizer that first used it: state, which no graph saves.
        writes: how many writes autograd has counted during the trace; each call counts as many.
        grad: its ``.grad`` when the step began.
        cleared: whether the step has set its ``.grad`` to None before anything looked at that or
            added to it, so that it doesn't matter what it was.
        asks_grad: whether the step's Python has read or set it.
        switched: whether the step has used it with another ``requires_grad`` than it had.
        only_moved: whether the step has done nothing with it but give it other memory.
        moved_back: whether the step has given it other memory, and `move_back` its own again.
    """

    __slots__ = (
        *("asks_grad", "cleared", "get", "grad", "hooks", "is_leaf", "requires_grad", "steps"),
        "form",
        *("index", "leaf", "moved_back", "only_moved", "only_optimizer"),
        *("storage", "switched", "version", "writes"),
    )

    def __init__(self, tensor: Any) -> None:
        self.get: Callable[[], Any] = weakref.ref(tensor)
        self.index: int | None = None
        self.leaf: ExternalTensor | None = None
        self.only_optimizer = False
        self.version = _version(tensor)
        self.writes = 0
        self.requires_grad = tensor.requires_grad
        self.is_leaf = is_leaf(tensor)
        self.grad = grad_of(tensor) if self.is_leaf else None
        self.cleared = self.switched = self.asks_grad = False
        self.moved_back = self.only_moved = False
        self.storage = getattr(tensor, "_storage_", None)
        self.steps = getattr(tensor, "_steps", ())
        self.form = getattr(tensor, "_own_form", None) if self.steps else self._storage_form()
        self.hooks = hooks_of(tensor)

    def _storage_form(self) -> Any:
        return None if self.storage is None else self.storage.form

    @property
    def takes_gradient(self) -> bool:
        """Whether its ``.grad`` may matter to the step, or be set by it."""
        return self.is_leaf and (self.requires_grad or self.switched or self.asks_grad)

    def keep(self, index: int | None = None, leaf: ExternalTensor | None = None) -> bool:
        """Refer to the tensor as long as the program lives (or to the argument ``index``, or the
        gradient of ``leaf``, which are other tensors in each call); whether it is still there."""
        tensor = self.get()
        self.index, self.leaf = index, leaf
        self.get = (lambda: tensor) if self.is_fixed else lambda: None
        if tensor is None or not self.is_fixed:
            self.storage = None  # not kept alive
        return tensor is not None

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same tensor in each call."""
        return self.index is None and self.leaf is None

    def count_writes(self) -> None:
        """Note how many writes there have been since the trace found the tensor."""
        tensor = self.get()
        if tensor is not None and not self.only_optimizer:
            self.writes = _version(tensor) - self.version

    def forget_writes(self) -> None:
        """The trace has not happened, and torch shall know nothing of its writes: a backward pass
        may wait that compares its count."""
        tensor = self.get()
        if tensor is not None and _version(tensor) != self.version:
            set_version_counter((tensor,), (self.version,))

    def let_go(self) -> None:
        """The trace has failed, and refers to the tensor no more: what is left of it may live as
        long as the exception, and a tensor with weak references can't be swapped. If the step has
        given it other memory (``.data =``, ``module.double()``), it gets its own back."""
        tensor = self.get()
        storage = getattr(tensor, "_storage_", self.storage)
        if self.storage is not None and storage is not self.storage:
            tensor._become(type(tensor)(self.storage, self.form, self.steps))
        self.get = lambda: None

    def of(self, arguments: Any) -> Any:
        """The tensor in a call with ``arguments``."""
        if self.leaf is not None:
            leaf = self.leaf.of(arguments)
            return None if leaf is None else grad_of(leaf)
        return self.get() if self.index is None else arguments.tensors[self.index]

    def move_back(self, owns: Callable[[Any], bool]) -> None:
        """Where the step has given the tensor other memory (``p.data = p.data * 0.9``), give it its
        own back with the values of that. Nobody can tell, if the step has made that memory, of the
        same form, and no other tensor sees the one or the other.

        Args:
            owns: whether the trace has made a storage.
        """
        tensor = self.get()
        new: Any = getattr(tensor, "_storage_", self.storage)
        if self.storage is None or new is self.storage or self.steps or tensor._steps:
            return
        if not owns(new) or new.form != self.form or new.is_shared(tensor):
            return
        tensor._become(type(tensor)(self.storage, self.form))
        if self.is_seen_by_others():
            tensor._become(type(tensor)(new, new.form))
            return
        self.storage.write(new.array, new.form)
        self.moved_back = True

    def is_seen_by_others(self) -> bool:
        """Whether other tensors show its memory."""
        return self.storage is not None and self.storage.is_shared(self.get())

    def is_switched(self) -> bool:
        """Whether the tensor has another ``requires_grad`` than the trace found."""
        tensor = self.get()
        if tensor is None or tensor.requires_grad == self.requires_grad:
            return False
        return is_leaf(tensor)

    def switch_back(self) -> None:
        """Give it the one that the trace found."""
        if self.is_switched():
            self.get().requires_grad_(self.requires_grad)

    def other_hooks(self) -> bool:
        """Whether other functions are called with its gradient than the trace found."""
        tensor = self.get()
        return tensor is not None and hooks_of(tensor) != self.hooks

    def changed(self, but_requires_grad: bool = False) -> str | None:
        """What is no longer as the trace found it."""
        tensor = self.get()
        if tensor is None:
            return None
        name = f"a tensor of shape {list(tensor.shape)}"
        if tensor.requires_grad != self.requires_grad and not but_requires_grad:
            return f"requires_grad of {name}: from {self.requires_grad} to {tensor.requires_grad}"
        if getattr(tensor, "_storage_", None) is not self.storage:
            seen = self.is_seen_by_others()
            return (
                f"the memory of {name}, which is another tensor's now (.data = or set_, where "
                "copy_() keeps the memory, or a module's double(), half() or to())"
                + (", while others show what it was (its detach(), a state_dict)" if seen else "")
            )
        if getattr(tensor, "_steps", ()) != self.steps:
            return f"what of its memory {name} shows"
        if self.other_hooks():
            return f"the hooks of {name}"
        if is_leaf(tensor) != self.is_leaf:
            return f"whether {name} has a history"
        return None


def _version(tensor: Any) -> int:
    return 0 if not isinstance(tensor, torch.Tensor) or tensor.is_inference() else tensor._version


def own_hook(tensor: Any) -> int | None:
    """The key of the hook that this package has put there, if there is one."""
    return getattr(getattr(tensor, "_xla_grad_hook", None), "id", None)


def hooks_of(tensor: Any) -> tuple[Any, ...]:
    """The functions that are called with the tensor's gradient, apart from our own."""
    found: tuple[Any, ...] = ()
    if not isinstance(tensor, torch.Tensor):
        return found  # an edge of autograd's graph
    backward, accumulated = hooks_of_tensor(tensor), hooks_after_accumulation(tensor)
    if not backward and not accumulated:
        return found
    own = own_hook(tensor)
    for name, hooks in (("backward", backward), ("accumulated", accumulated)):
        users = [hook for key, hook in hooks.items() if key != own] if hooks else None
        if users:
            found = (*found, name, *users)
    return found


@contextlib.contextmanager
def without_hooks(tensors: Iterable[Any]) -> Iterator[None]:
    """In the block the backward hooks of tensors aren't called."""
    saved = [(hooks, dict(hooks)) for hooks in map(hooks_of_tensor, tensors) if hooks]
    for hooks, _ in saved:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in saved:
            hooks.update(own)
