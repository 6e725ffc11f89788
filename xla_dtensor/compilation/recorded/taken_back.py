"""What a trace that fails takes back, beside what is in places (`watch.effects`) and storages."""

from __future__ import annotations

import copy
import operator
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from xla_dtensor.base.torch_private.attributes import hooks_after_accumulation, hooks_of_tensor
from xla_dtensor.compilation.code.reflection import cache_of, dict_of
from xla_dtensor.compilation.code.threads import others_run
from xla_dtensor.compilation.trace.external_tensors import own_hook
from xla_dtensor.compilation.watch.watch import Watch

_CONTAINERS = frozenset({dict, OrderedDict, list, set})
_APART = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)


class TakenBack:
    """Hooks of tensors, what functions keep of their calls (``functools.cache``), and attributes of
    modules that the walk knows nothing of, as only code of installed packages sets them that hasn't
    run before (transformers notes on a model that it has registered hooks): in a trace that fails
    tensors without a value, in one that is made again what has happened already.

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
        self._contents = [(inner, copy.copy(inner)) for m in modules for inner in _contents(m)]
        # What another thread sets meanwhile can't be told from what the step does.
        self._alone = not others_run()

    def restore(self) -> None:
        """Have all as it was."""
        if self._alone:
            for module, cls in self._classes:
                if type(module) is not cls:
                    module.__class__ = cls
            for inner, before in self._contents:
                _refill(inner, before)
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


def _contents(module: nn.Module) -> Iterator[Any]:
    """A module's attributes, and what is in them: plain containers, attributes of other objects."""
    own = vars(module)
    yield own
    for value in own.values():
        cls = type(value)
        if cls in _CONTAINERS:
            yield value
        elif not isinstance(value, _APART) and (inner := dict_of(value)) is not None:
            yield inner


def _refill(inner: Any, before: Any) -> None:
    if isinstance(inner, dict):
        same = list(inner) == list(before)
        if not same or not all(map(operator.is_, inner.values(), before.values())):
            inner.clear()
            inner.update(before)
    elif isinstance(inner, list):
        if len(inner) != len(before) or not all(map(operator.is_, inner, before)):
            inner[:] = before
    elif inner != before:
        inner.clear()
        inner.update(before)


def _tables(tensor: torch.Tensor) -> tuple[Any, Any]:
    return hooks_of_tensor(tensor), hooks_after_accumulation(tensor)
