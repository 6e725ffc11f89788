"""Placements for sample inputs, the same ones on every run, and inputs laid out with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

Placements = tuple[Placement, ...]


def draw(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, mesh: Any) -> Placements:
    """One placement per mesh dim: a mix of all kinds, or one tensor dim cut by all mesh dims."""
    ndim = len(shape)
    if ndim and len(mesh) > 1 and rng.random() < 0.25:
        dim = rng.randrange(ndim)
        if rng.random() < 0.5:
            return tuple(Shard(dim) for _ in mesh)
        first = _StridedShard(dim, split_factor=mesh[-1])
        return (*(first for _ in mesh[:-1]), Shard(dim))
    choices: list[Placement] = [Replicate(), *(Shard(d) for d in range(ndim))]
    if dtype != torch.bool:
        reductions = ["sum", "sum", "max"] + ["avg"] * dtype.is_floating_point
        choices.append(Partial("sum" if dtype.is_complex else rng.choice(reductions)))
    return tuple(rng.choice(choices) for _ in mesh)


class Distributor:
    """Lays the tensors of one call out; a tensor that is met again is the same one again.

    Attributes:
        layouts: what was drawn, in order: shape and placements.
        pairs: the CPU tensors and what stands for them.
    """

    def __init__(self, mesh: DeviceMesh, seed: str, whole: bool = False) -> None:
        self.mesh = mesh
        self.rng = random.Random(seed)
        self.whole = whole
        self.layouts: list[str] = []
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        for known, ours in self.pairs:
            if known is value:
                return ours
        plain = value.detach().resolve_conj().resolve_neg()
        placements = draw(self.rng, tuple(value.shape), value.dtype, tuple(self.mesh.shape))
        if self.whole:
            placements = tuple(Replicate() for _ in placements)
        ours = distribute_tensor(plain, self.mesh, placements)
        ours.requires_grad_(value.requires_grad)
        self.pairs.append((value, ours))
        self.layouts.append(f"{list(value.shape)} {short(placements)}")
        return ours

    def __call__(self, value: Any) -> Any:
        return map_leaves(value, self._leaf)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if value == "cpu" or value == torch.device("cpu"):
            return torch.device("xla")
        return value


def fresh(value: Any, grad: bool) -> Any:
    """A copy of a call's tensors, strides kept; they require grad as before if ``grad``."""
    known: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in known:
            made = leaf.detach().clone()
            known[id(leaf)] = made.requires_grad_(grad and leaf.requires_grad)
        return known[id(leaf)]

    return map_leaves(value, copy)


def in_double(value: Any) -> Any:
    """A copy of a call with its floating-point tensors, and dtypes, in double precision."""
    known: dict[int, torch.Tensor] = {}

    def wide(dtype: torch.dtype) -> torch.dtype:
        if dtype.is_complex:
            return torch.complex128
        return torch.float64 if dtype.is_floating_point else dtype

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return wide(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in known:
            made = leaf.detach().clone().to(wide(leaf.dtype))
            known[id(leaf)] = made.requires_grad_(leaf.requires_grad)
        return known[id(leaf)]

    return map_leaves(value, copy)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """``function`` of everything in nested lists, tuples and dicts."""
    if isinstance(value, list):
        return [map_leaves(v, function) for v in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [map_leaves(v, function) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {k: map_leaves(v, function) for k, v in value.items()}
    return function(value)


def leaves(value: Any) -> list[Any]:
    """All that is in nested lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def short(placements: Placements) -> str:
    """``S0 R``: how a report names placements."""
    return "".join(f"[{_short(p)}]" for p in placements)


def _short(placement: Placement) -> str:
    if isinstance(placement, _StridedShard):
        return f"S{placement.dim}/{placement.split_factor}"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P{placement.reduce_op}"
    return "R"
