"""What is computed, in words that are the same in every process: of forms, views, arguments.

By them programs that are kept on disk are found (`runtime/kept/program.py`). What has no such words
is not described by what comes near: then there are none, and its program isn't kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch

from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.views import ViewStep
from xla_dtensor.lowering import ViewLowering, is_own
from xla_dtensor.lowering import changes as lowering_changes
from xla_dtensor.lowering.bounds import Condition
from xla_dtensor.lowering.registry import views

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), np.dtype, Enum),
    *(torch.dtype, torch.layout, torch.memory_format, torch.device),
)


class Unsaid(Exception):
    """Something has no words that are the same in every process."""


def of(value: Any) -> str:
    """The words of a value.

    Raises:
        Unsaid: it has none.
    """
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} ({', '.join(map(of, value))})"
    if isinstance(value, Form):
        return f"{of_values(value)} {value.stride} {value.offset} {value.meta}"
    if isinstance(value, ViewStep):
        return _of_fields(value)
    if isinstance(value, ViewLowering):
        return _of_view(value)
    if isinstance(value, Condition):
        return _of_fields(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    raise Unsaid(type(value))


def of_values(form: Form) -> str:
    """The words of what a form says of the values, whatever memory torch thinks they lie in.

    Raises:
        Unsaid: they are on a mesh.
    """
    if form.frame is not None or form.varying:
        raise Unsaid(form)
    return f"Form {form.shape} {form.jax_dtype} {form.memory}"


def joined(values: Iterable[Any]) -> str | None:
    """The words of several values; None if one has none."""
    try:
        return "; ".join(map(of, values))
    except Unsaid:
        return None


def _of_fields(value: Any) -> str:
    fields = (f.name for f in dataclasses.fields(value) if f.compare)
    said = (f"{name}={of(getattr(value, name))}" for name in fields)
    return f"{type(value).__name__} {' '.join(said)}"


_names: Cache[str, dict[ViewLowering, str]] = Cache("names of views", 1)
lowering_changes.listen(_names.clear)


def _of_view(lowering: ViewLowering) -> str:
    names = _names.get_or_make("all", lambda: {view: name for name, view in views().items()})
    name = names.get(lowering)
    if name is None or not (is_own(lowering.get) and is_own(lowering.put)):
        raise Unsaid(lowering)
    return name
