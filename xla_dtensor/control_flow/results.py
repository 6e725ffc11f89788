"""What branches and bodies are given and return: tensors, and the structure that they lie in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.base.source_line import user_line
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.storage import next_version
from xla_dtensor.tensors.of_form import is_ours

_HERE = object()


@dataclass(frozen=True)
class Skeleton:
    """A structure without its tensors.

    Attributes:
        spec: as torch's pytree has it. JAX's has an order of its own for dicts, so it is given
            lists alone.
        rest: the leaves, `_HERE` in place of each tensor.
    """

    spec: Any
    rest: tuple[Any, ...]

    @classmethod
    def apart(cls, value: Any, numbers: bool = False) -> tuple[list[Any], Skeleton]:
        """The tensors of a structure, and what is left of it.

        Args:
            numbers: whether numbers in it become tensors, too.

        Raises:
            UnsupportedOpError: then, there is something else.
        """
        leaves, spec = pytree.tree_flatten(value)
        if numbers:
            leaves = [x if x is None else as_tensor(x) for x in leaves]
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        return tensors, cls(
            spec, tuple(_HERE if isinstance(x, torch.Tensor) else x for x in leaves)
        )

    def put_together(self, tensors: Iterable[Any]) -> Any:
        left = iter(tensors)
        return pytree.tree_unflatten(
            [next(left) if x is _HERE else x for x in self.rest], self.spec
        )


def as_tensor(value: Any) -> torch.Tensor:
    """A tensor, or the one of no dims that a number is."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=_dtype(value), device="xla")


def _dtype(value: Any) -> torch.dtype:
    """Of what a tensor or a number is as a tensor: Python's numbers have 64 bits.

    Raises:
        UnsupportedOpError: it is something else.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype
    kinds = {bool: torch.bool, int: torch.int64, torch.SymInt: torch.int64, float: torch.float64}
    for kind, dtype in kinds.items():
        if isinstance(value, kind):
            return dtype
    raise UnsupportedOpError(
        f"a branch or the body of a loop is given or returns {value!r}, a {type(value).__name__}: "
        f"it must be tensors and numbers{user_line()}"
    )


@dataclass(frozen=True)
class Results:
    """What a function returns.

    Attributes:
        tree: the structure.
        kinds: the shapes and dtypes of the tensors in it.
    """

    tree: Skeleton
    kinds: list[tuple[tuple[int, ...], Any]]

    @classmethod
    def of(cls, value: Any) -> Results:
        leaves, spec = pytree.tree_flatten(value)
        found = [x for x in leaves if x is not None]
        kinds = [(tuple(getattr(x, "shape", ())), to_jax_dtype(_dtype(x))) for x in found]
        return cls(Skeleton(spec, tuple(x if x is None else _HERE for x in leaves)), kinds)

    def first(self) -> Results:
        """The first of two parts."""
        part, _ = self.put_together(range(len(self.kinds)))
        at, spec = pytree.tree_flatten(part)
        rest = tuple(x if x is None else _HERE for x in at)
        return Results(Skeleton(spec, rest), [self.kinds[i] for i in at if i is not None])

    def put_together(self, tensors: Iterable[Any]) -> Any:
        return self.tree.put_together(tensors)

    def __str__(self) -> str:
        texts = (f"{dtype.name}{list(shape)}" for shape, dtype in self.kinds)
        return str(self.put_together(texts)).replace("'", "")


def check_alike(first: str, one: Results, second: str, other: Results) -> None:
    """Raise unless both are of one structure, with tensors of the same shapes and dtypes."""
    if one != other:
        raise UnsupportedOpError(
            f"{first} {one}, {second} {other}: both must be tensors of the same shapes and dtypes "
            f"in the same structure{user_line()}"
        )


class NewResults:
    """Sees to it, where Python decides, that results are tensors of their own, as a program's are:
    a branch may return its operand, what it has captured, or a view of these."""

    def __init__(self) -> None:
        self._begin = next_version()

    def of(self, found: Any, given: Any) -> Any:
        """What a function has returned, copied where it was there before, or is there twice.

        Args:
            given: what the function was given.
        """
        seen = {id(x._storage_) for x in pytree.tree_leaves(given) if is_ours(x)}

        def own(value: Any) -> Any:
            if not is_ours(value):
                return value
            storage = value._storage_
            if storage.version < self._begin or id(storage) in seen:
                return value.clone()
            seen.add(id(storage))
            return value

        return pytree.tree_map(own, found)
