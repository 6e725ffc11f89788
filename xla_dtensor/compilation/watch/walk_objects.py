"""Modules, optimizers, classes and containers on the walk."""

from __future__ import annotations

import contextvars
import functools
import io
import itertools
import logging
import operator
import random
import threading
import types
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from xla_dtensor.compilation.code.reflection import CACHED, all_slots_of, dict_of
from xla_dtensor.compilation.objects.found import is_atom
from xla_dtensor.compilation.objects.places import (
    MISSING,
    Elements,
    Entries,
    Items,
    Slots,
    class_of_content,
)
from xla_dtensor.compilation.trace.stepped import ReadState
from xla_dtensor.compilation.watch.walk_called import WalkCalled
from xla_dtensor.tensors.base import OWN_ATTRIBUTES

# Of content beyond this the length is compared, and as many as SAMPLES: vocabularies, data sets.
MANY, SAMPLES = 10_000, 256
_LOCK = type(threading.Lock())
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
# What tells that the first parameter or submodule of a module matters, under whatever name.
_LISTS = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "named_")
    for name in ("parameters", "buffers", "modules", "children")
) | {"state_dict", "apply"}
_MODULE_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
)
_HOOK_FLAGS = (
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks_with_kwargs",
)
# What only code that saves or loads a module's state reads.
_SAVING = ("_state_dict_hooks", "_state_dict_pre_hooks")
_LOADING = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_MODULE_OWN = frozenset(nn.Module().__dict__) - {"training", "_forward_hooks", "_forward_pre_hooks"}
# What Python's import leaves in a module: through it one gets to everything.
_OF_IMPORT = frozenset({"__builtins__", "__loader__", "__spec__"})
_NOT_USERS = _MODULE_OWN | OWN_ATTRIBUTES


class WalkObjects(WalkCalled):
    """What is found in them; see `Watch`."""

    def _module(self, module: nn.Module, path: str) -> None:
        cls = type(module)
        self._note(path, "module", cls)
        self._typed.append(module)
        own = module.__dict__
        # ``Sequential.pop()`` gives the module another dict of submodules, a pickle all of them.
        self.live.append((operator.itemgetter(*_MODULE_PARTS, *_MODULE_HOOKS), own))
        lists_parts = self._asks_for_absent or not _LISTS.isdisjoint(self._names.attributes)
        for part in _MODULE_PARTS:
            inner = own.get(part)
            if inner or (inner is not None and lists_parts):
                place = Items(inner, path)
                self._place(place)
                place.carried = self._taken(place, inner)
                for name, value in inner.items():
                    if name not in place.carried:
                        self._walk(value, f"{path}.{name}")
                self._note(f"the order in {path}.{part}", "order", tuple(inner))
        tables = [*_MODULE_HOOKS]
        if "state_dict" in self._names.attributes:
            tables += _SAVING
            self._walk(own.get("_non_persistent_buffers_set"), f"{path}'s buffers to leave out")
        if "load_state_dict" in self._names.attributes:
            tables += _LOADING
        if any(map(own.get, _MODULE_HOOKS)):
            self._probe(f"how {path} calls its hooks", functools.partial(_hook_flags, own))
        for part in tables:
            hooks = own.get(part)
            if hooks is None:
                continue
            self._place(Items(hooks, f"{path}.{part}", with_keys=False))
            for number, hook in enumerate(hooks.values()):
                self._walk(hook, f"{path}.{part}[{number}]")
        if self._of_library(cls):
            names = [name for name in own if name not in _MODULE_OWN]
        else:
            names = [name for name in own if self._is_read(name) and name not in _MODULE_OWN]
            names += [n for n in ("_forward_hooks", "_forward_pre_hooks") if n not in names]
            self._slots(module, path)
        self._assigned(module, path, names)
        self._entries(own, names, path, module)
        self._class(cls)

    def _entries(self, own: dict[str, Any], names: list[str], path: str, owner: Any) -> None:
        for name in self._without_taken(Entries(own, names, path)):
            if name not in _MODULE_HOOKS and name in own:
                self._walk(own[name], f"{path}.{name}")

    def _without_taken(self, place: Entries | Slots) -> tuple[str, ...]:
        """Place those entries; the names of those that aren't carried."""
        taken = self._taken(place, place.keys)
        if taken:
            self._place(place.only(sorted(taken), guarded=False))
            place = place.only([name for name in place.keys if name not in taken])
        self._place(place)
        return place.keys

    def _assigned(self, owner: Any, path: str, read: list[str]) -> None:
        """Attributes that the code assigns without reading them."""
        names = [n for n in self._names.assigned - set(read) if n not in _NOT_USERS]
        own = dict_of(owner)
        if own is None:
            return
        if issubclass(type(owner), nn.Module):
            taken = set().union(*(own.get(p) or () for p in _MODULE_PARTS))
            names = [n for n in names if n not in taken]
        if not names:
            return
        # Not hasattr, which would run a user's __getattr__. A property keeps its value elsewhere.
        cls = type(owner)
        inherited = self._inherited.get(cls)
        if inherited is None:
            inherited = self._inherited[cls] = {
                n
                for base in cls.__mro__
                for n, value in vars(base).items()
                if hasattr(type(value), "__set__")
            }
        present = [n for n in sorted(names) if n in own or n not in inherited]
        if present:
            self._place(Entries(own, present, path, guarded=False))

    def _object(self, value: Any, path: str) -> None:
        if isinstance(value, Optimizer):
            self._optimizer(value, path)
            return
        if isinstance(value, ReadState):
            self._place(Slots(value.optimizer, ("state",), path))
            self._walk(value.optimizer.state, f"{path}.state")
            return
        if isinstance(value, threading.Event):
            self._event(value, path)
            return
        if isinstance(value, io.StringIO | io.BytesIO):
            self._text(value, path)
            return
        if isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            self._random_source(value, path)
            return
        if isinstance(value, contextvars.Context):
            self._note(path, "opaque", value)
            self.live += [(contextvars.Context.keys, value), (contextvars.Context.values, value)]
            for variable, held in value.items():
                self._walk(held, f"{path}[{variable.name}]")
            return
        if isinstance(value, DeviceMesh):
            self._note(path, "mesh", value)
            return
        if isinstance(value, LRScheduler):
            # Its own step changes it in every call; what counts is what the step's code reads.
            self._note(path, "opaque", value)
            read = self._names.attributes
            if "get_last_lr" in read:
                read = read | {"_last_lr"}
            names = [name for name in vars(value) if name in read]
            self._entries(vars(value), names, path, value)
            return
        self._plain_object(value, path)

    def _plain_object(self, value: Any, path: str) -> None:
        cls, own = type(value), dict_of(value)
        wrapped = (own or {}).get("__wrapped__")
        if wrapped is not None and self._of_library(cls):  # lru_cache, a compiled step
            self._note(path, cls)
            if cls is CACHED:
                self.caches.append((value, path))
            self._walk(wrapped, path)
            return
        if cls.__module__.startswith("xla_dtensor."):
            self._note(path, "opaque", value)  # what of it matters has guards of its own
        elif own is not None:
            self._note(path, "object", cls)
            self._typed.append(value)
            self._library_methods(cls)
            self._attributes(value, own, path)
            self._slots(value, path)
        elif getattr(cls, "__slots__", None) is not None and self._has_users_slots(value):
            self._note(path, "object", cls)
            self._slots(value, path)
        else:
            # Nothing is known of it but which one it is.
            self._note(path, "opaque", value)
            if isinstance(value, _LOCK):
                self.shared.append((value, path))
                if "locked" in self._names.attributes:
                    self._probe(f"{path}.locked()", value.locked)
            if isinstance(value, jax.Array):
                self.jax_arrays.add(id(value))
            if isinstance(value, Iterator):
                self.consumed.append((value, path))
        self._class(cls)

    def _slots(self, value: Any, path: str) -> None:
        """What an object holds in slots."""
        cls = type(value)
        has = self._has_users_slots(value)
        known = all_slots_of(cls) if has else ()  # type: ignore[arg-type]
        read = list(filter(self._is_read, known))
        if read:
            place = Slots(value, read, path)
            for name in self._without_taken(place):
                content = place.at(name)
                if content is not MISSING:
                    self._walk(content, f"{path}.{name}")
        assigned = [name for name in known if name in self._names.assigned and name not in read]
        if assigned:
            self._place(Slots(value, assigned, path, guarded=False))

    def _attributes(self, value: Any, own: dict[str, Any], path: str) -> None:
        names = list(filter(self._is_read, own))
        cls = type(value)
        if issubclass(cls, logging.Logger) and "handlers" not in self._names.attributes:
            # What only logging calls may count and collect: it logs when the step is traced.
            names = [name for name in names if name != "handlers"]
        if issubclass(cls, types.ModuleType):
            names = [n for n in names if n not in _OF_IMPORT or n in self._names.attributes]
            if isinstance(own.get("__getattr__"), types.FunctionType):
                names.append("__getattr__")
        if cls is types.SimpleNamespace or not any(map(self._of_library, cls.__mro__[:-1])):
            self._plain.add(id(own))
        self._assigned(value, path, names)
        self._entries(own, names, path, value)

    def _dict(self, value: Any, path: str) -> None:
        content = class_of_content(value).items(value)
        if len(content) > MANY:
            every = -(-len(content) // SAMPLES)
            some = [key for key, _ in itertools.islice(content, 0, None, every)]
            self._sampled(value, some, path)
            return
        self._note(path, type(value), tuple(k if is_atom(k) else id(k) for k, _ in content))
        place = Items(value, path)
        self._place(place)
        if isinstance(value, defaultdict):
            self._place(Slots(value, ("default_factory",), path))
            self._walk(value.default_factory, f"{path}.default_factory")
        place.carried = self._taken(place, [key for key, _ in content] if self._carried else ())
        for key, item in content:
            if key in place.carried:
                continue
            if not is_atom(key):
                self._walk(key, f"{path}'s key")
            self._walk(item, f"{path}[{key!r}]" if is_atom(key) else f"{path}[...]")
        if not self._of_library(type(value)):
            self._own_parts(value, path)

    def _sequence(self, value: Any, path: str) -> None:
        cls = class_of_content(value)
        length = cls.__len__(value)
        if length > MANY:
            some = range(0, length, -(-length // SAMPLES))
            self._sampled(value, some if isinstance(value, list | tuple) else (), path)
            return
        self._note(path, type(value), (length, getattr(value, "maxlen", None)))
        place = Elements(value, path)
        self._place(place)
        if isinstance(value, list | deque):
            place.carried = self._taken(place, range(length))
        for i, item in enumerate(cls.__iter__(value)):
            if i not in place.carried:
                self._walk(item, f"{path}[{i}]")
        if not self._of_library(type(value)):
            self._own_parts(value, path)

    def _sampled(self, value: Any, keys: Sequence[Any], path: str) -> None:
        """A container of which all would be too much: its length, and some of what it holds."""
        self._large.append(value)
        some: tuple[Any, ...] = ()
        if keys and type(value) in (list, tuple, dict):
            read = operator.itemgetter(*keys)
            self.live.append((read, value))
            some = tuple(each if is_atom(each) else id(each) for each in read(value))
        self._note(path, type(value), (id(value), len(value)))
        self._note(f"some of {path}", "value", some)

    def _of_tensor(self, tensor: torch.Tensor, path: str) -> None:
        """What the user has put on a tensor, or may, and what else code may ask of it that has no
        guard of its own."""
        own = vars(tensor)
        added = own.keys() - OWN_ATTRIBUTES
        names = [n for n in own if n in added and self._is_read(n)] if added else []
        if names or self._asks_for_absent:
            self._entries(own, names, path, tensor)
        if self._names.assigned:
            self._assigned(tensor, path, names)
        if "_version" in self._names.attributes and not tensor.is_inference():
            self._probe(f"{path}._version", lambda: tensor._version)
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu":
            self._probe(f"the form of {path}", lambda: (tensor.shape, tensor.dtype))
            if "requires_grad" in self._names.attributes:
                self._probe(f"{path}.requires_grad", lambda: tensor.requires_grad)


def _hook_flags(own: dict[str, Any]) -> list[Any]:
    """With what a module calls each of its hooks."""
    given = [own.get(name) or () for name in _HOOK_FLAGS]
    hooks = (key for name in _MODULE_HOOKS for key in own.get(name) or ())
    return [own.get("_is_full_backward_hook"), *([key in g for g in given] for key in hooks)]
