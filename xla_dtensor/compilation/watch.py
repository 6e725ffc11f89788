"""What a step's Python can read: found from its code, compared before each call.

From the function (and what else the step is known to use) the watch follows what the code names:
closure cells, globals, defaults, attributes, elements of lists and dicts, the code of the functions
it meets, modules with their parameters and hooks. Numbers and strings are compared by value,
tensors by identity, and everything else by what it consists of.

Comparing is one loop in C over the identity of everything that was found. Only when that finds a
difference is the walk made again, and what it finds compared by value: a list made anew with the
same content is no change.
"""

from __future__ import annotations

import abc
import array
import contextvars
import enum
import functools
import gc
import itertools
import operator
import os
import random
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from xla_dtensor.compilation.carried import Carried, is_state, parts_of
from xla_dtensor.compilation.code_names import (
    Names,
    describe,
    is_library,
    is_library_class,
    names_of,
)
from xla_dtensor.compilation.found import Found, content_of, is_atom
from xla_dtensor.compilation.identities import identities
from xla_dtensor.compilation.objects import attributes_of, is_record
from xla_dtensor.compilation.optimizers import SteppedOptimizer
from xla_dtensor.compilation.places import MISSING, Elements, Entries, Items, Place, Slots
from xla_dtensor.compilation.reflection import (
    DESCRIPTORS,
    code_of,
    dict_of,
    is_callable,
    is_strict,
    referent,
    registered_with,
    slots_of,
    subclasses,
)
from xla_dtensor.tensors.base import OWN_ATTRIBUTES

# Content beyond this is compared by length: vocabularies, data sets.
MANY = 10_000

# Methods that torch and Python call under no name in the user's code.
_CALLED_BY_TORCH = {"forward", "backward", "setup_context", "jvp", "training", "__wrapped__"}

_NEVER_CALLED = {
    *("__del__", "__repr__", "__str__", "__format__", "__reduce__"),
    *("__reduce_ex__", "__getstate__", "__setstate__", "__init_subclass__"),
    *("__hash__", "__dir__", "__sizeof__", "__deepcopy__", "__copy__", "__doc__", "__module__"),
}

_MODULE_PARTS = ("_parameters", "_buffers", "_modules")

_MODULE_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
)

_MODULE_OWN = frozenset(nn.Module().__dict__) - {"training", "_forward_hooks", "_forward_pre_hooks"}

_Iterators: tuple[type, ...] = (
    types.GeneratorType,
    *(map, zip, filter, enumerate, itertools.chain, itertools.count, itertools.cycle),
    *(type(iter([])), type(iter(())), type(iter({})), type(iter(range(0))), type(iter(set()))),
)

_TABLES: tuple[Any, ...] = ({}, OrderedDict())

_VIEWS = frozenset(
    type(view) for table in _TABLES for view in (table.keys(), table.values(), table.items())
)

_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)


class Watch:
    """What can be read from ``roots``, pairs of a name for messages and a thing.

    Args:
        carried: what the step keeps from one call to the next and replaces, as messages call it:
            each call takes it from there (`Carried`).

    Attributes:
        places: every container on the way.
        tensors: the tensors found, by id, with their paths.
        arrays: the NumPy arrays and buffers found, with their content.
        consumed: iterators found, with their paths: the step mustn't take from them.
        random_sources: generators of random numbers that the step may draw from.
        optimizers: the optimizers found, by id.
        settings: the entries of their param groups that the code names: (``id`` of the group, key).
        carried: the places found of those that each call takes its values from.
        inside: the lists, dicts and objects that are part of what is there (`Place.container`).
    """

    def __init__(self, roots: list[tuple[str, Any]], carried: frozenset[str] = frozenset()) -> None:
        self._carried = carried
        self._names = Names(attributes=set(_CALLED_BY_TORCH))
        self._library_reads: set[str] = set()
        self._odd_classes: dict[type, bool] = {}
        self._slot_names: dict[type, list[str]] = {}
        self._seen: dict[int, tuple[Any, str]] = {}
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        while True:
            before = self._size()
            self._start()
            for path, value in roots:
                self._walk(value, path)
            if self._size() == before:
                break
        for namespace, names in self._globals.values():
            self._globals_place(namespace, names)
        self._global_hooks()
        if self._names.environment:
            self._place(Items(os.environ._data, "os.environ"))  # type: ignore[attr-defined]
            for key, value in os.environ.items():
                self._note(f"os.environ[{key!r}]", "value", value)
        self._seen, self._odd_classes, self._slot_names = {}, {}, {}
        self._arm()

    @property
    def reads(self) -> set[str]:
        """The names of all attributes that the step's code reads."""
        return self._names.attributes

    @property
    def takes_next(self) -> bool:
        """Whether the step's code calls ``next``."""
        return any("next" in names for _, names in self._globals.values())

    def assigned_in(self, place: Place) -> set[str] | None:
        """The names of attributes that the step's code may assign in a place; None for any."""
        if place.container not in self._plain or self._names.any_attribute:
            return None
        if any("setattr" in names or "delattr" in names for _, names in self._globals.values()):
            return None
        return self._names.assigned

    def _size(self) -> tuple[int, ...]:
        names = self._names
        return (
            len(names.attributes),
            len(names.assigned),
            len(self._library_reads),
            sum(len(found) for _, found in self._globals.values()),
        )

    def _start(self) -> None:
        self.places: list[Place] = []
        self.carried: list[Carried] = []
        self.inside: set[int] = set()
        self._plain: set[int] = set()  # the attributes of objects that no library's code changes
        self.settings: set[tuple[int, str]] = set()
        self.found: list[Found] = []
        self.tensors: dict[int, tuple[torch.Tensor, str]] = {}
        self.arrays: list[tuple[Any, Any]] = []
        self.random_sources: list[Any] = []
        self.optimizers: dict[int, Optimizer] = {}
        self._typed: list[Any] = []
        self.probes: list[tuple[Any, Any]] = []
        self._large: list[Any] = []
        self._seen = {}
        self._placed_globals: set[int] = set()
        self._seen_classes: set[type] = set()
        self.consumed: list[tuple[Any, str]] = []
        self._used_paths: dict[str, int] = {}

    # --- the walk -----------------------------------------------------------------------------

    def _note(self, path: str, kind: Any, value: Any = None) -> None:
        # Two closures may both have a cell called "model".
        count = self._used_paths[path] = self._used_paths.get(path, 0) + 1
        self.found.append(Found(path if count == 1 else f"{path} ({count})", kind, value))

    def _walk(self, value: Any, path: str) -> None:
        cls = type(value)
        odd = self._odd_classes.get(cls)
        if odd is None:
            odd = self._odd_classes[cls] = cls in _PROXIES or is_strict(cls)
        if odd:
            if cls in _PROXIES:
                self._walk(referent(value), path)
            elif id(value) not in self._seen:
                self._seen[id(value)] = value, path
                self._plain_object(value, path)
            return
        if is_atom(value):
            self._note(path, "value", value)
            if not is_library_class(type(value)):  # an enum, a named tuple: it may have methods
                self._own_parts(value, path)
            return
        seen = self._seen.get(id(value))
        if seen is not None:
            self._note(path, "same as", seen[1])
            return
        self._seen[id(value)] = value, path
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value, path
            self._note(path, "tensor", value)
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                # Which hooks there are the step's guards know; here it is what they read.
                for number, hook in enumerate((getattr(value, name, None) or {}).values()):
                    self._walk(hook, f"{path}.{name}[{number}]")
            own = vars(value)
            names = [n for n in own if n not in OWN_ATTRIBUTES and self._is_read(n)]
            if names:  # what the user has put on it
                self._entries(own, names, path, value)
            return
        if isinstance(value, np.ndarray | bytearray | memoryview | array.array):
            content = content_of(value)
            self.arrays.append((value, content))
            self._note(path, "array", content)
            return
        self._walk_parts(value, path)

    def _own_parts(self, value: Any, path: str) -> None:
        """The methods and attributes of an object of a user's class, apart from its content."""
        own = dict_of(value)
        if own:
            self._entries(own, [n for n in own if self._is_read(n) or n == "_value_"], path, value)
        self._slots(value, path)
        self._class(type(value))

    def _walk_parts(self, value: Any, path: str) -> None:
        cls = type(value)
        if isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.MethodType):
            self._note(path, cls)
            self._walk(value.__func__, path)
            self._walk(value.__self__, f"{path}.__self__")
        elif isinstance(value, functools.partial):
            self._note(path, cls)
            self._place(Slots(value, ("func", "args", "keywords"), path))
            self._walk(value.func, f"{path}.func")
            self._walk(value.args, f"{path}.args")
            self._walk(value.keywords, f"{path}.keywords")
        elif isinstance(value, staticmethod | classmethod):
            self._walk(value.__func__, path)
        elif isinstance(value, property):
            self._walk(value.fget, path)
        elif isinstance(value, functools.cached_property | functools.partialmethod):
            self._walk(value.func, path)
        elif isinstance(value, functools.singledispatchmethod):
            self._walk(value.func, path)
            self._walk(value.dispatcher, path)
        elif isinstance(value, contextvars.ContextVar):
            self._note(path, "opaque", value)
            content = value.get(MISSING)
            self.probes.append((functools.partial(value.get, MISSING), content))
            self._walk(content, f"{path}.get()")
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            self._note(path, "value", repr(value))
            self._names.attributes |= set(re.findall(r"\w+", repr(value)))
        elif isinstance(value, nn.Module):
            self._module(value, path)
        elif isinstance(value, type):
            self._note(path, "class", value)
            self._class(value)
            self._class(type(value))
            if isinstance(value, abc.ABCMeta):
                self._registry(value, path)
            if issubclass(value, enum.Enum):
                for name, member in value.__members__.items():
                    self._walk(member, f"{path}.{name}")
        elif isinstance(value, types.ModuleType):
            self._note(path, "Python module", value)
            if not is_library(value.__name__):
                self._attributes(value, vars(value), path)
            else:  # somebody may put another function into it
                names = sorted(self._names.attributes & vars(value).keys())
                self._place(Entries(vars(value), names, path))
                for name in names:
                    self._in_library(vars(value)[name], f"{path}.{name}")
        elif isinstance(value, types.CellType):
            self._cell(value, path)
        elif isinstance(value, dict | types.MappingProxyType):
            self._dict(value, path)
        elif cls in _VIEWS:
            self._note(path, cls)
            for table in gc.get_referents(value):
                self._walk(table, path)
        elif isinstance(value, threading.local):
            self._thread_local(value, path)
        elif isinstance(value, types.BuiltinMethodType):  # table.get
            self._note(path, "opaque", value.__name__)
            if not isinstance(value.__self__, types.ModuleType | type):
                self._walk(value.__self__, f"{path}.__self__")
        elif isinstance(value, weakref.ref):
            self._note(path, "opaque", value)
            self._walk(value(), f"{path}()")
        elif isinstance(value, list | tuple | set | frozenset | deque):
            self._sequence(value, path)
        elif isinstance(value, _Iterators):
            self._note(path, "opaque", value)
            self.consumed.append((value, path))
        elif isinstance(value, SteppedOptimizer):
            self._stepped(value, path)
        elif isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
            self.random_sources.append(value)
            self._note(path, "random generator", value)
        else:
            self._object(value, path)

    def _in_library(self, value: Any, path: str) -> None:
        """What a library's module has under a name that the code reads."""
        own = isinstance(value, types.FunctionType) and not is_library(value.__module__)
        if own or isinstance(value, types.ModuleType):
            self._walk(value, path)
        else:
            self._note(path, "value" if is_atom(value) else "opaque", value)

    def _registry(self, cls: abc.ABCMeta, path: str) -> None:
        """Which classes have been registered with an abstract one."""
        token = abc.get_cache_token()
        self.probes.append((lambda: abc.get_cache_token() == token, True))
        registered = {ref for each in (cls, *subclasses(cls)) for ref in registered_with(each)}
        self._note(f"{path}'s registry", "registry", registered)

    def _thread_local(self, local: threading.local, path: str) -> None:
        """What it holds in this thread; each has a dict of its own."""
        self._note(path, "object", type(local))
        own = vars(local)
        self.probes.append((functools.partial(vars, local), own))
        self._entries(own, list(filter(self._is_read, own)), path, local)
        self._class(type(local))

    def _place(self, place: Place) -> None:
        self.places.append(place)

    def _taken(self, place: Place, keys: Iterable[Any]) -> frozenset[Any]:
        """Those of a place's keys whose values each call takes from there."""
        if not self._carried:
            return frozenset()
        taken = [
            key for key in keys if place.label(key) in self._carried and is_state(place.at(key))
        ]
        for key in taken:
            self.carried.append(Carried(place, key))
            self._inside(place.at(key), place.label(key))
        return frozenset(taken)

    def _inside(self, value: Any, path: str) -> None:
        """The lists, dicts and records in what a call takes like an argument: the step mustn't
        change them, since it is given others in the next call."""
        for name, inner in parts_of(value):
            self._inside(inner, f"{path}{name}")
        if not is_library_class(type(value)):  # its methods may be called
            self._class(type(value))
        place: Place
        if isinstance(value, list):
            place = Elements(value, path, guarded=False)
        elif isinstance(value, dict):
            place = Items(value, path, guarded=False)
        elif is_record(value) and hasattr(value, "__dict__"):
            place = Entries(vars(value), vars(value), path, guarded=False)
        elif is_record(value):
            place = Slots(value, attributes_of(value) or (), path, guarded=False)
        else:
            return
        self._place(place)
        self.inside.add(place.container)

    def _function(self, function: types.FunctionType, path: str) -> None:
        code = function.__code__
        self._note(path, "function", code)
        module = function.__globals__.get("__name__")
        if module is not None and module.startswith("xla_dtensor."):
            return  # our own hooks: what they depend on has guards of its own
        library = is_library(module)
        if not library:
            names = names_of(code)
            self._names.update(names)
            self._place(Slots(function, ("__code__", "__defaults__", "__kwdefaults__"), path))
            namespace = function.__globals__
            _, known = self._globals.setdefault(id(namespace), (namespace, set()))
            known |= names.globals
            if id(namespace) not in self._placed_globals:
                # Once a walk: by then earlier walks have said which names matter.
                self._placed_globals.add(id(namespace))
                taken = self._taken(Entries(namespace, (), "", guarded=False), sorted(known))
                for name in sorted((known & namespace.keys()) - taken):
                    self._walk(namespace[name], name)
            for name in names.modules:
                self._imported(name)
            for name, default in zip(
                reversed(code.co_varnames[: code.co_argcount]),
                reversed(function.__defaults__ or ()),
                strict=False,
            ):
                self._walk(default, f"{describe(function)}'s default {name}")
            if function.__kwdefaults__:
                self._walk(function.__kwdefaults__, f"{describe(function)}'s defaults")
            own = function.__dict__
            self._entries(own, [n for n in own if self._is_read(n)], path, function)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._cell(cell, name)
        wrapped = function.__dict__.get("__wrapped__")
        if wrapped is not None:
            self._walk(wrapped, path)

    def _imported(self, name: str) -> None:
        module = sys.modules.get(name)
        if module is not None and not is_library(name):
            self._walk(module, name)

    def _cell(self, cell: types.CellType, name: str) -> None:
        if id(cell) in self._seen:
            return
        self._seen[id(cell)] = cell, name
        place = Slots(cell, ("cell_contents",), name, shown=name)
        self._place(place)
        if self._taken(place, place.names):
            place.guarded = False
            return
        value = place.at("cell_contents")
        if value is not MISSING:
            self._walk(value, name)

    def _globals_place(self, namespace: dict[str, Any], names: set[str]) -> None:
        taken = {c.key for c in self.carried if c.place.owner is namespace}
        self._place(Entries(namespace, sorted((names - taken) & namespace.keys()), ""))
        if taken:
            self._place(Entries(namespace, sorted(taken), "", guarded=False))

    def _module(self, module: nn.Module, path: str) -> None:
        cls = type(module)
        self._note(path, "module", cls)
        self._typed.append(module)
        own = module.__dict__
        for part in _MODULE_PARTS:
            inner = own.get(part)
            if inner:
                place = Items(inner, path, with_keys=False)
                self._place(place)
                place.carried = self._taken(place, inner)
                for name, value in inner.items():
                    if name not in place.carried:
                        self._walk(value, f"{path}.{name}")
        for part in _MODULE_HOOKS:
            hooks = own.get(part)
            if hooks is None:
                continue
            self._place(Items(hooks, f"{path}.{part}", with_keys=False))
            for number, hook in enumerate(hooks.values()):
                self._walk(hook, f"{path}.{part}[{number}]")
        if is_library_class(cls):
            names = [name for name in own if name not in _MODULE_OWN]
        else:
            names = [name for name in own if self._is_read(name) and name not in _MODULE_OWN]
            names += [n for n in ("_forward_hooks", "_forward_pre_hooks") if n not in names]
            self._assigned(module, path, names)
            self._slots(module, path)
        self._entries(own, names, path, module)
        self._class(cls)

    def _is_read(self, name: str) -> bool:
        names = self._names
        return name in names.attributes or names.any_attribute or name in self._library_reads

    def _entries(self, own: dict[str, Any], names: list[str], path: str, owner: Any) -> None:
        place = Entries(own, names, path)
        taken = self._taken(place, names)
        if taken:
            names = [name for name in names if name not in taken]
            self._place(Entries(own, sorted(taken), path, guarded=False))
            place = Entries(own, names, path)
        self._place(place)
        for name in names:
            if name not in _MODULE_HOOKS and name in own:
                self._walk(own[name], f"{path}.{name}")

    def _assigned(self, owner: Any, path: str, read: list[str]) -> None:
        """Attributes that the code assigns without reading them."""
        names = [n for n in self._names.assigned - set(read) if n not in _MODULE_OWN]
        own = dict_of(owner)
        if own is None:
            return
        if issubclass(type(owner), nn.Module):
            taken = set().union(*(own.get(p) or () for p in _MODULE_PARTS))
            names = [n for n in names if n not in taken]
        # Not hasattr, which would run a user's __getattr__. A property keeps its value elsewhere.
        inherited = {
            n
            for base in type(owner).__mro__
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
        if wrapped is not None:  # functools.wraps, lru_cache, a compiled step
            self._note(path, cls)
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
        elif getattr(cls, "__slots__", None) is not None and not is_library_class(cls):
            self._note(path, "object", cls)
            self._slots(value, path)
        else:
            # Nothing is known of it but which one it is.
            self._note(path, "opaque", value)
            if isinstance(value, Iterator):
                self.consumed.append((value, path))
        self._class(cls)

    def _library_methods(self, cls: type) -> None:
        """What the methods that the code names read, of classes whose code isn't followed: the
        ``data`` behind a ``UserDict``'s ``[]``."""
        for base in cls.__mro__:
            if not is_library_class(base):
                continue
            for name, method in vars(base).items():
                special = name.startswith("__") and name not in _NEVER_CALLED
                if special or self._is_read(name):
                    code = code_of(method)
                    if code is not None:
                        self._library_reads |= names_of(code).attributes

    def _slots(self, value: Any, path: str) -> None:
        """What an object holds in slots, those of its base classes too."""
        cls = type(value)
        known = self._slot_names.get(cls)
        if known is None:
            bases = () if is_library_class(cls) else cls.__mro__
            known = self._slot_names[cls] = [name for base in bases for name in slots_of(base)]
        names = list(filter(self._is_read, known))
        if names:
            place = Slots(value, names, path)
            self._place(place)
            for name, content in place.content().items():
                self._walk(content, f"{path}.{name}")

    def _attributes(self, value: Any, own: dict[str, Any], path: str) -> None:
        names = list(filter(self._is_read, own))
        if isinstance(own.get("__getattr__"), types.FunctionType):  # a Python module's
            names.append("__getattr__")
        cls = type(value)
        if cls is types.SimpleNamespace or not any(map(is_library_class, cls.__mro__[:-1])):
            self._plain.add(id(own))
        self._assigned(value, path, names)
        self._entries(own, names, path, value)

    def _optimizer(self, optimizer: Optimizer, path: str) -> None:
        """What the step's own code reads of it; what its ``step`` does has guards of its own."""
        self._note(path, "optimizer", optimizer)
        own = vars(optimizer)
        wanted = [n for n in own if self._is_read(n) and n not in ("param_groups", "state")]
        self._entries(own, wanted, path, optimizer)
        self.optimizers[id(optimizer)] = optimizer
        if "param_groups" not in self._names.attributes:
            return
        groups = optimizer.param_groups
        self._place(Elements(groups, f"{path}.param_groups"))
        for i, group in enumerate(groups):
            names = [k for k in group if k == "params" or k in self._names.attributes]
            self._entries(group, names, f"{path}.param_groups[{i}]", optimizer)
            self.settings |= {(id(group), name) for name in names}

    def _stepped(self, stepped: SteppedOptimizer, path: str) -> None:
        """What an optimizer's ``step`` reads: all of its param groups but the numbers that are
        inputs, and its state."""
        optimizer, groups = stepped.optimizer, stepped.optimizer.param_groups
        self._note(path, "stepped optimizer", (id(optimizer), len(groups)))
        self._place(Slots(optimizer, ("param_groups", "state"), path))
        self._place(Elements(groups, f"{path}.param_groups"))
        for i, group in enumerate(groups):
            inputs = stepped.numbers[i] if i < len(stepped.numbers) else set()
            where = f"{path}.param_groups[{i}]"
            if i < len(stepped.assigned):
                inputs = inputs | stepped.assigned[i]  # what the step's code reads is found there
            names = [key for key in group if key not in inputs]
            self._place(Entries(group, names, where))
            for name in names:
                self._walk(group[name], f"{where}[{name!r}]")
        self._place(Items(optimizer.state, f"{path}.state", with_keys=False))
        for number, state in enumerate(optimizer.state.values()):
            self._place(Items(state, f"{path}.state[{number}]", with_keys=False))
            for key, value in state.items():
                self._walk(value, f"{path}.state[{number}][{key!r}]")
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            hooks = getattr(optimizer, name)
            self._place(Items(hooks, f"{path}.{name}", with_keys=False))
            for number, hook in enumerate(hooks.values()):
                self._walk(hook, f"{path}.{name}[{number}]")

    def _dict(self, value: Any, path: str) -> None:
        if len(value) > MANY:
            self._note(path, "dict", (id(value), len(value)))
            self._large.append(value)
            return
        self._note(path, type(value), tuple(k if is_atom(k) else id(k) for k in value))
        place = Items(value, path)
        self._place(place)
        place.carried = self._taken(place, value)
        for key, item in value.items():
            if key in place.carried:
                continue
            if not is_atom(key):
                self._walk(key, f"{path}'s key")
            self._walk(item, f"{path}[{key!r}]" if is_atom(key) else f"{path}[...]")
        if not is_library_class(type(value)):
            self._own_parts(value, path)

    def _sequence(self, value: Any, path: str) -> None:
        if len(value) > MANY:
            self._note(path, type(value), (id(value), len(value)))
            self._large.append(value)
            return
        self._note(path, type(value), len(value))
        place = Elements(value, path)
        self._place(place)
        if isinstance(value, list | deque):
            place.carried = self._taken(place, range(len(value)))
        for i, item in enumerate(value):
            if i not in place.carried:
                self._walk(item, f"{path}[{i}]")
        if not is_library_class(type(value)):
            self._own_parts(value, path)

    def _class(self, cls: type) -> None:
        """The methods and attributes that a class gives its objects."""
        for base in cls.__mro__:
            if is_library_class(base) or base in self._seen_classes:
                continue
            self._seen_classes.add(base)
            names = [
                name
                for name in base.__dict__
                if (self._is_read(name) or (name.startswith("__") and name.endswith("__")))
                and name not in _NEVER_CALLED
                and (self._is_read(name) or is_callable(base.__dict__[name]))
                and not isinstance(base.__dict__[name], DESCRIPTORS)
            ]
            place = Entries(base.__dict__, names, base.__qualname__, setter=base)
            taken = self._taken(place, names)
            if taken:
                where = base.__dict__, sorted(taken), base.__qualname__
                self._place(Entries(*where, guarded=False, setter=base))
                names = [name for name in names if name not in taken]
                place = Entries(base.__dict__, names, base.__qualname__, setter=base)
            self._place(place)
            for name in names:
                self._walk(base.__dict__[name], f"{base.__qualname__}.{name}")

    def _global_hooks(self) -> None:
        from torch.nn.modules import module

        for kind in ("forward", "forward_pre", "backward", "backward_pre"):
            name = f"_global_{kind}_hooks"
            hooks = getattr(module, name)
            self._place(Items(hooks, f"torch.nn.modules.module.{name}", with_keys=False))
            for number, hook in enumerate(hooks.values()):
                self._walk(hook, f"{name}[{number}]")

    # --- comparing ----------------------------------------------------------------------------

    def _arm(self) -> None:
        """Prepare the loop in C."""
        self._iterables: list[Any] = []
        self._pairs: list[tuple[Any, Any]] = []
        self._mappings: list[Any] = list(self._large)
        self._empty: list[Any] = []
        for place in self.places:
            if not place.guarded:
                continue
            if place.is_empty():
                self._empty.append(place.owner)
                continue
            iterables, pairs = place.live()
            self._iterables += iterables
            self._pairs += pairs
            sized = place.sized()
            if sized is not None:
                self._mappings.append(sized)
        self._lengths = list(map(len, self._mappings))
        self._types = list(map(type, self._typed))
        self._held = tuple(self._current())
        self._expected = identities(self._held)

    def _current(self) -> Iterator[Any]:
        return itertools.chain(
            itertools.chain.from_iterable(self._iterables),
            itertools.chain.from_iterable(itertools.starmap(operator.call, self._pairs)),
        )

    def untouched(self) -> bool:
        """Whether everything is the very object that it was: no need to look closer."""
        try:
            return (
                not any(self._empty)
                and identities(self._current()) == self._expected
                and list(map(len, self._mappings)) == self._lengths
                and list(map(type, self._typed)) == self._types
                and all(content_of(value) == content for value, content in self.arrays)
                and all(probe() is content for probe, content in self.probes)
            )
        except (KeyError, AttributeError, ValueError, RuntimeError):
            return False  # something is gone, or another thread is at it

    def differences(self, other: Watch) -> list[tuple[Found | None, Found | None]]:
        """What ``other``, a later walk from the same roots, found otherwise: (before, now)."""
        mine = {found.path: found for found in self.found}
        theirs = {found.path: found for found in other.found}
        result: list[tuple[Found | None, Found | None]] = []
        for path in mine.keys() | theirs.keys():
            before, now = mine.get(path), theirs.get(path)
            if before is None or now is None or not before.same(now):
                result.append((before, now))
        order = {found.path: i for i, found in enumerate((*self.found, *other.found))}
        result.sort(key=lambda pair: order[(pair[0] or pair[1]).path])  # type: ignore[union-attr]
        return result
