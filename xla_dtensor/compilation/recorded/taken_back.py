"""What a trace that fails takes back, beside what is in places (`watch.effects`) and storages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from xla_dtensor.base.torch_private.attributes import hooks_after_accumulation, hooks_of_tensor
from xla_dtensor.compilation.code.reflection import cache_of
from xla_dtensor.compilation.trace.external_tensors import own_hook
from xla_dtensor.compilation.watch.watch import Watch


class TakenBack:
    """Hooks of tensors, and what functions keep of their calls (``functools.cache``): in a trace
    that fails, tensors without a value.

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

    def restore(self) -> None:
        """Have all as it was."""
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


def _tables(tensor: torch.Tensor) -> tuple[Any, Any]:
    return hooks_of_tensor(tensor), hooks_after_accumulation(tensor)
