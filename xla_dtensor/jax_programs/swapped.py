"""A module with other tensors in place of its parameters and buffers, for a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.base.torch_private.attributes import buffers_of, parameters_of
from xla_dtensor.tensors.of_form import is_ours


class _Before:
    """What a module consists of, to be put back.

    Attributes:
        module: the module.
        tables: its dicts of tensors, with what was in them.
        attributes: its attributes.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tables = [(t, dict(t)) for t in (parameters_of(module), buffers_of(module))]
        self.attributes = dict(vars(module))

    def put_back(self, name: str, own: set[int]) -> list[str]:
        """Put it back; returns the names of attributes in which tensors were left, apart from those
        whose ``id`` is in ``own``. Other attributes (a counter) stay as they are."""
        for table, before in self.tables:
            table.clear()
            table.update(before)
        now, left = vars(self.module), []
        for key in list(now):
            value, was = now[key], self.attributes.get(key, _ABSENT)
            found = [] if value is was else _tensors_in(value)
            if not all(id(tensor) in own for tensor in found):
                left.append(f"{name}.{key}" if name else key)
            if was is _ABSENT and found:
                del now[key]
            elif found or key in _OF_MODULES:
                now[key] = was
        return left


_ABSENT = object()
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "training"})


@contextmanager
def swapped(
    module: nn.Module,
    old: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    train: bool | None,
) -> Iterator[list[str]]:
    """A block in which ``module`` has the tensors ``new`` in place of ``old``, wherever they are:
    also where it keeps them in lists (``nn.LSTM``), and in training mode if ``train``.

    Yields:
        a list to which is added, when the block ends, where tensors were left.
    """
    of = {id(a): b for a, b in zip(old, new, strict=True)}
    left: list[str] = []
    before = [(name, _Before(part)) for name, part in module.named_modules()]
    own = set(map(id, new))
    try:
        for _, part in before:
            for table, _ in part.tables:
                for key, tensor in table.items():
                    if tensor is not None:
                        table[key] = of[id(tensor)]
            attributes = vars(part.module)
            for key, value in part.attributes.items():
                swap = _swap(value, of) if key not in _OF_MODULES else value
                if swap is not value:
                    attributes[key] = swap
            if train is not None:
                attributes["training"] = train
        yield left
    finally:
        for name, part in before:
            left += part.put_back(name, own)


def _swap(value: Any, of: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return of.get(id(value), value)
    if type(value) in (list, tuple) and any(id(item) in of for item in value):
        return type(value)(of.get(id(item), item) for item in value)
    return value


def _tensors_in(value: Any) -> list[Any]:
    """The xla tensors in an attribute's value."""
    if isinstance(value, nn.Module):
        return []
    return [leaf for leaf in pytree.tree_leaves(value) if is_ours(leaf)]
