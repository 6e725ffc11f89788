"""Recipes: how each call makes a step's results, and what it leaves in attributes and lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base.numbers.pending_number import PendingNode
from xla_dtensor.base.torch_private import disable_function_of_subclasses
from xla_dtensor.base.torch_private.attributes import cpp_address
from xla_dtensor.compilation.call.run import Run
from xla_dtensor.compilation.objects.kinds_of_code import IteratorArgument
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.views import Step, ViewStep, is_at_traced
from xla_dtensor.tensors.of_form import new_tensor
from xla_dtensor.tensors.subclasses import show_as


class Recipe:
    """How each call makes one of a step's results, or a part of what it leaves somewhere."""

    __slots__ = ()

    def make(self, run: Run) -> Any:
        """The result of this call. What several recipes show is made once (`Run.made`)."""
        raise NotImplementedError

    def shape(self, arguments: Any) -> tuple[int, ...] | None:
        """The shape of what a call with ``arguments`` makes, if that is a tensor whose dims may be
        those of padded arguments (`call/buckets.py`)."""
        return None


class NewTensor(Recipe):
    """A tensor that each call makes anew: output ``index`` in ``form``.

    Attributes:
        refuses: why it can't be written to, see `Storage.refuses_writes`.
        shown: the user's subclass of ``torch.Tensor`` that it is of, if it is of one.
    """

    __slots__ = ("form", "index", "refuses", "shown")

    def __init__(self, index: int, form: Form) -> None:
        self.shown: Any = None
        self.index, self.form = index, form
        self.refuses: str | None = None

    def make(self, run: Run) -> Any:
        made = run.made
        tensor = made.get(id(self))
        if tensor is None:
            outputs, index = run.outputs, self.index
            array = run.arrays[outputs.position[index]]
            tensor = made[id(self)] = new_tensor(array, outputs.forms[index])
            tensor._storage_.refuses_writes = self.refuses
            if self.shown is not None:
                show_as(tensor, self.shown)
        return tensor

    def shape(self, arguments: Any) -> tuple[int, ...] | None:
        return tuple(self.form.shape)


class PositionLeft(Exception):
    """A step gives away a view at a position that is one of its inputs."""


class SharedRecipe(Recipe):
    """A recipe that several results, and what is left somewhere, may have: a call makes its object
    once."""

    __slots__ = ()

    def make(self, run: Run) -> Any:
        made = run.made.get(id(self))
        if made is None:
            made = run.made[id(self)] = self._make(run)
        return made

    def _make(self, run: Run) -> Any:
        raise NotImplementedError


class ViewRecipe(SharedRecipe):
    """A tensor that shows memory of another one, as in torch: of one that each call makes, of an
    argument, or of one that is there.

    Attributes:
        of: the `NewTensor`, the argument's index, or the tensor.
        detached: whether it is no view to autograd.
        shown: the user's subclass of ``torch.Tensor`` that it is of, if it is of one.
    """

    __slots__ = ("_further", "cls", "detached", "form", "of", "requires_grad", "shown", "steps")

    def __init__(self, of: Any, further: tuple[Step, ...], detached: bool, view: Any) -> None:
        self.of, self.detached, self.requires_grad = of, detached, view.requires_grad
        self.cls, self.form, self.steps = type(view), view._form, view._steps
        self._further, self.shown = further, None
        if is_at_traced(self.steps):
            raise PositionLeft("the step gives away a view at a position that is a number")

    def _make(self, run: Run) -> Any:
        with disable_function_of_subclasses():  # their __torch_function__ ran in the trace
            tensor = self._view(self._base(run))
        if self.shown is not None:
            show_as(tensor, self.shown)
        return tensor

    def _base(self, run: Run) -> Any:
        if isinstance(self.of, NewTensor):
            return self.of.make(run)
        return run.arguments.tensors[self.of] if isinstance(self.of, int) else self.of

    def _view(self, base: Any) -> Any:
        detached = self.detached or (base.requires_grad and not self.requires_grad)
        tensor = base.detach() if detached else base
        if not all(isinstance(step, ViewStep) and step.op is not None for step in self._further):
            frame = base._storage_.form.frame
            base._storage_.introduce(base)
            form = (self.form.anywhere() or self.form).placed(frame)
            tensor = self.cls(base._storage_, form, self.steps)
            base._storage_.share_writes(base, tensor)
            return tensor
        for step in self._further:
            tensor = step.of(tensor)  # type: ignore[union-attr]
        return torch.ops.aten.alias.default(base) if tensor is base else tensor

    def shape(self, arguments: Any) -> tuple[int, ...] | None:
        return tuple(self.form.shape)


class Leaf(SharedRecipe):
    """A tensor that requires grad and has no history.

    Attributes:
        of: the recipe of its memory, which no other result has.
        is_parameter: whether it is an ``nn.Parameter``.
        grad: the template of its gradient.
        shown: the user's subclass of ``torch.Tensor`` that it is of, if it is of one.
    """

    __slots__ = ("grad", "is_parameter", "of", "shown")

    def __init__(self, of: NewTensor | ViewRecipe, is_parameter: bool) -> None:
        self.of, self.is_parameter = of, is_parameter
        self.grad: NewTensor | None = None
        self.shown: Any = None

    def _make(self, run: Run) -> Any:
        tensor = self.of.make(run).requires_grad_()
        if self.is_parameter:
            tensor = torch.nn.Parameter(tensor.detach())
        if self.grad is not None:
            tensor.grad = self.grad.make(run)
        if self.shown is not None:
            show_as(tensor, self.shown)
        return tensor

    def shape(self, arguments: Any) -> tuple[int, ...] | None:
        return self.of.shape(arguments)


class FixedObject(Recipe):
    """A result that is the same object in each call."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def make(self, run: Run) -> Any:
        return self.value

    def shape(self, arguments: Any) -> tuple[int, ...] | None:
        return tuple(self.value.shape) if isinstance(self.value, torch.Tensor) else None


class ArgumentTensor(Recipe):
    """A result that is one of the arguments, the one with ``index``."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def make(self, run: Run) -> Any:
        return run.arguments.tensors[self.index]

    def shape(self, arguments: Any) -> tuple[int, ...] | None:
        known = self.index < len(arguments.tensors)  # carried state comes behind the arguments
        return tuple(arguments.tensors[self.index].shape) if known else None


class ArgumentContainer(Recipe):
    """A result that is one of the lists, dicts and the like among the arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def make(self, run: Run) -> Any:
        found = run.arguments.containers[self.index]
        return found.iterator if type(found) is IteratorArgument else found


class LeafGradient(Recipe):
    """A result that is the gradient which a leaf has after the call."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf

    def make(self, run: Run) -> Any:
        return self.leaf.of(run.arguments).grad


class ComputedNumber(Recipe):
    """A result, or what the step leaves somewhere, that is a Python number computed from numbers
    that are inputs."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node

    def make(self, run: Run) -> Any:
        return self.node.compute(run.prepared.numbers)

    def __repr__(self) -> str:
        return f"{self.node.value!r} ({self.node.text})"


class PendingNumber(Recipe):
    """A result, or what the step leaves somewhere, that is a Python number computed from items of
    tensors that the program gives (``loss.item()``), and from numbers that are inputs.

    Attributes:
        items: the items' tensors, by number.
        text: how it is written, for messages.
    """

    __slots__ = ("_compute", "items", "text")

    def __init__(self, node: PendingNode, items: dict[int, NewTensor]) -> None:
        self._compute, self.text, self.items = node.compute, node.text, items

    def make(self, run: Run) -> Any:
        values: list[Any] = [None] * (1 + max(self.items))
        for item, tensor in self.items.items():
            values[-1 - item] = tensor.make(run).item()
        return self._compute([*run.prepared.numbers, *values])

    def __repr__(self) -> str:
        return f"{self.text}, a number that each call computes"


class PrintedText(Recipe):
    """Text for people with numbers of a call: one that is printed alone is no text yet.

    Attributes:
        parts: texts, and numbers with what makes their text.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: list[str | tuple[Recipe, Callable[[Any], str] | None]]) -> None:
        self.parts = parts

    def make(self, run: Run) -> Any:
        if len(self.parts) == 1 and not isinstance(self.parts[0], str):
            return self.parts[0][0].make(run)
        return "".join(
            part if isinstance(part, str) else (part[1] or str)(part[0].make(run))
            for part in self.parts
        )


class HostTensor(SharedRecipe):
    """A result that is a CPU tensor which the step made.

    Attributes:
        tensor: the constant, or None.
        read: gives it from the arguments and what the host's program has computed; None for a
            constant.
        of: the tensor from outside whose memory it shows, or None.
        has_history: whether it has one under torch.
    """

    __slots__ = ("has_history", "of", "read", "tensor")

    def __init__(
        self, tensor: torch.Tensor, read: Callable[[Any, Any], torch.Tensor] | None, of: Any
    ) -> None:
        self.tensor, self.read, self.of = tensor if read is None else None, read, of
        self.has_history = tensor.grad_fn is not None

    def _make(self, run: Run) -> Any:
        tensor = self._tensor(run)
        if self.has_history:
            return _WithoutHistory.apply(tensor, torch.empty(0, requires_grad=True))
        return tensor

    def shape(self, arguments: Any) -> tuple[int, ...] | None:
        return None if self.tensor is None else tuple(self.tensor.shape)

    def _tensor(self, run: Run) -> torch.Tensor:
        """Results that share memory under torch do so here."""
        like = self.tensor
        if like is not None:
            memory = like.untyped_storage()
            address = cpp_address(memory)
            if address not in run.made:
                run.made[address] = memory.clone()
            where = like.storage_offset(), like.shape, like.stride()
            return torch.empty(0, dtype=like.dtype).set_(run.made[address], *where)
        assert self.read is not None
        made = self.read(run.arguments, run.prepared.host)
        if self.of is None:
            return made
        whole = self.of.read(run.arguments)
        if cpp_address(made.untyped_storage()) == cpp_address(whole.untyped_storage()):
            return made
        # The host's program writes to a copy of the argument: show the same part of the argument.
        whole, start = whole.view(made.dtype), made.storage_offset()
        return whole.as_strided(made.shape, made.stride(), whole.storage_offset() + start)


class _WithoutHistory(torch.autograd.Function):
    """Gives a CPU tensor the look of one with a history, through which there is no way back."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise DataDependentError(
            "backward() through a CPU tensor that a compiled step has returned: its history isn't "
            "kept; call backward() in the step, or compute it on the devices"
        )


class BuiltObject(SharedRecipe):
    """What the step leaves in an attribute, a list or a dict: parts like results, and how they make
    it up."""

    __slots__ = ("parts", "tree")

    def __init__(self, parts: list[Recipe], tree: Any) -> None:
        self.parts, self.tree = parts, tree

    def _make(self, run: Run) -> Any:
        return self.tree.build([part.make(run) for part in self.parts], run.objects)

    def __repr__(self) -> str:
        part = self.parts[0] if len(self.parts) == 1 else None
        if isinstance(part, NewTensor):
            return f"a tensor {list(part.form.shape)}"
        return "what each call makes anew"
