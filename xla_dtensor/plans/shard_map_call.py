"""Calls an operation under ``jax.shard_map`` where XLA's partitioner does badly or wrong.

Those are loops over blocks, kernels, attention.

Each device computes the shards that the operation's rule gives
it, and what the rule calls ``Partial`` is summed up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.lax import optimization_barrier
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.forms.form import Form
from xla_dtensor.lowering.context import Axes, Target, at
from xla_dtensor.lowering.kinds import Kind, is_
from xla_dtensor.lowering.workarounds import CALLS_PER_SHARD
from xla_dtensor.mesh import Frame, dim_axes, frame_of, mesh_dim_axes
from xla_dtensor.plans.result_placements import Answer, Query, has_users_rule, representable
from xla_dtensor.rules import Merged

Placements = tuple[Placement, ...]
TensorAxes = tuple[Axes, ...]


def platform_of(frame: Frame | None) -> str:
    """JAX's name of the platform of a frame's devices; of the process's, where there is none."""
    if frame is None:
        return str(jax.default_backend())
    return str(frame.jax_mesh.devices.flat[0].platform)


class ShardMapCall:
    """How an operation is called on shards.

    Args:
        frame: the devices.
        leaves: per leaf of the call the axes that shard each of its dims; None of a number.
        results: the same per result.
        sums: per result the axes along which devices have parts of a sum.
        padded: whether a leaf comes in uneven shards, which XLA may look behind
            (`base/xla_faults.py:PADDED_OPERANDS`).
        query: what the rule is asked, which knows other ways to cut the operation.
    """

    def __init__(
        self,
        frame: Frame,
        leaves: list[TensorAxes | None],
        results: list[TensorAxes | None],
        sums: list[Axes],
        padded: bool,
        query: Query,
    ) -> None:
        self._frame, self._leaves, self._results, self._sums = frame, leaves, results, sums
        self._padded, self._query = padded, query
        self._place = Target(platform_of(frame), [axes for axes in leaves if axes is not None])
        self.on_one = Target(self._place.platform)
        self._others: dict[Any, ShardMapCall] = {}

    def call(
        self,
        lowered: Callable[[Any, list[Any]], tuple[list[Any], list[Any]]],
        keys: Callable[[], Any] | None,
        values: list[Any],
    ) -> list[Any]:
        """The results of ``lowered``, which is called with shards of ``values``.

        Args:
            lowered: takes what gives PRNG keys, and the leaves.
            keys: gives a PRNG key; None if it needs none.
            values: the leaves, whole.
        """
        arrays = [v for v in values if isinstance(v, jax.Array)]
        numbers = tuple(None if isinstance(v, jax.Array) else v for v in values)
        key = [] if keys is None else [keys()]
        results: list[Any] = _primitive.bind(
            *key, *arrays, call=self, lowered=lowered, numbers=numbers, keyed=bool(key)
        )
        return results

    def on_shards(
        self,
        *operands: Any,
        lowered: Callable[[Any, list[Any]], tuple[list[Any], list[Any]]],
        numbers: tuple[Any, ...],
        keyed: bool,
    ) -> list[Any]:
        """The results of ``lowered``, by ``jax.shard_map``."""
        spec = jax.sharding.PartitionSpec

        def run(*shards: Any) -> list[Any]:
            key, shards = (shards[0], shards[1:]) if keyed else (None, shards)
            arrays = iter(shards)
            leaves = [next(arrays) if number is None else number for number in numbers]
            with at(self._place):
                fresh, _ = lowered(lambda: key, leaves)
            return [
                jax.lax.psum(x, axes) if axes else x
                for x, axes in zip(fresh, self._sums, strict=True)
            ]

        pairs = [
            (axes, spec() if axes is None else _spec(axes))
            for axes, number in zip(self._leaves, numbers, strict=True)
            if number is None
        ]
        cut = jax.shard_map(
            run,
            mesh=self._frame.jax_mesh,
            in_specs=(*[spec()] * keyed, *(own for _, own in pairs)),
            out_specs=[spec() if axes is None else _spec(axes) for axes in self._results],
            check_vma=False,
        )
        if self._padded:
            arrays = zip(operands[keyed:], pairs, strict=True)
            hidden = [x if axes is None else optimization_barrier(x) for x, (axes, _) in arrays]
            operands = (*operands[:keyed], *hidden)
        return list(cut(*operands))

    def shardings(self) -> Iterator[jax.sharding.NamedSharding]:
        """Those of all operands and results; and each device computes by itself along all axes, as
        if they sharded a dim."""
        frame = self._frame
        for axes in (*self._leaves, *self._results):
            if axes is not None:
                yield frame.sharding(*(names or None for names in axes))
        yield frame.sharding(tuple(frame.sizes))

    @functools.cached_property
    def alternatives(self) -> list[Merged]:
        """How one mesh dim may cut the operation: what its rule says where it cuts one dim of one
        tensor."""
        shapes = self._query.tensors
        whole: list[tuple[Placement, ...]] = [(Replicate(),)] * len(shapes)
        found = []
        for i, shape in enumerate(shapes):
            for dim in range(len(shape)):
                given = [*whole[:i], (Shard(dim),), *whole[i + 1 :]]
                merged = self._query.ask(given, (2,))
                if merged is not None:
                    found.append(merged)
        return list(dict.fromkeys(found))

    def argument(self, name: str) -> Any:
        """What the operation is given by that name; None if it takes none."""
        return self._query.argument(name)

    def tensors_among(self, numbers: Sequence[Any], keyed: bool) -> list[int]:
        """Which operands of the primitive are tensors: others are a PRNG key, and numbers that are
        inputs of the program."""
        leaves = zip(self._leaves, numbers, strict=True)
        operands = [axes for axes, number in leaves if number is None]
        return [i for i, axes in enumerate(operands, int(keyed)) if axes is not None]

    def laid_out(
        self, tensors: Sequence[TensorAxes], results: Sequence[TensorAxes], sums: Sequence[Axes]
    ) -> ShardMapCall:
        """The same call of tensors that are cut otherwise; this one, if its rule doesn't have it
        that results are cut so then, or shards would be uneven. Layers alike get the same one, and
        it is traced and lowered once for all of them."""
        wanted = tuple(tensors), tuple(results), tuple(sums)
        if wanted not in self._others:
            self._others[wanted] = self._laid_out(*wanted)
        return self._others[wanted]

    def _laid_out(
        self, tensors: Sequence[TensorAxes], results: Sequence[TensorAxes], sums: Sequence[Axes]
    ) -> ShardMapCall:
        sizes = self._frame.sizes

        def placements(axes: TensorAxes, summed: Axes = ()) -> tuple[Placement, ...]:
            dims = {axis: dim for dim, names in enumerate(axes) for axis in names}
            return tuple(
                Partial() if axis in summed else Shard(dims[axis]) if axis in dims else Replicate()
                for axis in sizes
            )

        wanted = [placements(axes) for axes in tensors]
        given = [placements(axes, own) for axes, own in zip(results, sums, strict=True)]
        merged = self._query.ask(wanted, tuple(sizes.values()))
        if merged is None or [*merged.inputs] != wanted or [*merged.outputs] != given:
            return self
        for shape, axes in zip(self._query.tensors, tensors, strict=True):
            for size, names in zip(shape, axes, strict=False):
                if size % math.prod(sizes[axis] for axis in names):
                    return self
        own = iter(tensors)
        leaves = [None if axes is None else next(own) for axes in self._leaves]
        return ShardMapCall(
            self._frame, leaves, list(results), list(sums), self._padded, self._query
        )


_primitive = Primitive("cut")
"""An operation on shards. How it is cut may be chosen anew until it is lowered
(`layouts/constrain.py`)."""
_primitive.multiple_results = True


@_primitive.def_impl
def _run(*operands: Any, call: ShardMapCall, **how: Any) -> list[Any]:
    return call.on_shards(*operands, **how)


@_primitive.def_abstract_eval
def _shapes(*avals: Any, call: ShardMapCall, **how: Any) -> list[Any]:
    found = jax.eval_shape(functools.partial(call.on_shards, **how), *avals)
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in found]


def inside(equation: Any) -> Any:
    """The jaxpr that an equation of the primitive is lowered to, which calls the operation on
    shards."""
    params = {**equation.params}
    run = functools.partial(params.pop("call").on_shards, **params)
    return jax.make_jaxpr(run)(*[v.aval for v in equation.invars]).jaxpr


def _batch(operands: Any, dims: Any, *, call: ShardMapCall, **how: Any) -> tuple[Any, Any]:
    results = jax.vmap(functools.partial(call.on_shards, **how), in_axes=dims)(*operands)
    return results, [0] * len(results)


mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[_primitive] = _batch


def cut_of(answer: Answer | None) -> ShardMapCall | None:
    """How to call an operation on shards, if its kind needs that."""
    if answer is None:
        return None
    call, mesh = answer.call, answer.mesh
    sliced = is_(Kind.SLICED, call.info.name)
    if sliced and CALLS_PER_SHARD.concerns(platform_of(frame_of(mesh))):
        return None  # the lowering calls shard by shard itself, uneven shards included
    if not sliced and not is_(Kind.CUT, call.info.name):
        return None
    merged = answer.merged
    if merged is None:
        return None
    if call.info.func.namespace == "aten" and has_users_rule(call.info.func):
        # A user's rule says where arguments and results lie, not that each shard of the result
        # needs only its shards of the arguments (keys may be sharded by position). XLA partitions
        # these, which have no loops (`result_placements.pins`).
        return None
    shapes = [form.shape for form in call.forms if isinstance(form, Form)]
    if any(0 in shape for shape in shapes):
        # Nothing to cut, and XLA fails on it: it makes empty shards constants ("expected at least
        # one operand ... GlobalToLocalShape", JAX 0.10).
        return None
    outputs = [
        ((), (Replicate(),) * mesh.ndim) if meta is None else (meta.shape, placements)
        for meta, placements in zip(answer.metas, merged.outputs, strict=True)
    ]
    every = [*zip(shapes, merged.inputs, strict=True), *outputs]
    whole = _uneven(every, mesh)
    if sliced and whole:
        return None  # XLA communicates; in shard_map every device would compute everything
    # Partial inputs are reduced before, so they are whole along these mesh dims.
    whole |= {i for inputs in merged.inputs for i, p in enumerate(inputs) if p.is_partial()}
    axes = [_axes(shape, placements, mesh, whole) for shape, placements in every]
    inputs = iter(axes)
    leaves = [next(inputs) if isinstance(form, Form) else None for form in call.forms]
    of_dims = mesh_dim_axes(mesh)
    sums = [
        tuple(
            name
            for dim, placement in enumerate(placements)
            if placement.is_partial() and dim not in whole
            for name in of_dims[dim]
        )
        for _, placements in outputs
    ]
    padded = any(isinstance(form, Form) and form.padded_shape != form.shape for form in call.forms)
    query = Query(call, answer.metas)
    return ShardMapCall(frame_of(mesh), leaves, list(inputs), sums, padded, query)


def _spec(axes: TensorAxes) -> jax.sharding.PartitionSpec:
    return jax.sharding.PartitionSpec(*(names or None for names in axes))


def _uneven(tensors: Sequence[tuple[Any, Placements]], mesh: Any) -> set[int]:
    """The mesh dims along which every device computes the same, because they don't divide some dim
    evenly: `jax.shard_map` takes even shards alone."""
    whole: set[int] = set()
    for shape, placements in tensors:
        kept = representable(placements, mesh, len(shape))
        whole |= {dim for dim, (a, b) in enumerate(zip(kept, placements, strict=True)) if a != b}
    for shape, placements in tensors:
        for dim, size in enumerate(shape):
            own = {
                i
                for i, p in enumerate(placements)
                if i not in whole and getattr(p, "dim", None) == dim and not p.is_partial()
            }
            if size % math.prod(mesh.shape[i] for i in own):
                whole |= own  # one pass is enough: fewer mesh dims divide it, too
    return whole


def _axes(shape: Any, placements: Placements, mesh: Any, whole: set[int]) -> TensorAxes:
    own = tuple(
        Replicate() if i in whole or isinstance(p, Partial) else p for i, p in enumerate(placements)
    )
    return dim_axes(own, mesh, len(shape))


def whole_call(equation: Any) -> Any:
    """The closed jaxpr of an equation of the primitive as it is on one device: of the operation
    itself, on all of its operands."""
    params = equation.params
    lowered, place = params["lowered"], params["call"].on_one

    def run(*operands: Any) -> list[Any]:
        key, arrays = (operands[0], operands[1:]) if params["keyed"] else (None, operands)
        left = iter(arrays)
        leaves = [next(left) if number is None else number for number in params["numbers"]]
        with at(place):
            fresh, _ = lowered(lambda: key, leaves)
        return list(fresh)

    return jax.make_jaxpr(run)(*[v.aval for v in equation.invars])
