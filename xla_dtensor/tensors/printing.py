"""``repr`` of tensors: the values as torch prints them, and their mesh and placements.

Of a large tensor torch prints the elements at the edges. Only they leave the devices: a CPU tensor
with the same edges, and little between them, is printed in its place.
"""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_dtensor.base import assertions, executor
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.base.torch_private import (
    SUBCLASSES_DISPATCH,
    disable_current_modes,
    disable_function_of_subclasses,
    tensor_str,
)
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import fetch, to_host
from xla_dtensor.forms.per_device import logical
from xla_dtensor.forms.read import read
from xla_dtensor.forms.sharing import launching
from xla_dtensor.runtime import arrays

_readers: Cache[tuple[Form, tuple[int, ...]], Any] = Cache("readers of edges", 256)


def text_of(tensor: Any, name: str, more: list[str]) -> str:
    """The ``repr`` of an xla tensor of class ``name``.

    Args:
        more: where it is, behind the values.

    Returns:
        torch's format, in which a tensor that has no values (on the meta device, in a compiled
        step) or another on each device has its shape and dtype instead.
    """
    form = tensor._form
    known = has_text(tensor, sys._getframe(1))
    parts = []
    if not known:
        parts += [f"shape={list(tensor.shape)}", f"dtype={tensor.dtype}"]
    elif _is_large(tensor):
        parts.append(f"shape={list(tensor.shape)}")
    if form.varying:
        parts.append(f"varying along {', '.join(form.varying)}")
    parts += more
    if tensor.grad_fn is not None:
        parts.append(f"grad_fn=<{_name_of(tensor.grad_fn)}>")
    elif tensor.requires_grad:
        parts.append("requires_grad=True")
    if not known:
        return f"{name}({', '.join(parts)})"
    return _with_parts(f"{name}({_values(tensor, len(name))}", parts, len(name) + 1)


def has_text(tensor: Any, frame: FrameType) -> bool | None:
    """Whether text of a tensor, which is asked for in ``frame``, shows its values
    (`base.executor.Executor.has_text`)."""
    form = tensor._form
    if form.meta:
        return False
    known = executor.current().has_text(tensor, frame)
    return known and (not form.varying or form.has_own_value)


def _with_parts(text: str, parts: list[str], indent: int) -> str:
    """``text`` with what stands behind the values, in lines that are no longer than torch's if the
    values take several."""
    if "\n" not in text:
        return f"{', '.join([text, *parts])})"
    width = len(text) - text.rfind("\n") - 1
    for part in parts:
        if width + len(part) + 3 > tensor_str.PRINT_OPTS.linewidth:
            text += ",\n" + " " * indent + part
            width = indent + len(part)
        else:
            text += ", " + part
            width += len(part) + 2
    return text + ")"


def _name_of(node: Any) -> str:
    name = type(node).__name__  # of a function in C++ its name, for which all have one class
    return node.name().rpartition("::")[2] if name == "CppFunction" else name


def shows_values() -> None:
    """Text of values is made, which is another one with other print options."""
    of_options = "torch.get_printoptions()", lambda found, left: False
    executor.current().depends_on(print_options, *of_options)


def print_options() -> dict[str, Any]:
    """How torch prints tensors."""
    return dict(vars(tensor_str.PRINT_OPTS))


def _is_large(tensor: Any) -> bool:
    return tensor.numel() > tensor_str.PRINT_OPTS.threshold


def _values(tensor: Any, name_length: int) -> str:
    shows_values()
    # Modes of the user's see nothing of it. Where torch needs a mode to come to us, all stay.
    hides = SUBCLASSES_DISPATCH and executor.current().has_values
    unseen = disable_current_modes() if hides else nullcontext()
    with unseen, torch.no_grad(), disable_function_of_subclasses():
        if not executor.current().has_values:  # a step's trace sees what it shows
            with executor.current().recording():
                text = repr(executor.current().on_host(tensor.detach()))
        elif _is_large(tensor) and not tensor._form.varying:
            # The stand-in has few elements: torch is to abbreviate it all the same.
            with tensor_str.printoptions(threshold=0):
                text = repr(_edges(tensor))
        else:
            text = repr(tensor.detach().cpu())
    lines = text.removeprefix("tensor(").removesuffix(")").split("\n")
    indent = " " * (name_length - len("tensor"))
    return "\n".join([lines[0], *(indent + line if line else line for line in lines[1:])])


def _edges(tensor: Any) -> torch.Tensor:
    """A CPU tensor that is printed like ``tensor`` where only the edges are."""
    edge = max(int(tensor_str.PRINT_OPTS.edgeitems), 1)
    # One more than the edges: torch abbreviates a dim of more than 2 * edgeitems.
    kept = [
        np.array(
            [*range(edge + 1), *range(size - edge, size)] if size > 2 * edge + 1 else range(size)
        )
        for size in tensor.shape
    ]
    form = tensor._form
    reader = _readers.get_or_make(
        (form, tuple(map(len, kept))), lambda: jax.jit(functools.partial(_take, form=form))
    )
    assertions.look()  # a value is read
    arrays.about_to_read(tensor._storage_.array, f"a tensor of shape {list(form.shape)}")
    with launching(), jax.enable_x64(True):
        taken = reader(read(tensor), kept)
    return to_host(fetch(taken, tuple(taken.shape)))


def _take(array: Any, kept: list[Any], form: Form) -> Any:
    value = logical(array, form)
    for dim, positions in enumerate(kept):
        if len(positions) < form.shape[dim]:
            value = jnp.take(value, positions, axis=dim)
    return value
