"""How much of each value of a trace a device has, by the shardings that the trace asks for.

An estimate: where values lie is chosen later. It tells the bytes of an activation of which each
device has a part from those of a weight that is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec

LAYS_OUT = frozenset({"pin", "sharding_constraint"})
"""Primitives that give a value in another layout."""


def shares_of(jaxpr: Any, shardings: Sequence[Any]) -> dict[Any, float]:
    """By variable: 1 where each device has all of it.

    Args:
        jaxpr: without inputs: those are constants.
        shardings: of these; None where nothing is known.
    """
    shares = dict(zip(jaxpr.constvars, map(_share, shardings), strict=True))
    for equation in jaxpr.eqns:
        if equation.primitive.name in LAYS_OUT:
            share = _share(equation.params["sharding"])
        else:
            operands = [atom for atom in equation.invars if not isinstance(atom, Literal)]
            size = max((math.prod(v.aval.shape) for v in equation.outvars), default=0)
            large = [v for v in operands if math.prod(v.aval.shape) >= size]
            share = min((shares[v] for v in large or operands), default=1.0)
        shares.update(dict.fromkeys(equation.outvars, share))
    return shares


def _share(sharding: Any) -> float:
    if not isinstance(sharding, NamedSharding):
        return 1.0
    names = [
        name
        for entry in sharding.spec
        if entry is not None and entry is not PartitionSpec.UNCONSTRAINED
        for name in (entry if isinstance(entry, tuple) else (entry,))
    ]
    return 1.0 / math.prod(sharding.mesh.shape[name] for name in names)
