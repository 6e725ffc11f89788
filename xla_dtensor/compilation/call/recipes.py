"""Recipes: how each call makes a step's results, and what it leaves in attributes and lists."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.forms.form import Form
from xla_dtensor.forms.views import Step, ViewStep, is_at_traced


class Template:
    """A tensor that each call makes anew: output ``index`` in ``form``.

    Attributes:
        is_leaf: whether it requires grad, and has no history.
        is_parameter: whether it is an ``nn.Parameter``.
        grad: of a leaf, the template of its gradient.
        refuses: why it can't be written to, see `Storage.refuses_writes`.
    """

    __slots__ = ("form", "grad", "index", "is_leaf", "is_parameter", "refuses")

    def __init__(self, index: int, form: Form) -> None:
        self.index, self.form = index, form
        self.is_leaf = self.is_parameter = False
        self.grad: Template | None = None
        self.refuses: str | None = None


class PositionLeft(Exception):
    """A step gives away a view at a position that is one of its inputs."""


class Seen:
    """A tensor that shows memory of another one, as in torch: of one that each call makes, of an
    argument, or of one that is there.

    Attributes:
        of: the `Template`, the argument's index, or the tensor.
        detached: whether it is no view to autograd.
    """

    __slots__ = ("_further", "cls", "detached", "form", "of", "requires_grad", "steps")

    def __init__(self, of: Any, further: tuple[Step, ...], detached: bool, view: Any) -> None:
        self.of, self.detached, self.requires_grad = of, detached, view.requires_grad
        self.cls, self.form, self.steps = type(view), view._form, view._steps
        self._further = further
        if is_at_traced(self.steps):
            raise PositionLeft("the step gives away a view at a position that is a number")

    def made(self, base: Any) -> Any:
        """The view of ``base``."""
        detached = self.detached or (base.requires_grad and not self.requires_grad)
        tensor = base.detach() if detached else base
        if not all(isinstance(step, ViewStep) and step.op is not None for step in self._further):
            frame = base._storage_.form.frame
            base._storage_.introduce(base)
            tensor = self.cls(base._storage_, self.form.placed(frame), self.steps)
            base._storage_.share_writes(base, tensor)
            return tensor
        for step in self._further:
            tensor = step.of(tensor)  # type: ignore[union-attr]
        return torch.ops.aten.alias.default(base) if tensor is base else tensor


class Existing:
    """A result that is the same object in each call."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class GivenBack:
    """A result that is one of the arguments, the one with ``index``."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class GivenContainer:
    """A result that is one of the lists, dicts and the like among the arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Gradient:
    """A result that is the gradient which a leaf has after the call."""

    __slots__ = ("leaf",)

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf


class Computed:
    """A result, or what the step leaves somewhere, that is a Python number computed from numbers
    that are inputs."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"{self.node.value!r} ({self.node.text})"


class Host:
    """A result that is a CPU tensor which the step made.

    Attributes:
        source: where it comes from in the host's program; None for a constant.
        tensor: the constant, or None.
        of: the tensor from outside whose memory it shows, or None.
    """

    __slots__ = ("of", "source", "tensor")

    def __init__(self, tensor: torch.Tensor, source: Any, of: Any) -> None:
        self.tensor, self.source, self.of = tensor if source is None else None, source, of


class Built:
    """What the step leaves in an attribute, a list or a dict: parts like results, and how they make
    it up."""

    __slots__ = ("parts", "tree")

    def __init__(self, parts: list[Any], tree: Any) -> None:
        self.parts, self.tree = parts, tree

    def __repr__(self) -> str:
        part = self.parts[0] if len(self.parts) == 1 else None
        if isinstance(part, Template):
            return f"a tensor {list(part.form.shape)}"
        return "what each call makes anew"
