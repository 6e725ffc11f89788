"""Torch's own DTensor propagation, asked in one process: a fake process group, real dispatch.

Values are garbage; only the placements of the results mean something.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves, tree_map_only

from xla_dtensor.rules import TensorInfo

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class T:
    """A tensor argument of a case."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    partials: tuple[str, ...] = ("sum",)
    dims: tuple[int, ...] | None = None
    """The dims to shard: all, if None."""


@dataclass
class Case:
    name: str
    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    dispatched: bool = True
    """Whether the op reaches DTensor under this name on the CPU, where a few are taken apart."""

    @property
    def slots(self) -> list[T]:
        return [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, T)]


def _fill(case: Case, values: Iterator[Any]) -> Any:
    return tree_map_only(T, lambda _: next(values), (case.args, case.kwargs))


def choices(slot: T) -> list[Placement]:
    shards = [Shard(d) for d in (range(len(slot.shape)) if slot.dims is None else slot.dims)]
    return [Replicate(), *shards, *(Partial(op) for op in slot.partials)]


def layouts(case: Case, mesh_ndim: int, limit: int, seed: int = 0) -> list[list[Placements]]:
    """Every combination of placements, or a seeded sample of `limit` of them."""
    per_tensor = [
        [p for p in itertools.product(choices(slot), repeat=mesh_ndim) if _one_reduction(p)]
        for slot in case.slots
    ]
    total = 1
    for options in per_tensor:
        total *= len(options)
    if total <= limit:
        return [list(combination) for combination in itertools.product(*per_tensor)]
    rng = random.Random(f"{case.name}/{seed}")
    return [[rng.choice(options) for options in per_tensor] for _ in range(limit)]


def _one_reduction(placements: Sequence[Placement]) -> bool:
    return len({p.reduce_op for p in placements if isinstance(p, Partial)}) <= 1


def _distributed(slot: T, mesh: DeviceMesh, placements: Placements) -> DTensor:
    size = torch.Size(slot.shape)
    local, _ = compute_local_shape_and_global_offset(size, mesh, placements)
    stride = torch.empty(slot.shape, device="meta").stride()
    value = torch.zeros(tuple(local), dtype=slot.dtype)
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=size, stride=stride)


def torch_says(
    case: Case, mesh: DeviceMesh, placements: Sequence[Placements]
) -> list[tuple[tuple[int, ...], Placements] | None] | Exception:
    """The shapes and placements of the results under torch's DTensor, or what it raised."""
    tensors = [_distributed(s, mesh, p) for s, p in zip(case.slots, placements, strict=True)]
    args, kwargs = _fill(case, iter(tensors))
    try:
        if not case.dispatched:
            return _propagated(case.func, args, kwargs)
        result = case.func(*args, **kwargs)
    except Exception as error:
        return error
    return [
        None if r is None else (tuple(r.shape), r.placements)
        for r in tree_leaves(result)
        if r is None or isinstance(r, DTensor)
    ]


def _propagated(
    func: torch._ops.OpOverload, args: tuple, kwargs: dict
) -> list[tuple[tuple[int, ...], Placements] | None]:
    dispatcher = DTensor._op_dispatcher
    schema = dispatcher.unwrap_to_op_info(func, args, kwargs).schema
    spec = dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema).output_spec
    specs = spec if isinstance(spec, (list, tuple)) else [spec]
    return [None if s is None else (tuple(s.shape), s.placements) for s in specs]


def our_arguments(case: Case, placements: Sequence[Placements]) -> tuple[tuple, dict]:
    infos = [
        TensorInfo(slot.shape, p, slot.dtype)
        for slot, p in zip(case.slots, placements, strict=True)
    ]
    return _fill(case, iter(infos))
