"""Shardings that XLA must be told on meshes of three or more axes, unless a program never takes
these axes apart.

Where (dp0, dp1) shard dims together and in this order in all of a program, the program is that of a
mesh with one axis in their place: XLA's partitioner sees no difference. Where `allowed`, a
pin is nothing there; see `result_placements.pins`. What a program does with its
axes is known when it has been traced, so a pin is a primitive of its own, and means something when
it is lowered.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from xla_dtensor.runtime import jax_versions

_AXES_OF_A_PLANE = 2

allowed = os.environ.get("XLA_DTENSOR_LOOSE_PINS", "0") == "1"
"""Whether steps may do without. Not by default: XLA was found to get a product wrong on two axes,
too (``bmm``, seed 114 of `tests/compilation/random_products.py`, 1 of 480 random cases)."""

_state = threading.local()

_primitive = Primitive("pin")
_primitive.def_abstract_eval(lambda value, sharding: value)
_primitive.def_impl(lambda value, sharding: jax.lax.with_sharding_constraint(value, sharding))


def pin(value: Any, sharding: Any) -> Any:
    """``value`` in ``sharding``, where XLA must be told."""
    return _primitive.bind(value, sharding=sharding)


@contextmanager
def loose() -> Iterator[None]:
    """What is lowered in this thread has no pins."""
    _state.loose = True
    try:
        yield
    finally:
        _state.loose = False


def _lower(context: Any, value: Any, *, sharding: Any) -> Any:
    if getattr(_state, "loose", False):
        return [value]
    constrain = mlir.lower_fun(
        lambda x: jax.lax.with_sharding_constraint(x, sharding), multiple_results=False
    )
    return constrain(context, value)


def _batch(values: Any, dims: Any, *, sharding: Any) -> Any:
    (value,), (dim,) = values, dims
    constrain = lambda x: jax.lax.with_sharding_constraint(x, sharding)
    return jax.vmap(constrain, in_axes=dim, out_axes=dim)(value), dim


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
    if len(sizes) <= _AXES_OF_A_PLANE:
        return False  # no pins
    names = list(sizes)
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
        if len(names) - len(together) > _AXES_OF_A_PLANE:
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
    """What a program asks of XLA on its way, pins apart."""
    for equation in jaxpr.eqns:
        if equation.primitive is _primitive:
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
            manual = jax_versions.manual_axes(equation)
            yield NamedSharding(mesh, PartitionSpec(tuple(n for n in mesh.shape if n in manual)))
