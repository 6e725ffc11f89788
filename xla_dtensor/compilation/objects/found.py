"""One item that a walk has found (`Found`), and whether two of them lead to the same program."""

from __future__ import annotations

import enum
import re
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
    re.Pattern,
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
    """One thing that the walk came by, which consists of others.

    Attributes:
        path: its name in messages.
        kind: what it is: its type, or a word.
        value: what tells two things of a kind apart.
    """

    __slots__ = ("kind", "path", "value")

    def __init__(self, path: str, kind: Any, value: Any) -> None:
        self.path, self.kind, self.value = path, kind, value

    def same(self, other: Found) -> bool:
        """Whether a program can't tell this from ``other``."""
        same_kind = self.kind is other.kind or bool(self.kind == other.kind)
        return same_kind and self._is_like(other.value)

    def _is_like(self, value: Any) -> bool:
        return self.value is value or bool(self.value == value)

    def text(self) -> str:
        """Its value, for a message."""
        if isinstance(self.kind, type):
            return f"a {self.kind.__name__}"
        return f"another {self.kind}"


class FoundValue(Found):
    """What is compared by value as a whole: an atom."""

    __slots__ = ()

    def _is_like(self, value: Any) -> bool:
        return same_atom(self.value, value)

    def text(self) -> str:
        return repr(self.value)


class FoundArray(Found):
    """An array or a buffer, by its content (`content_of`)."""

    __slots__ = ()

    def text(self) -> str:
        return f"an array of {self.value[1]}"


class FoundObject(Found):
    """What is known by which object it is, and no more."""

    __slots__ = ()

    def _is_like(self, value: Any) -> bool:
        return self.value is value


class FoundTensor(FoundObject):
    """A tensor."""

    __slots__ = ()

    def text(self) -> str:
        return f"a tensor {list(self.value.shape)}"


# By the word for the kind; of all others it is `Found`.
_CLASSES = {
    "value": FoundValue,
    "array": FoundArray,
    "tensor": FoundTensor,
    **dict.fromkeys(("opaque", "optimizer"), FoundObject),
}


def found_as(kind: Any, path: str, value: Any) -> Found:
    """What the walk came by, as the class for its kind."""
    # A user's metaclass may have made its classes unhashable.
    cls = _CLASSES.get(kind, Found) if type(kind) is str else Found
    return cls(path, kind, value)


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
