"""Lists the meshes that are tried, and what their dims may shard."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.errors import TopologyError
from xla_dtensor.tuning.configuration import Dims

NAMES = ("dp", "fsdp", "cp", "tp")
"""The dims that a mesh may have, from the outside to the inside. ``dp`` and ``fsdp`` shard the
batch, ``cp`` its second dim (sequences), ``tp`` nothing of the batch. What they shard of the
parameters and of all that is computed is found, and not said by these names."""

USUAL = ("dp", "fsdp", "tp")
"""Those that are looked at by default, and ``cp`` where the batch is smaller than the devices. What
``cp`` does, ``tp`` may, too: of the batch itself it only leaves the tokens whole. But two
dims cut what one of their product can't: 8 heads and a sequence."""


def meshes(
    count: int,
    domain: int,
    batch: Sequence[Any],
    names: Sequence[str],
    fixed: Mapping[str, int],
) -> Iterator[tuple[dict[str, int], Dims]]:
    """Meshes of so many devices, each with what its dims shard of the batch.

    Two dims that shard the batch are one, but where only the inner one's devices share a fast
    network: the parameters may be whole in each slice or host then. A mesh has three dims at the
    most.

    Args:
        count: of devices.
        domain: how many of them share a fast network (`mesh/domains.py`): a slice's, or those
            behind one switch; ``count`` where all do.
        batch: the step's arguments.
        names: those of `NAMES` that may be used.
        fixed: sizes that are given.

    Raises:
        TopologyError: a name that isn't among them.
    """
    unknown = {*names, *fixed} - {*NAMES}
    if unknown:
        raise TopologyError(
            f"a mesh dim called {', '.join(sorted(unknown))}: xd.tune's are {', '.join(NAMES)}"
        )
    used = [name for name in NAMES if name in names or name in fixed]
    shards = {"dp": 0, "fsdp": 0, "cp": 1, "tp": None}
    for mesh in factorisations(count, used, fixed):
        if sum(size > 1 for size in mesh.values()) > 3:
            continue
        inside = math.prod(size for name, size in mesh.items() if name != "dp")
        is_domain = inside == domain < count
        if mesh.get("fsdp", 1) > 1 and "fsdp" not in fixed and not is_domain:
            continue
        real = {name: size for name, size in mesh.items() if size > 1} or {used[0]: 1}
        roles = tuple(shards[name] for name in real)
        if all(_divides(roles, [*real.values()], dim, batch) for dim in (0, 1)):
            yield real, roles


def usual(count: int, batch: Sequence[Any]) -> tuple[str, ...]:
    """The dims that are looked at where none are given.

    Args:
        count: of devices.
        batch: the step's arguments.
    """
    largest = _largest(batch, 0)
    is_small = largest is not None and largest.ndim > 1 and largest.shape[0] < count
    return tuple(name for name in NAMES if name in USUAL or (name == "cp" and is_small))


def factorisations(
    count: int, names: Sequence[str], fixed: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """All sizes of so many devices by the names of a mesh's dims, those with much of the first dims
    first: of equally good ones these are taken.

    Args:
        count: of devices.
        names: of the dims.
        fixed: sizes that are given.
    """
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    choices = [[fixed[name]] if name in fixed else divisors for name in names]
    for sizes in reversed([*itertools.product(*choices)]):
        if math.prod(sizes) == count:
            yield dict(zip(names, sizes, strict=True))


def _divides(roles: Dims, sizes: Sequence[int], dim: int, batch: Sequence[Any]) -> bool:
    """Whether the devices divide the largest argument; what they don't divide is whole."""
    devices = math.prod(size for role, size in zip(roles, sizes, strict=True) if role == dim)
    largest = _largest(batch, dim)
    return devices == 1 or (largest is not None and largest.shape[dim] % devices == 0)


def _largest(batch: Sequence[Any], dim: int) -> torch.Tensor | None:
    """The largest of the arguments that have the dim."""
    leaves = pytree.tree_leaves(batch)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.ndim > dim]
    return max(tensors, key=torch.Tensor.numel, default=None)
