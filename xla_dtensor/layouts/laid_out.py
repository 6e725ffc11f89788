"""The layout of a value as a property of the operation that makes it.

`jax.lax.with_sharding_constraint` is an operation of its own: XLA reads, propagates through,
partitions and removes it. A step has one for each value, which took a fifth of the time that XLA
compiles a transformer in. Shardy takes a sharding that stands at an operation's result as the same
wish, so that is where it goes. It is a constraint where a value has no operation to itself (an
argument, one of several results), where that has been asked for another layout, and where no dim is
cut: Shardy takes that for no wish at all, unless it is a constraint.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive, Var, new_jaxpr_eqn, no_effects
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir
from jax.sharding import NamedSharding

_primitive = Primitive("laid_out")
_primitive.def_abstract_eval(lambda value, **_: value)
_primitive.def_impl(lambda value, sharding: jax.lax.with_sharding_constraint(value, sharding))

SHARDING = "sdy.sharding"
"""The attribute of an operation that says how its results lie."""

_NOT_OWN = ("stablehlo.constant", "stablehlo.case", "stablehlo.if", "stablehlo.while")
"""JAX makes a constant once for all who use it; the others' results are made inside of them."""


def laid_out(variable: Any, sharding: NamedSharding, of: JaxprEqn | None = None) -> JaxprEqn:
    """An equation whose result is a variable's value that lies so.

    Args:
        of: the equation that it is for, whose module and line it has then.
    """
    source = None if of is None else of.source_info
    result = Var(variable.aval)
    return new_jaxpr_eqn(
        [variable], [result], _primitive, {"sharding": sharding}, no_effects, source
    )


def _lower(context: Any, value: Any, *, sharding: NamedSharding) -> Any:
    (aval,) = context.avals_in
    if any(sharding.spec):  # Shardy doesn't take "whole on every device" from an operation
        operation = _own_operation(value, aval)
        if operation is not None and SHARDING not in operation.attributes:
            asked = sdy.TensorShardingPerValueAttr.get([_attribute(sharding, aval.ndim)])
            operation.attributes[SHARDING] = asked
            return [value]
    constrain = mlir.lower_fun(
        lambda x: jax.lax.with_sharding_constraint(x, sharding), multiple_results=False
    )
    return constrain(context, value)


def _own_operation(value: Any, aval: Any) -> Any:
    """The operation that makes a value and nothing else; None if there is none."""
    operation = getattr(value.owner, "operation", None)  # None of a function's argument
    if operation is None or len(operation.results) != 1:
        return None
    if not operation.name.startswith("stablehlo.") or operation.name in _NOT_OWN:
        return None
    # PRNG keys have one dim more than JAX says.
    return None if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) else operation


def _attribute(sharding: NamedSharding, ndim: int) -> Any:
    """A sharding in Shardy's words, each dim by these axes and no others."""
    mesh = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(*axis) for axis in sharding.mesh.shape.items()])
    spec = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    by_dim = [(names,) if isinstance(names, str) else names or () for names in spec]
    dims = [
        sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(name) for name in names], is_closed=True)
        for names in by_dim
    ]
    return sdy.TensorShardingAttr.get(mesh, dims)


# Not cacheable: what is cached is lowered by itself, as a function whose argument the value is.
mlir.register_lowering(_primitive, _lower, cacheable=False)
