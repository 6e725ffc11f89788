"""Whether a leaf's gradient is what it was."""

from __future__ import annotations

from typing import Any


class Layout:
    """What a program needs to know of a gradient that it has found; a view can only be itself."""

    __slots__ = ("cls", "form", "view")

    def __init__(self, grad: Any) -> None:
        self.cls, self.form = type(grad), grad._form
        self.view = grad if grad._steps else None


def same_grad(now: Any, before: Layout | None) -> bool:
    if now is None or before is None:
        return now is before
    if now._steps or before.view is not None:
        return now is before.view
    return type(now) is before.cls and now._form is before.form


def grad_text(leaf: Any, before: Any) -> str:
    def text(grad: Any) -> str:
        return "None" if grad is None else "a tensor"

    if (leaf.grad is None) == (before is None):
        return f"the layout of the .grad of a parameter of shape {list(leaf.shape)}"
    return (
        f"the .grad of a parameter of shape {list(leaf.shape)}: from {text(before)} to "
        f"{text(leaf.grad)}"
    )
