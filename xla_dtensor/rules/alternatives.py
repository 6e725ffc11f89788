"""Merging input shardings: pick, for every mesh dim, one of the op's alternatives.

An `Alternative` says what *one* mesh dim may do to all the tensors of an op at once: "shard the
rows of the first input and of the output", "shard the contracted dim of both; the output is
partial". A mesh dim takes exactly one of them, which is why no tensor can come to use a mesh dim
twice. Among the combinations the cheapest redistribution of the inputs wins, and the larger
tensor therefore stays where it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Partial, Placement

from xla_dtensor.rules.cost import redistribute_cost
from xla_dtensor.rules.merging import (
    REPLICATE,
    Placements,
    TensorInfo,
    make_shard,
    shard_dim,
    split_factor,
)

MAX_COMBINATIONS = 1024
"""Beyond this many, only alternatives that keep some input in place are weighed."""


@dataclass(frozen=True)
class Alternative:
    """What one mesh dim may do to all tensors of an op at once; `Call.merge` takes some.

    Attributes:
        outputs: per result its placement on that mesh dim.
        inputs: per tensor argument its placement on that mesh dim.
        exchanges: whether shards need values of each other, though all of them stay as they are.

    Example::

        import torch, xla_dtensor as xd

        def by_rows(call):
            return call.merge([xd.rules.Alternative((xd.Shard(0),), (xd.Shard(0),))])

        xd.register_rule("aten::cumprod", by_rows, override=True)
        mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
        x = xd.distribute_tensor(torch.ones(8, 4), mesh, [xd.Shard(0), xd.Shard(0)])
        assert x.cumprod(1).placements == (xd.Shard(0), xd.Shard(0))
    """

    outputs: Placements
    inputs: Placements
    exchanges: bool = False


@dataclass(frozen=True)
class Merged:
    """What a rule says of one call: the layouts its inputs are used in, and its outputs'.

    Attributes:
        inputs: per tensor argument its placements, one per mesh dim.
        outputs: per result its placements.
        exchanges: whether computing needs communication that the layouts don't show.

    Example::

        import torch, xla_dtensor as xd

        rows = xd.rules.Merged(inputs=((xd.Shard(0),),), outputs=((xd.Shard(0),),))
        xd.register_rule("aten::cumprod", lambda call: rows, override=True)
        mesh = xd.init_device_mesh("xla", (8,), mesh_dim_names=("dp",))
        x = xd.distribute_tensor(torch.ones(8, 4), mesh, [xd.Shard(1)])
        assert x.cumprod(1).placements == (xd.Shard(0),)  # redistributed first
    """

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    exchanges: bool = False


def merge(
    alternatives: Iterable[Alternative],
    inputs: Sequence[TensorInfo],
    n_outputs: int,
    mesh_shape: Sequence[int],
    *,
    new_shards: bool = False,
    settled: bool = False,
) -> Merged:
    """The cheapest combination; replicating everything is always among them.

    With `settled` a mesh dim on which the inputs have one of the alternatives keeps it, whatever
    the others need.

    A reduction of partial values may end in shards (a reduce-scatter): with `new_shards` always,
    else only where the inputs have shards already.
    """
    options = _options(alternatives, inputs, n_outputs, new_shards)
    exact = _exact(options, inputs, len(mesh_shape))
    per_mesh_dim = tuple(option for option in exact if option is not None)
    consistent = _consistent(per_mesh_dim)
    if len(per_mesh_dim) < len(mesh_shape) or not consistent:
        kept = exact if settled and consistent else [None] * len(mesh_shape)
        per_mesh_dim = _cheapest(options, kept, inputs, mesh_shape)
    return Merged(
        tuple(tuple(a.inputs[i] for a in per_mesh_dim) for i in range(len(inputs))),
        tuple(tuple(a.outputs[i] for a in per_mesh_dim) for i in range(n_outputs)),
        any(a.exchanges for a in per_mesh_dim),
    )


def _options(
    alternatives: Iterable[Alternative],
    inputs: Sequence[TensorInfo],
    n_outputs: int,
    new_shards: bool,
) -> list[Alternative]:
    """`alternatives` for the kinds of shard that the inputs have.

    A strided shard (an order of mesh dims) passes through where a plain one does.
    """
    factors = {
        split_factor(p): None
        for info in inputs
        for p in info.placements
        if shard_dim(p) is not None
    }
    if new_shards:
        factors[1] = None
    options = [Alternative((REPLICATE,) * n_outputs, (REPLICATE,) * len(inputs))]
    for alternative in alternatives:
        slots = alternative.outputs + alternative.inputs
        if any(shard_dim(p) is not None for p in slots):
            options += [_strided(alternative, factor) for factor in factors]
        else:
            options.append(alternative)
    return list(dict.fromkeys(options))


def _strided(alternative: Alternative, factor: int) -> Alternative:
    def convert(slots: Placements) -> Placements:
        return tuple(p if (dim := shard_dim(p)) is None else make_shard(dim, factor) for p in slots)

    return replace(
        alternative, outputs=convert(alternative.outputs), inputs=convert(alternative.inputs)
    )


def _exact(
    options: list[Alternative], inputs: Sequence[TensorInfo], mesh_ndim: int
) -> list[Alternative | None]:
    """Per mesh dim the alternative that takes the inputs as they are, if there is one."""
    by_inputs = {option.inputs: option for option in options}
    return [
        by_inputs.get(tuple(info.placements[mesh_dim] for info in inputs))
        for mesh_dim in range(mesh_ndim)
    ]


def _cheapest(
    options: list[Alternative],
    kept: Sequence[Alternative | None],
    inputs: Sequence[TensorInfo],
    mesh_shape: Sequence[int],
) -> tuple[Alternative, ...]:
    """The combination for which the inputs move least, with what is ``kept`` of it."""
    costs: dict[tuple[int, Placements], float] = {}

    def cost(combination: tuple[Alternative, ...], bound: float) -> float:
        """Of all inputs, or of those that already reach ``bound``."""
        total = 0.0
        for i, info in enumerate(inputs):
            target = tuple(option.inputs[i] for option in combination)
            if (i, target) not in costs:
                costs[i, target] = (
                    redistribute_cost(info, target, mesh_shape)
                    if _shardable(info, target, mesh_shape)
                    else float("inf")
                )
            total += costs[i, target]
            if total >= bound:
                break
        return total

    per_mesh_dim = [options if own is None else [own] for own in kept]
    if math.prod(map(len, per_mesh_dim)) > MAX_COMBINATIONS:
        per_mesh_dim = [
            _keeping(options, inputs, m) if own is None else [own] for m, own in enumerate(kept)
        ]
    candidates = itertools.product(*per_mesh_dim)
    best, best_cost = (options[0],) * len(mesh_shape), float("inf")
    for combination in candidates:
        if (this := cost(combination, best_cost)) < best_cost and _consistent(combination):
            best, best_cost = combination, this
    return best


def _keeping(
    options: list[Alternative], inputs: Sequence[TensorInfo], mesh_dim: int
) -> list[Alternative]:
    """The alternatives that leave some input, which is not replicated, as it is."""
    here = [info.placements[mesh_dim] for info in inputs]
    keeping = [
        option
        for option in options[1:]
        if any(p != REPLICATE and p == q for p, q in zip(option.inputs, here, strict=True))
    ]
    return [options[0], *keeping]


def _shardable(info: TensorInfo, target: Placements, mesh_shape: Sequence[int]) -> bool:
    """A tensor may keep any shard, but is cut anew only where every device gets something."""
    if target == info.placements:
        return True
    shards: dict[int, int] = {}
    for placement, n in zip(target, mesh_shape, strict=True):
        dim = shard_dim(placement)
        if dim is not None:
            shards[dim] = shards.get(dim, 1) * n
    return all(info.shape[dim] >= n for dim, n in shards.items())


def _consistent(combination: tuple[Alternative, ...]) -> bool:
    """No tensor is partial by two reductions that do not commute (sum and avg do)."""
    if len(combination) < 2:
        return True
    slots = zip(*(option.outputs + option.inputs for option in combination), strict=True)
    return all(_commute(placements) for placements in slots)


def _commute(placements: Iterable[Placement]) -> bool:
    reductions = {(type(p), p.reduce_op) for p in placements if isinstance(p, Partial)}
    return len(reductions) <= 1 or (
        len({kind for kind, _ in reductions}) == 1
        and {op for _, op in reductions} == {"sum", "avg"}
    )
