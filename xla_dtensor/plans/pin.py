"""Pins: shardings that XLA must be told, because it otherwise computes or compiles wrongly.

A value is asked for *exactly* as a rule says, or it is *held*: its dims keep the axes that they
have, and XLA may shard them further, and those that have none; or it is *free*. What is needed
depends on what the whole program does with its axes, which is known when it has been traced: where
(dp0, dp1) shard dims together and in this order in all of a program, the program is that of a mesh
with one axis in their place, and XLA's partitioner sees no difference. So a pin is a primitive of
its own, and means something when it is lowered: as it says, `loose` (a program that takes no axes
apart), or `tight` (a program that XLA doesn't compile otherwise). Which operations need what says
`base/xla_faults.py`.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.base.jax_private import manual_axes
from xla_dtensor.base.strictness import Ask, Strictness
from xla_dtensor.base.xla_faults import PRODUCTS

PLANE = PRODUCTS.axes[0] - 1
"""Axes of a mesh on which XLA goes wrong in batches and convolutions alone."""


Pin = Callable[[Any, Any], Any]
"""Gives a value in a sharding."""

_primitive = Primitive("pin")
_primitive.def_abstract_eval(lambda value, **_: value)


@_primitive.def_impl
def _run(value: Any, *, sharding: Any, strictness: Strictness, loose: Strictness) -> Any:
    return (
        jax.lax.with_sharding_constraint(value, sharding)
        if strictness is Strictness.EXACT
        else value
    )


def pin(how: Ask) -> Pin:
    """What asks for shardings so."""
    return lambda value, sharding: _primitive.bind(
        value, sharding=sharding, strictness=how.strictness, loose=how.loose
    )


_state = threading.local()


@contextmanager
def _lowering(how: str) -> Iterator[None]:
    before = getattr(_state, "how", None)
    _state.how = how
    try:
        yield
    finally:
        _state.how = before


loose = functools.partial(_lowering, "loose")
"""What is lowered in this thread takes no axes apart."""

tight = functools.partial(_lowering, "tight")
"""In what is lowered in this thread all is exactly as the rules say."""


def _lower(
    context: Any, value: Any, *, sharding: Any, strictness: Strictness, loose: Strictness
) -> Any:
    how = getattr(_state, "how", None)
    strictness = Strictness.EXACT if how == "tight" else loose if how == "loose" else strictness
    if strictness is Strictness.HELD and not any(_groups(sharding.spec)):
        strictness = Strictness.FREE
    if strictness is Strictness.FREE:
        return [value]
    constrain = mlir.lower_fun(
        lambda x: jax.lax.with_sharding_constraint(x, sharding), multiple_results=False
    )
    results = constrain(context, value)
    if strictness is Strictness.HELD:
        _open(results[0].owner)
    return results


def _open(constraint: Any) -> None:
    """JAX has no word for "these axes first, and any others"."""
    sharding = sdy.TensorShardingAttr(constraint.attributes["sharding"])
    dims = [
        sdy.DimensionShardingAttr.get(list(sdy.DimensionShardingAttr(dim).axes), is_closed=False)
        for dim in sharding.dimension_shardings
    ]
    constraint.attributes["sharding"] = sdy.TensorShardingAttr.get(sharding.mesh_or_ref, dims)


def _batch(values: Any, dims: Any, *, sharding: Any, **strictness: Strictness) -> Any:
    (value,), (dim,) = values, dims
    spec: list[Any] = [*sharding.spec, *[None] * (value.ndim - 1 - len(sharding.spec))]
    spec.insert(dim, PartitionSpec.UNCONSTRAINED)
    sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return _primitive.bind(value, sharding=sharding, **strictness), dim


mlir.register_lowering(_primitive, _lower)
batching.primitive_batchers[_primitive] = _batch


# --- what a program does with its axes -----------------------------------------------------------


def may_be_loose(jaxpr: Any, mesh: Any, shardings: Iterable[Any]) -> bool:
    """Whether a program uses a mesh of three or more axes as one of two.

    Args:
        jaxpr: the program.
        mesh: the JAX mesh that it runs on.
        shardings: of its inputs and outputs.
    """
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    names = list(sizes)
    if len(names) <= PLANE:
        return False  # no pins
    together = set(itertools.pairwise(names))  # neighbours that nothing has parted
    for sharding in (*shardings, *_shardings(jaxpr)):
        if sharding is None:
            continue
        if not isinstance(sharding, NamedSharding):
            return False
        if dict(sharding.mesh.shape) != dict(mesh.shape):
            return False  # another factorisation of the same devices
        for axes in _groups(sharding.spec):
            together -= {pair for pair in together if _parts(axes, pair, sizes)}
        if len(names) - len(together) > PLANE:
            return False
    return True


def _parts(axes: tuple[str, ...], pair: tuple[str, str], sizes: dict[str, int]) -> bool:
    """Whether ``axes``, which shard one dim, aren't both of a pair in its order, or none."""
    axes = tuple(name for name in axes if name in sizes)
    first, second = pair
    if first not in axes and second not in axes:
        return False
    return pair not in itertools.pairwise(axes)


def _groups(spec: PartitionSpec) -> Iterator[tuple[str, ...]]:
    for entry in spec:
        if isinstance(entry, str):
            yield (entry,)
        elif isinstance(entry, tuple):
            yield entry


def _shardings(jaxpr: Any) -> Iterator[Any]:
    """What a program asks of XLA on its way, but for pins that are none in a loose one."""
    for equation in jaxpr.eqns:
        if equation.primitive is _primitive and equation.params["loose"] is not Strictness.EXACT:
            continue
        if equation.primitive.name == "cut":
            yield from equation.params["call"].shardings()
            continue
        mesh = equation.params.get("mesh")
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda x: isinstance(x, PartitionSpec | NamedSharding)
        ):
            if isinstance(value, NamedSharding):
                yield value
            elif isinstance(value, PartitionSpec):
                yield NamedSharding(mesh, value)
            elif hasattr(value, "eqns"):
                yield from _shardings(value)
            elif hasattr(value, "jaxpr"):
                yield from _shardings(value.jaxpr)
        if equation.primitive.name == "shard_map":
            # Each device by itself along these: as if they sharded a dim.
            manual = manual_axes(equation)
            yield NamedSharding(mesh, PartitionSpec(tuple(n for n in mesh.shape if n in manual)))
