"""One item that a walk has found (`Found`), and whether two of them lead to the same program."""

from __future__ import annotations

import enum
import types
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base.tables.keys import exact
from xla_dtensor.compilation.code.identities import SameIdentity
from xla_dtensor.compilation.objects.places import MISSING

# Compared by value.
ATOMS = (
    int,
    float,
    complex,
    str,
    bytes,
    types.NoneType,
    types.EllipsisType,
    types.NotImplementedType,
    range,
    slice,
    enum.Enum,
    np.generic,
    np.dtype,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    Placement,
    type(MISSING),
)


_USUAL_ATOMS = frozenset({int, float, bool, str, types.NoneType})
_USUAL_OTHERS = frozenset({dict, list, set, types.FunctionType, torch.Tensor, torch.nn.Parameter})


def is_atom(value: Any) -> bool:
    """Whether a value is compared by value as a whole."""
    cls = type(value)
    if cls in _USUAL_ATOMS:
        return True
    if cls in _USUAL_OTHERS:
        return False
    if cls is tuple:
        return all(map(is_atom, value))
    if cls is slice:
        return all(map(is_atom, (value.start, value.stop, value.step)))
    # np.void, a row of a structured array, is a view of the array and so no value.
    return isinstance(value, ATOMS) and not isinstance(value, np.void)


def same_atom(a: Any, b: Any) -> bool:
    """Whether two atoms are the same for a program: of one type, 0.0 apart from -0.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(same_atom, a, b))
    return bool(exact(a) == exact(b))


class Found:
    """One thing that the walk came by.

    Attributes:
        path: its name in messages.
        kind: what it is: ``"value"``, ``"tensor"``, or the type of a thing that consists of others.
        value: the atom; the tensor; what else tells two things apart.
    """

    __slots__ = ("kind", "path", "value")

    def __init__(self, path: str, kind: Any, value: Any) -> None:
        self.path, self.kind, self.value = path, kind, value

    def same(self, other: Found) -> bool:
        """Whether a program can't tell this from ``other``."""
        if self.kind is not other.kind and self.kind != other.kind:
            return False
        if self.kind == "value":
            return same_atom(self.value, other.value)
        if self.kind == "array":
            return bool(self.value == other.value)
        if self.kind in ("opaque", "tensor", "optimizer"):
            return self.value is other.value
        return self.value is other.value or bool(self.value == other.value)

    def text(self) -> str:
        """Its value, for a message."""
        if self.kind == "value":
            return repr(self.value)
        if self.kind == "tensor":
            return f"a tensor {list(self.value.shape)}"
        if self.kind == "array":
            return f"an array of {self.value[1]}"
        if isinstance(self.kind, type):
            return f"a {self.kind.__name__}"
        return f"another {self.kind}"


def content_of(value: Any) -> tuple[Any, ...]:
    """The content of an array (or a row of one) or a buffer, to be compared: of one that holds
    objects, which."""
    if isinstance(value, np.ma.MaskedArray):
        text = f"{value.dtype} {list(value.shape)}, masked"
        mask = np.ma.getmaskarray(value).tobytes()
        return "ndarray", text, value.data.tobytes(), mask, repr(value.fill_value)
    if isinstance(value, np.ndarray):
        text = f"{value.dtype} {list(value.shape)}"
        if value.dtype.hasobject:
            return "ndarray", text, tuple(map(_content_of_one, value.ravel().tolist()))
        how = value.strides, value.flags.writeable
        return "ndarray", text, value.tobytes(), how
    if isinstance(value, np.void):
        return type(value).__name__, str(value.dtype), value.tobytes()
    if isinstance(value, memoryview):
        shown = value.format, value.shape, value.strides, value.readonly
        return "memoryview", f"{value.nbytes} bytes", value.tobytes(), shown
    code = getattr(value, "typecode", None)  # of an array.array
    content = bytes(value)
    return type(value).__name__, f"{len(content)} bytes", content, code


def _content_of_one(value: Any) -> Any:
    return exact(value) if is_atom(value) and not isinstance(value, slice) else SameIdentity(value)
