"""Functions such as ``getattr`` that read more than their arguments, recognised by identity.

Where code calls one by its own name, the instructions around the name say what it reads
(`code/names.py:names_of`). Where it has another name (``look = getattr`` in a closure, an
argument's default, ``partial(getattr, x)``, a table of functions), the walk comes by the function
itself.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import decimal
import functools
import gc
import importlib
import inspect
import json
import operator
import os
import pickle
import sys
import types
import typing
from typing import Any

import torch

from xla_dtensor.compilation.code.names import (
    CALLED_BY,
    ENVIRONMENT,
    EVALUATES,
    MADE_UP,
    MODULES,
    TABLES,
    Names,
)
from xla_dtensor.compilation.objects.settings import NAMED

_HOMES: tuple[Any, ...] = (
    *(builtins, copy, dataclasses, decimal, gc, importlib, inspect, json, operator, os, os.path),
    *(pickle, sys, torch, typing),
)
_NAMES = {*CALLED_BY, *MADE_UP, *MODULES, *ENVIRONMENT, *EVALUATES, *TABLES, *NAMED}
_NAMES |= {"type", "id", "next"}
# The functions are kept alive, so that their ids stay theirs if somebody replaces one.
_READERS = {
    id(function): (name, function)
    for home in _HOMES
    for name in _NAMES
    if callable(function := vars(home).get(name))
}


def reader(value: Any) -> str | None:
    """The name that a function has of its own, if it reads more than it is given."""
    known = _READERS.get(id(value))
    if known is not None:
        return known[0]
    if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
        own, name = value.__self__, value.__name__
        if isinstance(own, str) and name in ("format", "__mod__"):
            return "format"
        if name == "__getattribute__":
            return "getattr"
    return None


@functools.lru_cache(maxsize=256)
def names_of_reader(name: str) -> Names:
    """The `Names` of code that calls the function ``name``, where it isn't known with what."""
    return Names(
        attributes={*CALLED_BY.get(name, ())},
        any_attribute=name in MADE_UP,
        any_module=name in MODULES,
        others_globals=name in EVALUATES or name in TABLES,
        environment=name in ENVIRONMENT,
    )


class ReadsMore(BaseException):
    """A step reads attributes of tensors among its arguments that it wasn't known to read: the call
    has another key. No error of the step's.

    Attributes:
        reads: the names of attributes that it reads; None: it may read any.
        watch: what has found that, where a further trace's walk may begin.
    """

    def __init__(self, reads: frozenset[str] | None) -> None:
        self.reads = reads
        self.watch: Any = None
