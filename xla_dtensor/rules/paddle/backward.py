"""Rules applied backwards: from the layout wanted of the results to layouts for the arguments.

A rule that lists alternatives is read with inputs and outputs swapped. Any other rule is asked
forwards, one mesh dim at a time, which shard of its arguments gives the wanted one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.tensor import Partial, Placement

from xla_dtensor.base.torch_private import OpOverload
from xla_dtensor.rules.alternatives import Alternative, Merged, merge
from xla_dtensor.rules.call import Call, bind
from xla_dtensor.rules.infer import ask
from xla_dtensor.rules.merging import (
    REPLICATE,
    Placements,
    TensorInfo,
    make_shard,
    replicated,
    shard_dim,
    split_factor,
)
from xla_dtensor.rules.registry import UserRule, find_rule


@dataclass(frozen=True)
class _Backward(Call):
    """A call whose results' layouts are given, and whose merge asks for its arguments'."""

    wanted: tuple[TensorInfo, ...] = ()
    merged: list[bool] = field(default_factory=list)

    def merge(
        self, options: Sequence[Alternative], *, new_shards: bool = False, settled: bool = False
    ) -> Merged:
        self.merged.append(True)
        swapped = [
            Alternative(option.inputs, option.outputs)
            for option in options
            if not any(isinstance(p, Partial) for p in option.outputs + option.inputs)
        ]
        result = merge(swapped, self.wanted, len(self.tensors), self.mesh_shape)
        return Merged(result.outputs, result.inputs)


def infer_arguments(
    func: OpOverload,
    args: tuple,
    kwargs: dict,
    results: Sequence[TensorInfo],
    mesh_shape: tuple[int, ...],
) -> Merged | None:
    """Layouts of the tensor arguments from which `func` makes `results` laid out as they are.

    The arguments' own placements count for nothing. A mesh dim on which no argument layout gives
    the wanted result (or on which it is partial) is replicated; None if `func` has no rule.
    """
    rule = find_rule(func)
    if rule is None:
        return None
    bare = _with_placements(bind(func, args, kwargs), replicated(mesh_shape))
    shapes = [r.shape for r in results]
    given = args, kwargs
    call = _Backward(func, bare, shapes, mesh_shape, given=given, wanted=tuple(results))
    found = ask(rule, call)
    if found is None or call.merged:
        return found
    return _search(
        rule, Call(func, bare, shapes, mesh_shape, given=given), [r.placements for r in results]
    )


def _search(rule: UserRule, call: Call, wanted: Sequence[Placements]) -> Merged | None:
    """Mesh dims in order, each taking the first shard that gives what is wanted of it."""
    layout: list[Placement] = [REPLICATE] * len(call.mesh_shape)
    best = ask(rule, call)
    ndim = max((t.ndim for t in call.tensors), default=0)
    for mesh_dim in range(len(call.mesh_shape)):
        if all(shard_dim(w[mesh_dim]) is None for w in wanted):
            continue
        factors = {1} | {split_factor(w[mesh_dim]) for w in wanted}
        for dim, factor in itertools.product(range(ndim), sorted(factors)):
            layout[mesh_dim] = make_shard(dim, factor)
            tried = ask(rule, replace(call, args=_with_placements(call.args, tuple(layout))))
            if tried is not None and all(
                out[: mesh_dim + 1] == _reached(layout, want, mesh_dim)
                for out, want in zip(tried.outputs, wanted, strict=True)
            ):
                best = tried
                break
        else:
            layout[mesh_dim] = REPLICATE
    return best


def _reached(layout: list[Placement], want: Placements, mesh_dim: int) -> Placements:
    """What is wanted of the mesh dims so far, those given up replicated."""
    kept = zip(layout, want[: mesh_dim + 1], strict=False)
    return tuple(w if p != REPLICATE else REPLICATE for p, w in kept)


def _with_placements(args: dict[str, Any], placements: Placements) -> dict[str, Any]:
    return {name: next(_laid_out([value], placements)) for name, value in args.items()}


def _laid_out(values: Sequence[Any], placements: Placements) -> Iterator[Any]:
    for value in values:
        if isinstance(value, TensorInfo):
            dims = (shard_dim(p) for p in placements)
            fits = [dim is None or dim < value.ndim for dim in dims]
            own = (p if ok else REPLICATE for p, ok in zip(placements, fits, strict=True))
            yield replace(value, placements=tuple(own))
        elif isinstance(value, (list, tuple)):
            yield type(value)(_laid_out(value, placements))
        else:
            yield value
