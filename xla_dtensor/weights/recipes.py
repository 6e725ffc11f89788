"""How a tensor of one model consists of those of another: `Fused`, `PartOf`, and what they come to.

Everything happens along one dim: of each place along it, which source it is of, and which place of
that. The copies (`moves.py`) and the checksums (`checksums.py`) both go by these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class PartOf:
    """One of the tensors of which a fused one consists.

    Args:
        name: of the fused tensor.
        sizes: of all that it consists of, along ``dim``, in their order.
        index: which of them.
        dim: along which they are fused.
        groups: in how many groups they lie one after the other: with 2, the first half of each, and
            then the second half of each.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2,))
        fused = {"kv": xd.distribute_tensor(torch.arange(8.0), mesh)}
        names = {n: xd.weights.PartOf("kv", (4, 4), i, groups=2) for i, n in enumerate("kv")}
        found = xd.transfer(fused, mesh, names=names)
        assert found["v"].full_tensor().tolist() == [2, 3, 6, 7]
    """

    name: str
    sizes: tuple[int, ...]
    index: int
    dim: int = 0
    groups: int = 1


@dataclass(frozen=True)
class Fused:
    """Several tensors as one.

    Args:
        parts: their names, or parts of fused ones, in their order.
        dim: along which they are put together.
        groups: in how many groups: with 1, all of the first and then all of the second. With as
            many as a sampler has tensor-parallel devices, each device's shard has its part of all.

    Example::

        import torch, xla_dtensor as xd

        mesh = xd.init_device_mesh("xla", (2,))
        k, v = torch.arange(2.0), torch.arange(2.0) + 9
        state = {"k": xd.distribute_tensor(k, mesh), "v": xd.distribute_tensor(v, mesh)}
        fused = xd.weights.Fused(("k", "v"), groups=2)
        found = xd.transfer(state, mesh, [xd.Shard(0)], names={"kv": fused})
        assert found["kv"].full_tensor().tolist() == [0, 9, 1, 10]
    """

    parts: tuple[str | PartOf, ...]
    dim: int = 0
    groups: int = 1


Recipe = str | PartOf | Fused


class PlacesInARow(NamedTuple):
    """Places along the dim that lie one after the other in the target and in a source.

    Attributes:
        start: in the target.
        source: the source's name.
        at: the start in the source.
        length: how many.
    """

    start: int
    source: str
    at: int
    length: int


class Places(NamedTuple):
    """What a recipe comes to.

    Attributes:
        shape: of the target.
        dim: along which it is put together.
        sources: the names.
        of: by place along the dim, which of them.
        at: and its place in that.
    """

    shape: tuple[int, ...]
    dim: int
    sources: tuple[str, ...]
    of: np.ndarray
    at: np.ndarray

    def runs(self) -> list[PlacesInARow]:
        """The places as ranges."""
        breaks = np.flatnonzero((np.diff(self.of) != 0) | (np.diff(self.at) != 1)) + 1
        starts = [0, *breaks.tolist()] if len(self.of) else []
        ends = [*starts[1:], len(self.of)] if starts else []
        return [
            PlacesInARow(a, self.sources[int(self.of[a])], int(self.at[a]), b - a)
            for a, b in zip(starts, ends, strict=True)
        ]


def sources_of(recipe: Recipe) -> tuple[str, ...]:
    """The names of the tensors that it takes."""
    if isinstance(recipe, str):
        return (recipe,)
    if isinstance(recipe, PartOf):
        return (recipe.name,)
    return tuple(name for part in recipe.parts for name in sources_of(part))


def places(name: str, recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> Places:
    """What a recipe comes to.

    Args:
        name: of the target, for messages.
        shapes: of the sources.

    Raises:
        ValueError: the sources don't fit each other, or what the recipe says of them.
    """
    if isinstance(recipe, Fused):
        return _fused(name, recipe, [places(name, part, shapes) for part in recipe.parts])
    source = recipe if isinstance(recipe, str) else recipe.name
    shape = shapes[source]
    if isinstance(recipe, str):
        length = shape[0] if shape else 1
        dim, at = 0, np.arange(length)
    else:
        dim, at = _dim(name, recipe.dim, shape), _places_of_part(name, recipe, shape)
        shape = (*shape[:dim], len(at), *shape[dim + 1 :])
    return Places(shape, dim, (source,), np.zeros(len(at), int), at)


def _places_of_part(name: str, part: PartOf, shape: tuple[int, ...]) -> np.ndarray:
    length = shape[_dim(name, part.dim, shape)]
    if sum(part.sizes) != length or not 0 <= part.index < len(part.sizes):
        raise ValueError(
            f"transfer: {name!r} is {part}, but {part.name!r} has shape {list(shape)}: its parts "
            f"have to have {length} together along dim {part.dim}, and index to be one of them"
        )
    for size in part.sizes:
        _check_groups(name, size, part.groups, part)
    ends = np.cumsum(part.sizes) // part.groups
    begin = int(ends[part.index]) - part.sizes[part.index] // part.groups
    groups = np.arange(length).reshape(part.groups, -1)
    return groups[:, begin : int(ends[part.index])].reshape(-1)


def _fused(name: str, fused: Fused, parts: list[Places]) -> Places:
    if not parts:
        raise ValueError(f"transfer: {name!r} is fused of nothing")
    dim = _dim(name, fused.dim, parts[0].shape)
    rest = [(*p.shape[:dim], *p.shape[dim + 1 :]) for p in parts]
    if any(r != rest[0] or len(p.shape) != len(parts[0].shape) for r, p in zip(rest, parts)):  # noqa: B905
        shapes = {", ".join(p.sources): list(p.shape) for p in parts}
        raise ValueError(f"transfer: {name!r} is {fused}, whose parts don't fit: {shapes}")
    rows_of, rows_at = [], []
    sources: list[str] = []
    for part, of in zip(parts, fused.parts, strict=True):
        if isinstance(of, str):  # nothing is known yet of a dim
            length = part.shape[dim]
            part = part._replace(dim=dim, of=np.zeros(length, int), at=np.arange(length))
        if part.dim != dim:
            raise ValueError(f"transfer: {name!r} is {fused}, but {of} is cut along another dim")
        _check_groups(name, part.shape[dim], fused.groups, fused)
        rows_of.append((part.of + len(sources)).reshape(fused.groups, -1))
        rows_at.append(part.at.reshape(fused.groups, -1))
        sources += part.sources
    of_all = np.concatenate(rows_of, 1).reshape(-1)
    shape = parts[0].shape
    shape = (*shape[:dim], len(of_all), *shape[dim + 1 :])
    return Places(shape, dim, tuple(sources), of_all, np.concatenate(rows_at, 1).reshape(-1))


def _dim(name: str, dim: int, shape: tuple[int, ...]) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"transfer: {name!r}: there is no dim {dim} in {list(shape)}")
    return dim % len(shape)


def _check_groups(name: str, size: int, groups: int, recipe: Recipe) -> None:
    if groups < 1 or size % groups:
        raise ValueError(f"transfer: {name!r} is {recipe}, but {size} isn't cut in {groups} groups")
