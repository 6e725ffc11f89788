"""Removes reshapes that merge dims from a jaxpr, until an equation needs the merged dim.

``torch.matmul`` and ``einsum`` make a product in one batch of one in several: they join the batch
and the heads, ``[B, H, L, D] -> [B * H, L, D]``, and split them again behind it. Where devices have
parts of the batch and parts of the heads, what each of them has of ``B * H`` isn't one piece, so no
sharding says it, and one of the two would have to be gathered. Here such a reshape is only noted:
elementwise operations, reductions, broadcasts, transposes and products go on with the dims that
there were (a `dot_general` takes any number of batch dims), and a reshape follows where an
operation does need them joined.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.layouts.apart import Apart, JaxprWalk, Rule, Sizes, common, flat
from xla_dtensor.layouts.factors import is_elementwise, shape_of
from xla_dtensor.layouts.parts import of_spec

_RULES: dict[str, Rule] = {}


def kept_apart(jaxpr: Any, devices: Sequence[int]) -> list[Any]:
    """``jaxpr`` with the dims that its reshapes join kept apart. Its inputs and results, and those
    of the jaxprs in its equations, are as they were. Where it is doubtful whether that is of use, a
    second one without: six heads of 32 can't be cut by four devices, and 192 can.

    Args:
        devices: along each mesh axis.
    """
    walks = [JaxprWalk(_rule_of, devices, in_doubt) for in_doubt in (True, False)]
    found = walks[0].of(jaxpr)
    return [found, walks[1].of(jaxpr)] if walks[0].doubts else [found]


def _rule_of(equation: Any) -> Rule | None:
    rule = _RULES.get(equation.primitive.name)
    return rule or (_elementwise if is_elementwise(equation) else None)


def _finest(walk: JaxprWalk, atoms: Sequence[Any]) -> list[Sizes] | None:
    """For each dim of values of one shape (some of length 1 there) the parts into which it has to
    be taken apart so that it has the parts that it has in each of them; None if there are none."""
    found: list[Sizes] = []
    for each in zip(*(walk.has(atom).dims for atom in atoms), strict=True):
        together, *others = [sizes for sizes in each if sizes] or [()]
        for other in others:
            parts = common(other, together)
            if parts is None:
                return None
            together = flat(parts)
        found.append(together)
    return found


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


@_rule("bitcast_convert_type", "scattered", "reshard")
def _needs_them_joined(walk: JaxprWalk, equation: Any) -> bool:
    return False


def _elementwise(walk: JaxprWalk, equation: Any) -> bool:
    whole = [atom for atom in equation.invars if shape_of(atom)]
    dims = None if any(map(walk.is_given, whole)) else _finest(walk, whole)
    if dims is None:
        return False
    operands = []
    for atom in equation.invars:
        ones = zip(shape_of(atom), dims, strict=False)  # a 1 splits into 1s
        own = [sizes if n != 1 else (1,) * len(sizes) for n, sizes in ones]
        operands.append(walk.split(atom, own) if own else walk.whole(atom))
    return walk.puts(operands, *[dims] * len(equation.outvars))


@_rule("optimization_barrier")
def _barrier(walk: JaxprWalk, equation: Any) -> bool:
    values = [walk.has(atom) for atom in equation.invars]
    return walk.puts([v.variable for v in values], *(v.dims for v in values))


@_rule("pin")
def _pin(walk: JaxprWalk, equation: Any) -> bool:
    """Axes that shard several dims as one shard the first of them, if they can."""
    value, sharding = walk.has(equation.invars[0]), equation.params["sharding"]
    devices = sharding.mesh.shape
    layout = of_spec(sharding.spec, len(value.dims), devices)
    if layout is None:
        return False
    names: list[Any] = []
    for sizes, axes in zip(value.dims, layout, strict=True):
        fits = sizes and sizes[0] % math.prod(devices[axis] for axis in axes) == 0
        names += [axes if fits else None, *[None] * (len(sizes) - 1)] if sizes else []
    wanted = NamedSharding(sharding.mesh, PartitionSpec(*names), memory_kind=sharding.memory_kind)
    return walk.puts([value.variable], value.dims, params={"sharding": wanted})


@_rule("transpose")
def _transpose(walk: JaxprWalk, equation: Any) -> bool:
    value, order = walk.has(equation.invars[0]), equation.params["permutation"]
    dims = [value.dims[d] for d in order]
    places = [place for d in order for place in value.places(d)]
    return walk.puts([value.variable], dims, params={"permutation": tuple(places)})


@_rule("squeeze")
def _squeeze(walk: JaxprWalk, equation: Any) -> bool:
    value, gone = walk.has(equation.invars[0]), equation.params["dimensions"]
    dims = [sizes for d, sizes in enumerate(value.dims) if d not in gone]
    walk.gives(equation.outvars[0], value.variable, dims)
    return True


@_rule("broadcast_in_dim")
def _broadcast(walk: JaxprWalk, equation: Any) -> bool:
    params, value = equation.params, walk.has(equation.invars[0])
    dims: list[Sizes] = [(n,) if n != 1 else () for n in params["shape"]]
    for d, to in enumerate(params["broadcast_dimensions"]):
        if value.dims[d]:  # () for a dim of length 1
            dims[to] = value.dims[d]
    starts = [*itertools.accumulate(map(len, dims), initial=0)]
    places = [
        starts[to] + i
        for d, to in enumerate(params["broadcast_dimensions"])
        for i in range(len(value.dims[d]))
    ]
    changed = {"shape": flat(dims), "broadcast_dimensions": tuple(places)}
    return walk.puts([value.variable], dims, params=changed)


@_rule("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
def _reduce(walk: JaxprWalk, equation: Any) -> bool:
    value, axes = walk.has(equation.invars[0]), equation.params["axes"]
    dims = [sizes for d, sizes in enumerate(value.dims) if d not in axes]
    places = tuple(place for d in axes for place in value.places(d))
    return walk.puts([value.variable], dims, params={"axes": places})


@_rule("concatenate")
def _concatenate(walk: JaxprWalk, equation: Any) -> bool:
    along, operands = equation.params["dimension"], equation.invars
    values = [walk.has(atom) for atom in operands]
    if any(len(value.dims[along]) != 1 for value in values) or any(map(walk.is_given, operands)):
        return False
    apart = [value.dims[:along] + value.dims[along + 1 :] for value in values]
    if len({*apart}) > 1:
        return False
    dims = [*values[0].dims]
    dims[along] = (shape_of(equation.outvars[0])[along],)
    (place,) = values[0].places(along)
    return walk.puts([value.variable for value in values], dims, params={"dimension": place})


@_rule("slice")
def _slice(walk: JaxprWalk, equation: Any) -> bool:
    value, params = walk.has(equation.invars[0]), equation.params
    own, result = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    cut = [d for d in range(len(own)) if own[d] != result[d] or params["start_indices"][d]]
    if any(len(value.dims[d]) != 1 or result[d] < 2 for d in cut):
        return False
    start, limit, strides = [0] * len(flat(value.dims)), [*flat(value.dims)], params["strides"]
    steps = [1] * len(start)
    dims = [*value.dims]
    for d in cut:
        (place,) = value.places(d)
        start[place], limit[place] = params["start_indices"][d], params["limit_indices"][d]
        steps[place] = strides[d] if strides else 1
        dims[d] = (result[d],)
    changed = {
        "start_indices": tuple(start),
        "limit_indices": tuple(limit),
        "strides": tuple(steps) if strides else None,
    }
    return walk.puts([value.variable], dims, params=changed)


@_rule("dot_general")
def _dot_general(walk: JaxprWalk, equation: Any) -> bool:
    atoms = equation.invars
    contracted, batches = equation.params["dimension_numbers"]
    dims = [[*walk.has(atom).dims] for atom in atoms]
    for pair in (*zip(*contracted, strict=True), *zip(*batches, strict=True)):
        joined = [walk.is_joined(atom, d) for atom, d in zip(atoms, pair, strict=True)]
        if not any(joined):
            continue
        # Merged if a weight is: two devices can shard six columns, but not three heads of two.
        if any(not j and walk.is_given(a) for j, a in zip(joined, atoms, strict=True)):
            together: Sizes = (shape_of(atoms[0])[pair[0]],)
        else:
            parts = common(dims[0][pair[0]], dims[1][pair[1]])
            if parts is None:
                return False
            together = flat(parts)
        for own, d in zip(dims, pair, strict=True):
            own[d] = together
    walk.doubts |= any(walk.can_cut(sizes) is None for own in dims for sizes in own)
    operands = [walk.split(atom, own) for atom, own in zip(atoms, dims, strict=True)]
    apart = [Apart(v, tuple(own)) for v, own in zip(operands, dims, strict=True)]
    numbers = tuple(
        tuple(
            tuple(place for d in each for place in value.places(d))
            for each, value in zip(pair, apart, strict=True)
        )
        for pair in (contracted, batches)
    )
    found = [dims[0][d] for d in batches[0]]
    for own, gone, first in zip(dims, contracted, batches, strict=True):
        found += [sizes for d, sizes in enumerate(own) if d not in gone and d not in first]
    return walk.puts(operands, found, params={"dimension_numbers": numbers})
