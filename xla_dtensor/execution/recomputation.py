"""Recomputation of blocks (``torch.utils.checkpoint``) in a trace, kept apart by barriers."""

from __future__ import annotations

from typing import Any

import jax

from xla_dtensor.forms.storage import Storage


class Recomputation:
    """One recomputation: what it reads from outside goes through a barrier, or XLA would merge the
    recomputed values with the first ones and keep those alive after all."""

    def __init__(self, latest: Any) -> None:
        self.made: set[int] = set()
        self._latest = latest
        self._barred: dict[int, tuple[Any, Any]] = {}

    def barred(self, storage: Storage, array: Any) -> Any:
        if id(storage) in self.made:
            return array
        known = self._barred.get(id(array))
        if known is None:
            if self._latest is None:
                result = jax.lax.optimization_barrier(array)
            else:
                # One barrier with the backward pass's newest value: XLA can't recompute before it.
                result, _ = jax.lax.optimization_barrier((array, self._latest))
            known = self._barred[id(array)] = (array, result)
        return known[1]
