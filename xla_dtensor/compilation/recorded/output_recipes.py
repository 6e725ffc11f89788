"""Chooses, at the end of a trace, the recipe by which each call makes each result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from xla_dtensor.base.numbers.pending_number import PendingNode
from xla_dtensor.base.numbers.python_numbers import is_number, is_pending
from xla_dtensor.base.numbers.text_of_numbers import Parts
from xla_dtensor.base.torch_private.attributes import is_leaf, is_view
from xla_dtensor.compilation.call.arguments import Arguments
from xla_dtensor.compilation.call.recipes import (
    ArgumentContainer,
    ArgumentTensor,
    ComputedNumber,
    FixedObject,
    HostTensor,
    Leaf,
    LeafGradient,
    NewTensor,
    PendingNumber,
    PrintedText,
    Recipe,
    ViewRecipe,
)
from xla_dtensor.compilation.recorded.history import History, is_view_by_torch
from xla_dtensor.compilation.recorded.host_ops import HostOperations
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.storage import Storage
from xla_dtensor.forms.views import Step, ViewStep
from xla_dtensor.tensors.base import grad_of
from xla_dtensor.tensors.of_form import is_ours
from xla_dtensor.tensors.subclasses import is_shown, shown_class


class SupportsEmit(Protocol):
    """What this needs of a trace (`Traced`)."""

    trace: StepTrace
    host: HostOperations

    def emit(self, array: Any, form: Form) -> int:
        """Make an array an output; its index."""

    def template(self, tensor: Any) -> NewTensor:
        """An output that is the tensor's value; memory of its own."""


class OutputRecipes:
    """How later calls make the tensors that a step gives away: its results, and what it leaves in
    attributes and the like.

    Attributes:
        shown: the memory that the caller gets to see, by id: the templates with it.
    """

    def __init__(
        self, traced: SupportsEmit, arguments: Arguments, watch: Watch, history: History
    ) -> None:
        self._traced, self._trace = traced, traced.trace
        self._arguments, self._watch, self._history = arguments, watch, history
        self.shown: dict[int, list[NewTensor]] = {}
        self._wholes: dict[int, NewTensor] = {}
        self._known: dict[int, tuple[Any, Any]] = {}
        self._leaves: list[Any] = []
        self._items: dict[int, NewTensor] = {}

    def histories(self, values: Iterable[Any]) -> None:
        """Find those among ``values`` that have a history: others may show the same memory without
        it (``detach()``), and depend on them."""
        for value in values:
            given = is_ours(value) and value.requires_grad and not is_leaf(value)
            if given and self._trace.owns(value._storage_):
                self.tensor(value)

    def result(self, value: Any) -> Any:
        """How later calls make one of the step's results."""
        for i, tensor in enumerate(self._arguments.tensors):
            if tensor is value:
                return ArgumentTensor(i)
        position = self._arguments.position(value)
        if position is not None:
            return ArgumentContainer(position)
        if is_pending(value):
            return self.pending(value.node)
        if isinstance(value, torch.SymFloat | torch.SymInt):
            if not is_number(value):  # it has no present value: this raises
                value.node.guard_float("", 0)
            return ComputedNumber(value.node)
        if is_ours(value):
            return self.tensor(value)
        host = self._traced.host
        if isinstance(value, torch.Tensor) and host.made(value):
            known = self._known.get(id(value)) or (
                value,
                HostTensor(value, *host.given_away(value)),
            )
            self._known[id(value)] = known
            return known[1]
        return FixedObject(value)

    def value(self, value: Any) -> Any:
        """The same of a tensor of which only the value matters, and not the history."""
        return self._traced.template(value) if is_ours(value) else self.result(value)

    def tensor(self, value: Any) -> Any:
        """The same of a tensor on the devices."""
        known = self._known.get(id(value))
        if known is None:
            make = self._made_by_the_step if self._trace.owns(value._storage_) else self._outside
            known = self._known[id(value)] = value, make(value)
            if is_shown(value) and isinstance(known[1], NewTensor | ViewRecipe | Leaf):
                known[1].shown = shown_class(type(value))
        return known[1]

    def gradient(self, grad: Any, made: set[int]) -> Any:
        """The same of what a leaf's ``.grad`` is when the step ends.

        Args:
            made: the memory, by id, of what an optimizer has made and keeps.
        """
        if id(grad._storage_) in made:
            return FixedObject(grad)  # the state is the gradient; the next call is traced again
        if not self._trace.owns(grad._storage_):
            # Somebody's memory, which a backward pass has added to (``p.grad = buffer``).
            if id(grad) in self._watch.reached.tensors:
                return FixedObject(grad)
            base = self._base(grad)
            if base is not None:
                return self._view(grad, *base)
        known = self._known.get(id(grad))
        if known is not None and isinstance(known[1], NewTensor):
            return known[1]
        whole = None if grad._steps else self._wholes.get(id(grad._storage_))
        if whole is not None:
            return whole
        return self._traced.template(grad)

    def finish(self) -> None:
        """When all are known."""
        self._history.check_leaves(self._leaves)
        for templates in self.shown.values():
            if len(templates) > 1:
                for template in templates:
                    template.refuses = (
                        "results of a compiled step that are one memory under torch, but copies "
                        "here, because they aren't torch's own views of each other (to_local(), a "
                        "torch.autograd.Function that gives back its input): clone() the one that "
                        "you write to"
                    )

    def pending(self, node: Any) -> PendingNumber:
        """The same of a number that is known when the program has run."""
        for item in sorted(node.items - self._items.keys()):
            array, form = self._trace.items.arrays[item]
            self._items[item] = NewTensor(self._traced.emit(array, form), form)
        return PendingNumber(node, {item: self._items[item] for item in sorted(node.items)})

    @property
    def gives_items(self) -> bool:
        """Whether any such number is given away."""
        return bool(self._items)

    def printed(self, value: Any) -> Any:
        """How later calls make what the step prints (`Parts`)."""
        if not isinstance(value, Parts):
            return value
        return PrintedText(
            [
                part if isinstance(part, str) else (self._number(part.node), part.text)
                for part in value
            ]
        )

    def _number(self, node: Any) -> Recipe:
        return self.pending(node) if isinstance(node, PendingNode) else ComputedNumber(node)

    # --- memory of the step's ------------------------------------------------------------------

    def _made_by_the_step(self, value: Any) -> Any:
        storage = value._storage_
        if value.requires_grad and is_leaf(value):
            return self._leaf(value, self._copy(value))
        if value.requires_grad:
            root = value._base if is_view(value) else value
            further = _further(value, root)
            if further is None or not is_view_by_torch(value, root):
                root, further = value, ()
            template = self._with_history(root)
            return ViewRecipe(template, further, False, value) if root is not value else template
        if not _is_plain(value) and value._steps:
            return self._copy(value)
        # The tensor that autograd takes it for a view of; or itself.
        root = value._base if is_view(value) else None if value._steps else value
        if root is not None and (root._storage_ is not storage or root._steps):
            root = None
        if root is not None and id(storage) not in self._wholes:
            self._known[id(root)] = root, self._whole(storage)
        whole = self._whole(storage)
        connected = root is not None and self._known.get(id(root), (None, None))[1] is whole
        if connected and root is value:
            return whole
        return ViewRecipe(whole, value._steps, not connected, value)

    def _whole(self, storage: Storage) -> NewTensor:
        template = self._wholes.get(id(storage))
        if template is None:
            form = storage.form.reduced()
            index = self._traced.emit(logical(storage.array, storage.form), form)
            template = self._wholes[id(storage)] = NewTensor(index, form)
            self.shown.setdefault(id(storage), []).append(template)
        return template

    def _copy(self, value: Any) -> NewTensor:
        template = self._traced.template(value)
        self.shown.setdefault(id(value._storage_), []).append(template)
        return template

    def _with_history(self, root: Any) -> NewTensor:
        known = self._known.get(id(root))
        if known is not None and isinstance(known[1], NewTensor):
            return known[1]
        own = root._steps or is_view(root)
        template = self._copy(root) if own else self._whole(root._storage_)
        self._known[id(root)] = root, template
        if self._history.takes(root):
            self._history.add(template, root)
        return template

    def _leaf(self, value: Any, of: NewTensor | ViewRecipe) -> Leaf:
        leaf = Leaf(of, isinstance(value, torch.nn.Parameter))
        self._leaves.append(value)
        if grad_of(value) is not None:
            leaf.grad = self._traced.template(grad_of(value))
        return leaf

    # --- memory from outside -------------------------------------------------------------------

    def _outside(self, value: Any) -> Any:
        if id(value) in self._watch.reached.tensors:
            return FixedObject(value)
        if value.requires_grad and is_leaf(value):
            # A new leaf over an argument's memory: each call makes one over that call's argument.
            of = self._argument(value)
            if of is None:
                return FixedObject(value)
            further = value._steps[len(self._arguments.tensors[of]._steps) :]
            return self._leaf(value, ViewRecipe(of, further, True, value))
        for outside in self._trace.outside.values():
            leaf = outside.get()
            if leaf is not None and outside.takes_gradient and grad_of(leaf) is value:
                return LeafGradient(outside)
        found = self._base(value)
        if found is None and value.requires_grad:
            # A user's autograd function returned its input, with a gradient of its own.
            template = self._traced.template(value)
            template.refuses = _REFUSES_COPY
            if self._history.takes(value):
                self._history.add(template, value)
            return template
        return self._view(value, *(found or (value, value)))

    def _view(self, value: Any, of: Any, base: Any) -> ViewRecipe:
        """A view of what a later call finds by ``of``, which ``base`` is in this one."""
        detached = not value.requires_grad and (
            base.requires_grad
            or not (is_view(value) and any(value._base is t for t in (base, base._base)))
        )
        return ViewRecipe(of, value._steps[len(base._steps) :], detached, value)

    def _argument(self, value: Any) -> int | None:
        """The argument that shows the same memory, or most of it."""
        tensors = enumerate(self._arguments.tensors)
        found = [i for i, t in tensors if is_ours(t) and _further(value, t) is not None]
        steps = lambda i: len(self._arguments.tensors[i]._steps)
        return max(found, key=steps, default=None)

    def _base(self, value: Any) -> tuple[Any, Any] | None:
        """The tensor from outside that shows the same memory, or most of it: what finds it in a
        later call, and itself."""
        candidates = [(i, t) for i, t in enumerate(self._arguments.tensors) if is_ours(t)]
        given = {id(t._storage_) for _, t in candidates}
        kept = (outside.get() for outside in self._trace.outside.values())
        # Not views of arguments that the step has made: they are others in each call.
        candidates += [
            (t, t)
            for t in kept
            if is_ours(t) and (id(t) in self._watch.reached.tensors or id(t._storage_) not in given)
        ]
        best = None
        for of, tensor in candidates:
            if tensor is value or _further(value, tensor) is None:
                continue
            if value.requires_grad and not (
                tensor.requires_grad and is_view_by_torch(value, tensor)
            ):
                continue
            if best is None or len(tensor._steps) > len(best[1]._steps):
                best = of, tensor
        return best


_REFUSES_COPY = (
    "a result of a compiled step that is a copy of a tensor from outside, where torch has the same "
    "memory (of a torch.autograd.Function that gives back its input): clone() it first"
)


def _further(view: Any, base: Any) -> tuple[Step, ...] | None:
    """The steps from ``base`` to ``view``, or None if it doesn't show more of the same memory."""
    count = len(base._steps)
    if base._storage_ is not view._storage_ or view._steps[:count] != base._steps:
        return None
    return view._steps[count:]


def _is_plain(view: Any) -> bool:
    """Whether a view's memory can be a result of the program as it is."""
    form = view._storage_.form
    return not form.unreduced and all(isinstance(step, ViewStep) for step in view._steps)
