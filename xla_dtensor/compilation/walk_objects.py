"""Modules, optimizers, classes and containers on the walk."""

from __future__ import annotations

import abc
import functools
import threading
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LRScheduler

from xla_dtensor.compilation.code_names import (
    names_of,
)
from xla_dtensor.compilation.found import is_atom
from xla_dtensor.compilation.optimizers import ReadState, SteppedOptimizer
from xla_dtensor.compilation.places import (
    MISSING,
    Elements,
    Entries,
    Items,
    Slots,
    class_of_content,
)
from xla_dtensor.compilation.reflection import (
    DESCRIPTORS,
    code_of,
    dict_of,
    is_callable,
    registered_with,
    slots_of,
    subclasses,
)
from xla_dtensor.compilation.walk_code import WalkCode
from xla_dtensor.tensors.base import OWN_ATTRIBUTES

# Content beyond this is compared by length: vocabularies, data sets.
MANY = 10_000
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
_NOT_USERS = _MODULE_OWN | OWN_ATTRIBUTES


class WalkObjects(WalkCode):
    """What is found in them; see `Watch`."""

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
        if self._of_library(cls):
            names = [name for name in own if name not in _MODULE_OWN]
        else:
            names = [name for name in own if self._is_read(name) and name not in _MODULE_OWN]
            names += [n for n in ("_forward_hooks", "_forward_pre_hooks") if n not in names]
            self._assigned(module, path, names)
            self._slots(module, path)
        self._entries(own, names, path, module)
        self._class(cls)

    def _tensor(self, tensor: torch.Tensor, path: str) -> None:
        """What the user has put on a tensor, or may."""
        own = vars(tensor)
        added = own.keys() - OWN_ATTRIBUTES
        names = [n for n in own if n in added and self._is_read(n)] if added else []
        if names or self._asks_for_absent:
            self._entries(own, names, path, tensor)
        if self._names.assigned:
            self._assigned(tensor, path, names)
        if "_version" in self._names.attributes and not tensor.is_inference():
            version = tensor._version
            self.probes.append((lambda: tensor._version == version, True))
            self._note(f"{path}._version", "value", version)

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
        elif getattr(cls, "__slots__", None) is not None and not self._of_library(cls):
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
            if not self._of_library(base):
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
            bases = () if self._of_library(cls) else cls.__mro__
            known = self._slot_names[cls] = [name for base in bases for name in slots_of(base)]
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
        if isinstance(own.get("__getattr__"), types.FunctionType):  # a Python module's
            names.append("__getattr__")
        cls = type(value)
        if cls is types.SimpleNamespace or not any(map(self._of_library, cls.__mro__[:-1])):
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
        self._place(Slots(optimizer, ("param_groups",), path))
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
        content = class_of_content(value).items(value)
        if len(content) > MANY:
            self._note(path, "dict", (id(value), len(content)))
            self._large.append(value)
            return
        self._note(path, type(value), tuple(k if is_atom(k) else id(k) for k, _ in content))
        place = Items(value, path)
        self._place(place)
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
            self._note(path, type(value), (id(value), length))
            self._large.append(value)
            return
        self._note(path, type(value), length)
        place = Elements(value, path)
        self._place(place)
        if isinstance(value, list | deque):
            place.carried = self._taken(place, range(length))
        for i, item in enumerate(cls.__iter__(value)):
            if i not in place.carried:
                self._walk(item, f"{path}[{i}]")
        if not self._of_library(type(value)):
            self._own_parts(value, path)

    def _class(self, cls: type) -> None:
        """The methods and attributes that a class gives its objects."""
        for base in cls.__mro__:
            if self._of_library(base) or base in self._seen_classes:
                continue
            self._seen_classes.add(base)
            names = [name for name in base.__dict__ if self._is_member_used(base, name)]
            place = Entries(base.__dict__, names, base.__qualname__, setter=base)
            for name in self._without_taken(place):
                self._walk(base.__dict__[name], f"{base.__qualname__}.{name}")

    def _is_member_used(self, cls: type, name: str) -> bool:
        member = cls.__dict__[name]
        if name in _NEVER_CALLED or isinstance(member, DESCRIPTORS):
            return False
        if self._is_read(name) or (name in self._names.assigned and hasattr(member, "__set__")):
            return True
        return name.startswith("__") and name.endswith("__") and is_callable(member)

    def _global_hooks(self) -> None:
        names = [
            (torch_module, f"_global_{kind}_hooks")
            for kind in ("forward", "forward_pre", "backward", "backward_pre")
        ]
        names += [(torch_optimizer, f"_global_optimizer_{kind}_hooks") for kind in ("pre", "post")]
        for where, name in names:
            hooks = getattr(where, name)
            self._place(Items(hooks, f"{where.__name__}.{name}", with_keys=False))
            for number, hook in enumerate(hooks.values()):
                self._walk(hook, f"{name}[{number}]")

    def _registry(self, cls: type, path: str) -> None:
        """Which classes a class has below it, and which have been registered with an abstract
        one."""
        if "__subclasses__" in self._names.attributes:
            below: list[type] = type.__subclasses__(cls)
            self.probes.append((lambda: type.__subclasses__(cls) == below, True))
            self._note(f"{path}.__subclasses__()", "registry", set(below))
            for number, subclass in enumerate(below):
                self._walk(subclass, f"{path}.__subclasses__()[{number}]")
        if not isinstance(cls, abc.ABCMeta):
            return
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
