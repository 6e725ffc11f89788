"""What a trace that fails takes back, beside what is in places (`watch.effects`) and storages."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.base.torch_private.attributes import hooks_after_accumulation, hooks_of_tensor
from xla_dtensor.compilation.code.installed import is_installed
from xla_dtensor.compilation.code.names import is_library_class
from xla_dtensor.compilation.code.reflection import cache_of, drop_from_cache
from xla_dtensor.compilation.code.threads import users_code_runs_elsewhere
from xla_dtensor.compilation.objects.kinds import places_of
from xla_dtensor.compilation.objects.places import MISSING, Attributes, Place, Slots
from xla_dtensor.compilation.trace.external_tensors import own_hook
from xla_dtensor.compilation.watch.attributes import MODULE_PARTS
from xla_dtensor.compilation.watch.effects import put_back
from xla_dtensor.compilation.watch.names_met import NamesMet
from xla_dtensor.compilation.watch.watch import Watch
from xla_dtensor.errors import DataDependentError

_CONTAINERS = (dict, list, set, deque)
_ATOMS = (bool, int, float, complex, str, bytes, tuple, type(None))
_VALUES = (*_CONTAINERS, *_ATOMS, torch.Tensor)
# Modules are looked at by themselves; of the others what they refer to isn't theirs.
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType)
_APART = (*_ATOMS, torch.Tensor, nn.Module, *_CODE)
_DEEP, _LARGE = 4, 1000


class TakenBack:
    """Hooks of tensors, what functions keep of their calls (``functools.cache``), and what modules
    and other objects hold, until a program has been launched.

    The walk knows nothing of what only code of installed packages sets that hasn't run before
    (transformers notes on a model that it has registered hooks), nor are dicts of submodules put
    back that were replaced (`ModuleList.pop`): in a trace that fails these are tensors without a
    value, in one that is made again, or is left to replay, what has happened already.

    Args:
        watch: what the step can read.
        tensors: those among it, and the arguments.
    """

    def __init__(self, watch: Watch, tensors: Iterable[Any]) -> None:
        known = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        self._hooks = [
            (tensor, [set(table or ()) for table in _tables(tensor)]) for tensor in known
        ]
        self._cached = [(cached, dict(cache_of(cached)[0])) for cached, _ in watch.reached.caches]
        modules = [each for each in watch.reached.typed if isinstance(each, nn.Module)]
        self._classes = [(module, type(module)) for module in modules]
        self._parts = [
            (own, {part: own[part] for part in MODULE_PARTS if part in own})
            for own in (vars(module) for module in modules)
        ]
        found: dict[int, Place] = {}
        for each in watch.reached.typed:
            if not isinstance(each, types.ModuleType):
                _add_places(each, found, _DEEP)
        self._globals = [(owner, dict(vars(owner))) for owner in _of_packages(modules)]
        for _, values in self._globals:
            for value in values.values():
                if isinstance(value, _CONTAINERS):
                    _add_places(value, found, 1)
        self._places = [(place, place.content()) for place in found.values()]
        self._drawn = [
            (value, value.getstate())
            for _, content in self._places
            for value in content.values()
            if isinstance(value, random.Random)
        ]
        self._known = {id(cached) for cached, _ in watch.reached.caches}
        self._alone = not users_code_runs_elsewhere()

    def check(self) -> None:
        """Called after a trace.

        Raises:
            DataDependentError: a module has another class, whose code later calls would run.
        """
        for module, cls in self._classes:
            if type(module) is not cls and not issubclass(cls, LazyModuleMixin):
                raise DataDependentError(
                    f"the step makes a {cls.__name__} a {type(module).__name__}, whose code the "
                    "next call would run; do that outside of the compiled function"
                )

    def forget(self, watch: Watch, made: Callable[[torch.Tensor], bool]) -> None:
        """Have functions that no walk knew of forget what they have kept of a trace."""
        for cached, _ in watch.reached.caches:
            if id(cached) not in self._known:
                parts = pytree.tree_leaves(cache_of(cached)[1])
                ids = {id(x) for x in parts if isinstance(x, torch.Tensor) and made(x)}
                if ids:
                    drop_from_cache(cached, ids)

    @contextlib.contextmanager
    def parts_as_before(self) -> Iterator[None]:
        """While the block runs modules have the dicts of parameters, buffers and submodules that
        they had: those for which a program is valid. (Their content is in places.)"""
        changed = [
            (own, {part: own.get(part) for part in before}, before)
            for own, before in self._parts
            if any(own.get(part) is not inner for part, inner in before.items())
        ]
        for own, _, before in changed:
            own.update(before)
        try:
            yield
        finally:
            for own, now, _ in changed:
                own.update(now)

    def restore(self, names: NamesMet) -> None:
        """Have all as it was. Where other threads run user's code, of attributes those that the
        step's code may have assigned.

        Args:
            names: in the step's code.
        """
        alone = self._alone and not users_code_runs_elsewhere()
        may_assign = names.assigned.union(MODULE_PARTS)
        if names.calls("setattr", "delattr"):
            may_assign = may_assign | names.attributes
        for module, cls in self._classes:
            if type(module) is not cls:
                module.__class__ = cls
        for place, content in self._places:
            now = place.content()
            if not alone and isinstance(place, Attributes):
                others = {key: value for key, value in now.items() if key not in may_assign}
                content = {k: v for k, v in content.items() if k in may_assign} | others
            put_back(place, content, now)
        for owner, values in self._globals:
            _put_values_back(owner, values)
        for generator, state in self._drawn:
            generator.setstate(state)
        for tensor, before in self._hooks:
            own = own_hook(tensor)
            for table, keys in zip(_tables(tensor), before, strict=True):
                for key in [key for key in table or () if key not in keys and key != own]:
                    del table[key]
        for cached, calls in self._cached:
            now = cache_of(cached)[0]
            if now.keys() != calls.keys():
                now.clear()
                now.update(calls)


def _of_packages(modules: Iterable[nn.Module]) -> list[Any]:
    """Of modules the classes of installed packages, and the Python modules that have these."""
    classes = dict.fromkeys(cls for m in modules for cls in type(m).__mro__)
    own = [c for c in classes if is_installed(c.__module__) and not is_library_class(c)]
    names = dict.fromkeys(cls.__module__ for cls in own)
    return [*own, *(sys.modules[name] for name in names if name in sys.modules)]


def _put_values_back(owner: Any, values: dict[str, Any]) -> None:
    """Give a class or a Python module the values that it had. What is code stays: what was imported
    meanwhile, or patched."""
    for name, now in list(vars(owner).items()):
        before = values.get(name, MISSING)
        if now is not before and isinstance(now, _VALUES):
            if before is MISSING:
                delattr(owner, name)
            elif isinstance(before, _VALUES):
                setattr(owner, name, before)


def _add_places(value: Any, found: dict[int, Place], deep: int) -> None:
    """Add what a container or an object holds, and what is in it, by the places' containers."""
    for place in places_of(value, ""):
        if place.container in found or isinstance(place, Slots) or len(place.owner) > _LARGE:
            continue
        found[place.container] = place
        for inner in place.content().values() if deep else ():
            # What of the package's own objects matters has guards of its own.
            own = type(inner).__module__.startswith("xla_dtensor.")
            if not (own or isinstance(inner, _APART)):
                _add_places(inner, found, deep - 1)


def _tables(tensor: torch.Tensor) -> tuple[Any, Any]:
    return hooks_of_tensor(tensor), hooks_after_accumulation(tensor)
