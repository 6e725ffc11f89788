"""The walk: from a step's function through every object that its code can reach by name."""

from __future__ import annotations

import array
import builtins
import contextvars
import copyreg
import enum
import functools
import operator
import os
import queue
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from xla_dtensor.compilation.code.installed import is_installed
from xla_dtensor.compilation.code.names import Names, formatted, is_library, is_library_class
from xla_dtensor.compilation.code.reflection import code_of, dict_of, is_strict, referent, referents
from xla_dtensor.compilation.objects.called_places import Variable
from xla_dtensor.compilation.objects.carried import Carried
from xla_dtensor.compilation.objects.found import Found, content_of, is_atom
from xla_dtensor.compilation.objects.kinds_of_code import ITERATORS, VIEWS
from xla_dtensor.compilation.objects.places import Entries, Items, Place, Slots
from xla_dtensor.compilation.objects.readers import reader
from xla_dtensor.compilation.trace.stepped import SteppedOptimizer

_ITERATORS = (types.GeneratorType, *ITERATORS)
_PLAIN_DATA = frozenset({list, dict, tuple, set})
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
# What is in them belongs to all threads, and changes at any time.
_OF_THREADS = (
    *(threading.Thread, threading.Condition, threading.Semaphore, threading.Barrier),
    *(queue.Queue, queue.SimpleQueue),
)
# How much of them there is says whether a step has put, taken, acquired or released.
_SHARED = (threading.Semaphore, queue.Queue, queue.SimpleQueue)
# Methods that torch and Python call under no name in the user's code.
_CALLED_BY_TORCH = {"forward", "backward", "setup_context", "jvp", "training", "__wrapped__"}


class Walk:
    """What is found on the way; see `Watch`."""

    # What the classes derived from it know.
    _function: Callable[[types.FunctionType, str], None]
    _reader: Callable[[str], None]
    _any_import: Callable[[], None]
    _registered: Callable[[], None]
    _cell: Callable[[types.CellType, str], None]
    _alone: Callable[[Slots | Variable], None]
    _globals_place: Callable[[dict[str, Any], set[str]], None]
    _module: Callable[[nn.Module, str], None]
    _stepped: Callable[[SteppedOptimizer, str], None]
    _object: Callable[[Any, str], None]
    _plain_object: Callable[[Any, str], None]
    _slots: Callable[[Any, str], None]
    _attributes: Callable[[Any, dict[str, Any], str], None]
    _entries: Callable[[dict[str, Any], list[str], str, Any], None]
    _dict: Callable[[Any, str], None]
    _sequence: Callable[[Any, str], None]
    _without_taken: Callable[[Entries | Slots], tuple[str, ...]]
    _class: Callable[[type], None]
    _assigned: Callable[[Any, str, list[str]], None]
    _library_methods: Callable[[type], None]
    _of_tensor: Callable[[torch.Tensor, str], None]
    _registry: Callable[[type, str], None]
    _thread_local: Callable[[threading.local, str], None]
    _global_hooks: Callable[[], None]
    _settings: Callable[[], None]

    def __init__(
        self,
        roots: list[tuple[str, Any]],
        carried: frozenset[str] = frozenset(),
        executed: frozenset[types.CodeType] | None = None,
        expecting: bool = False,
        known: Walk | None = None,
        fixed: bool = False,
    ) -> None:
        self._fixed = fixed
        self._carried = carried
        self._executed = executed
        self._expecting = expecting
        self.meets_installed = False
        self._names = Names(attributes=set(_CALLED_BY_TORCH))
        self._library_reads: set[str] = set()
        self._readers: set[str] = set()  # found under another name than their own
        self._globals: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._asks_types = self._takes_types = self._compares_numbers = False
        if known is not None and not known.meets_installed:
            # What led to them is there still, so one round will do. Of installed packages it may
            # have taken names of code that hasn't run.
            self._names.update(known._names)
            self._library_reads |= known._library_reads
            self._readers |= known._readers
            self._asks_types = known.asks_types
            for number, (namespace, names) in known._globals.items():
                self._globals[number] = namespace, set(names)
        self._odd_classes: dict[type, bool] = {}
        self._inherited: dict[type, set[str]] = {}
        self._library_classes: dict[type, bool] = {}
        self._seen: dict[int, tuple[Any, str]] = {}
        while True:
            before = self._size()
            self._start()
            for path, value in roots:
                self._walk(value, path)
            self._global_hooks()
            self._registered()
            if "__reduce_ex__" in self._names.attributes:  # how objects are copied and pickled
                self._walk(copyreg.dispatch_table, "copyreg.dispatch_table")
            if self._size() == before:
                break
        for namespace, names in self._globals.values():
            self._globals_place(namespace, names)
        if self._builtins:  # somebody may put another function into it
            place = Entries(vars(builtins), sorted(self._builtins), "builtins", grows=False)
            self.live += place.live()[1]
            for name, value in place.content().items():
                self._note(f"builtins.{name}", "opaque", value)
        if self.imports:  # as a pair, and no place: what a step imports stays imported
            self.live.append((functools.partial(map, sys.modules.get), sorted(self.imports)))
        self._settings()
        if self._names.environment:
            self._place(Items(os.environ._data, "os.environ"))  # type: ignore[attr-defined]
            for key, value in os.environ.items():
                self._note(f"os.environ[{key!r}]", "value", value)
        self.absent = {name for name in self.imports if name not in sys.modules}
        self._seen, self._odd_classes = {}, {}
        self._inherited, self._library_classes = {}, {}

    # --- the walk ------------------------------------------------------------------------------

    @property
    def reads(self) -> set[str]:
        """The names of all attributes that the step's code reads."""
        return self._names.attributes

    @property
    def asks_types(self) -> bool:
        """Whether the step's code may find that a number which is an input is no ``float``."""
        return self._asks_types or (self._takes_types and self._compares_numbers)

    @property
    def takes_next(self) -> bool:
        """Whether the step's code calls ``next``."""
        return self._calls("next")

    def _calls(self, *functions: str) -> bool:
        """Whether the step's code may call one of these, by its own name or by another."""
        return not self._readers.isdisjoint(functions) or any(
            not names.isdisjoint(functions) for _, names in self._globals.values()
        )

    def _size(self) -> tuple[int, ...]:
        names = self._names
        return (
            len(names.attributes),
            len(names.assigned),
            len(names.stored),
            len(names.modules),
            len(self._library_reads),
            len(self._readers),
            sum(len(found) for _, found in self._globals.values()),
        )

    def _start(self) -> None:
        # Whether the code may ask for attributes that aren't there.
        self._asks_for_absent = self._calls("getattr", "hasattr")
        self.places: list[Place] = []
        self.carried: list[Carried] = []
        self.inside: set[int] = set()
        self._plain: set[int] = set()  # the attributes of objects that no library's code changes
        self.settings: set[tuple[int, str]] = set()
        self.found: list[Found] = []
        self.tensors: dict[int, tuple[torch.Tensor, str]] = {}
        self.arrays: list[tuple[Any, Any]] = []
        self.live: list[tuple[Any, Any]] = []
        self.imports: set[str] = set()
        self._any_module = False
        self._builtins: set[str] = set()
        self._stored: dict[int, set[str]] = {}
        self.caches: list[tuple[Any, str]] = []
        self.jax_arrays: set[int] = set()
        self.random_sources: list[Any] = []
        self.optimizers: dict[int, Optimizer] = {}
        self._typed: list[Any] = []
        self.probes: list[tuple[Any, Any]] = []
        self._large: list[Any] = []
        self._seen = {}
        self._placed_globals: set[int] = set()
        self.codes: set[types.CodeType] = set()
        self._seen_classes: set[type] = set()
        self.consumed: list[tuple[Any, str]] = []
        self.shared: list[tuple[Any, str]] = []
        self._used_paths: dict[str, int] = {}

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
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor and is_atom(value):
            self._note(path, "value", value)
            if cls is str:
                self._names.attributes |= formatted(value)
            elif not self._of_library(cls):  # an enum, a named tuple: it may have methods
                self._own_parts(value, path)
            return
        if (name := reader(value)) is not None:
            self._reader(name)
        seen = self._seen.get(id(value))
        if seen is not None:
            self._note(path, "same as", seen[1])
            return
        self._seen[id(value)] = value, path
        if is_tensor:
            self.tensors[id(value)] = value, path
            self._note(path, "tensor", value)
            self._of_tensor(value, path)
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                # Which hooks there are the step's guards know; here it is what they read.
                hooks = getattr(value, name, None)
                for number, hook in enumerate(hooks.values() if hooks else ()):
                    self._walk(hook, f"{path}.{name}[{number}]")
            return
        if isinstance(value, np.ndarray | bytearray | memoryview | array.array):
            content = content_of(value)
            self.arrays.append((value, content))
            self._note(path, "array", content)
            if cls is not np.ndarray:
                self._own_parts(value, path)
            if isinstance(value, np.ndarray) and value.dtype.hasobject:
                for number, item in enumerate(value.ravel().tolist()):
                    self._walk(item, f"{path}[{number}]")
            return
        self._walk_parts(value, path)

    def _own_parts(self, value: Any, path: str) -> None:
        """The methods and attributes of an object of a user's class, apart from its content."""
        own = dict_of(value)
        if own is not None:
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
        elif isinstance(value, functools.partial | functools.partialmethod):
            self._note(path, cls)
            parts = ("func", "args", "keywords")
            self._place(Slots(value, parts, path))
            for name in parts:
                self._walk(getattr(value, name), f"{path}.{name}")
            self._own_parts(value, path)
        elif isinstance(value, staticmethod | classmethod):
            self._walk(value.__func__, path)
        elif isinstance(value, property):
            for function in (value.fget, value.fset, value.fdel):
                self._walk(function, path)
        elif isinstance(value, functools.cached_property):
            self._names.assigned.update(filter(None, (value.attrname,)))  # where its value goes
            self._walk(value.func, path)
        elif isinstance(value, functools.singledispatchmethod):
            self._walk(value.func, path)
            self._walk(value.dispatcher, path)
        elif isinstance(value, contextvars.ContextVar):
            self._note(path, "opaque", value)
            self._alone(Variable(value, path))
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            self._note(path, "value", repr(value))
            self._names.attributes |= set(re.findall(r"\w+", repr(value)))
        elif isinstance(value, nn.Module):
            self._module(value, path)
        elif isinstance(value, type):
            self._note(path, "class", value)
            self._library_methods(value)
            self._class(value)
            self._class(type(value))
            self._registry(value, path)
            if issubclass(value, enum.Enum):
                for name, member in value.__members__.items():
                    self._walk(member, f"{path}.{name}")
        elif isinstance(value, types.ModuleType):
            self._note(path, "Python module", value)
            if not (is_library(value.__name__) or self._skips(value.__name__)):
                self._attributes(value, vars(value), path)
            else:  # somebody may put another function into it
                names = sorted(self._names.attributes & vars(value).keys())
                self._place(Entries(vars(value), names, path))
                for name in names:
                    if value is builtins:
                        self._walk(vars(value)[name], f"{path}.{name}")
                    elif value is not sys or name != "modules":
                        self._in_library(vars(value)[name], f"{path}.{name}")
        elif isinstance(value, types.CellType):
            self._cell(value, path)
        elif value is sys.modules:
            self._any_import()
        elif isinstance(value, dict | types.MappingProxyType):
            self._dict(value, path)
        elif cls in VIEWS:
            self._note(path, cls)
            for table in referents(value):
                self._walk(table, path)
        elif isinstance(value, threading.local):
            self._thread_local(value, path)
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):  # table.get
            self._note(path, "opaque", value.__name__)
            if not isinstance(value.__self__, types.ModuleType | type):
                self._walk(value.__self__, f"{path}.__self__")
        elif isinstance(value, weakref.ref):
            self._note(path, "opaque", value)
            self._walk(value(), f"{path}()")
        elif isinstance(value, list | tuple | set | frozenset | deque):
            self._sequence(value, path)
        elif isinstance(value, _ITERATORS):
            self._note(path, "opaque", value)
            self.consumed.append((value, path))
        elif isinstance(value, _OF_THREADS):
            self._note(path, "opaque", value)
            if isinstance(value, _SHARED):
                self.shared.append((value, path))
        elif isinstance(value, SteppedOptimizer):
            self._stepped(value, path)
        else:
            self._object(value, path)

    def _skips(self, module_name: str | None) -> bool:
        """Whether code of a Python module counts only where it has run."""
        if self._executed is None or not is_installed(module_name):
            return False
        self.meets_installed = True
        return True

    def _has_run(self, code: types.CodeType | None) -> bool:
        return self._executed is None or code in self._executed

    def _in_library(self, value: Any, path: str) -> None:
        """What a library's module has under a name that the code reads."""
        if type(value) is types.FunctionType:
            followed = not is_library(value.__module__) and (
                not self._skips(value.__module__) or self._has_run(value.__code__)
            )
        elif issubclass(type(value), type) and self._skips(value.__module__):
            followed = any(self._has_run(code_of(member)) for member in vars(value).values())
        else:
            followed = issubclass(type(value), types.ModuleType) or type(value) in _PLAIN_DATA
        if followed:
            self._walk(value, path)
        else:
            atom = not is_strict(type(value)) and is_atom(value)
            self._note(path, "value" if atom else "opaque", value)

    def _place(self, place: Place) -> None:
        self.places.append(place)

    def _of_library(self, cls: type) -> bool:
        """Whether a class is defined by a library."""
        known = self._library_classes.get(cls)
        if known is None:
            known = self._library_classes[cls] = is_library_class(cls)
        return known

    def _is_read(self, name: str) -> bool:
        names = self._names
        return name in names.attributes or names.any_attribute or name in self._library_reads
