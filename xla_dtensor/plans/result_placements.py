"""The placements of an operation's results: from its rule, or from what XLA chooses."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate

from xla_dtensor.base import executor, xla_faults
from xla_dtensor.base.random import rng
from xla_dtensor.base.torch_private import StridedShard
from xla_dtensor.base.torch_private.attributes import schema_of
from xla_dtensor.errors import PlacementError
from xla_dtensor.forms.form import Form
from xla_dtensor.lowering.kinds import Kind, is_
from xla_dtensor.mesh import Frame, dim_axes, dim_mesh_dims, frame_of, from_partition_spec
from xla_dtensor.mesh.intermediate import intermediate_shardings
from xla_dtensor.plans.call import Call, fill
from xla_dtensor.plans.lower import lowered_function
from xla_dtensor.plans.meta import Meta
from xla_dtensor.plans.pin import Pin, pin
from xla_dtensor.rules import Merged, TensorInfo, find_registration, infer


class Answer:
    """A layout rule's answer for one call: the rule is asked at first use, and once.

    Args:
        mesh: of the results.
        metas: of the results, None for undefined ones.
    """

    def __init__(self, call: Call, mesh: DeviceMesh, metas: list[Meta | None]) -> None:
        self.call, self.mesh, self.metas = call, mesh, metas

    @functools.cached_property
    def merged(self) -> Merged | None:
        """The placements of arguments and results; None if the compiler is to choose."""
        return _merged(self.call, self.mesh, self.metas)


def output_placements(answer: Answer) -> list[tuple[Placement, ...]]:
    """Per result (None for undefined ones) its placements on the mesh."""
    mesh, metas = answer.mesh, answer.metas
    if answer.merged is None:
        return _compiler_placements(answer.call, mesh, metas)
    return [
        (Replicate(),) * mesh.ndim if m is None else representable(tuple(p), mesh, len(m.shape))
        for p, m in zip(answer.merged.outputs, metas, strict=True)
    ]


@dataclass(frozen=True)
class Pins:
    """Shardings per leaf of a call (on its way, one after the other), per result, and of what it
    writes to its arguments.

    Args:
        ask: asks XLA for one (not None), of a result.
        ask_leaf: of a leaf.
    """

    leaves: Sequence[Sequence[Any]]
    results: list[Any]
    written: Any
    ask: Pin
    ask_leaf: Pin

    def leaf(self, value: Any, index: int) -> Any:
        """The leaf in its sharding, if it has one."""
        for sharding in self.leaves[index]:
            value = self.ask_leaf(value, sharding)
        return value

    def result(self, value: Any, index: int) -> Any:
        """The result in its sharding, if it has one."""
        return _asked(self.ask, value, self.results[index])

    def write(self, value: Any) -> Any:
        """What is written to an argument in its sharding, if it has one."""
        return _asked(self.ask, value, self.written)


def _asked(ask: Pin, value: Any, sharding: Any) -> Any:
    return value if sharding is None else ask(value, sharding)


def pins(answer: Answer | None) -> Pins | None:
    """Shardings to ask of XLA for the tensors and results of an operation, if it must be told.

    Which must, and how firmly, is in the table of XLA's faults (`base/xla_faults.py:pinned`).

    The layouts of a rule that is not the library's own are asked for as they are: whoever wrote it
    wants its arguments and results there.
    """
    if answer is None:
        return None
    call = answer.call
    name = call.info.name.replace("_.", ".")
    if has_users_rule(call.info.func):
        ask = jax.lax.with_sharding_constraint
        return None if call.info.mutated else _of_rule(answer, ask, ask)
    frame = frame_of(answer.mesh)
    overload = f"{name.rpartition('.')[0]}.default"
    kinds = {kind.name for kind in _BY_NAME if is_(kind, name)}
    kinds |= {kind.name for kind in _BY_PACKET if is_(kind, overload)}
    axes = sum(size > 1 for size in frame.sizes.values())
    forms = [form for form in call.forms if isinstance(form, Form)]
    dims = max((len(form.shape) for form in forms), default=0)
    how = xla_faults.pinned(kinds, axes, dims, any(map(_is_partial, forms)))
    if how is None or (how.moving and (call.info.is_out or _stays(answer, forms))):
        return None
    if call.info.is_out:
        if how.out is None:
            return None
        # Rules are given the functional overload, without `out`.
        whole = [[frame.replicated] if isinstance(form, Form) else [] for form in call.forms]
        return Pins(whole, [], frame.replicated, pin(how.out), pin(how.out))
    if call.info.mutated and how.in_place is not None:
        nothing: list[Sequence[Any]] = [()] * len(call.leaves)
        return Pins(nothing, [], frame.replicated, pin(how.in_place), pin(how.leaves))
    return _of_rule(answer, pin(how.results), pin(how.leaves), how.dims)


_BY_NAME = (Kind.CONVOLUTION, Kind.TRANSFORM, Kind.GATHER)
_BY_PACKET = (Kind.PRODUCT, Kind.BATCHED, Kind.ADDED)  # for all overloads of an op


def has_users_rule(func: Any) -> bool:
    """Whether the rule of an overload is not the library's own."""
    rule = find_registration(func)
    return rule is not None and rule.kind != "family"


def _stays(answer: Answer, forms: list[Form]) -> bool:
    """Whether all tensors are where the rule wants them, as far as is known."""
    merged, mesh = answer.merged, answer.mesh
    return merged is None or all(
        form.dim_axes == _axes(placements, mesh, len(form.shape))
        for form, placements in zip(forms, merged.inputs, strict=True)
    )


def _is_partial(form: Any) -> bool:
    return isinstance(form, Form) and any(p.is_partial() for p in form.placements or ())


def _of_rule(answer: Answer, ask: Pin, ask_leaf: Pin, dims: int | None = None) -> Pins | None:
    """The layouts of the call's rule, of the first ``dims`` dims alone."""
    call, mesh, metas, merged = answer.call, answer.mesh, answer.metas, answer.merged
    if merged is None:
        return None
    tensors = iter(merged.inputs)
    frame = frame_of(mesh)
    inputs: list[Sequence[Any]] = []
    for form in call.forms:
        if isinstance(form, Form):
            axes = _axes(next(tensors), mesh, len(form.shape))
            way = intermediate_shardings(frame, form.dim_axes, axes) if form.frame is frame else []
            inputs.append([*way, _sharding(frame, axes[:dims])])
        else:
            inputs.append(())
    outputs = [
        None if m is None else _sharding(frame, _axes(p, mesh, len(m.shape))[:dims])
        for p, m in zip(merged.outputs, metas, strict=bool(metas))
    ]
    return Pins(inputs, outputs, frame.replicated, ask, ask_leaf)


def _axes(placements: Any, mesh: DeviceMesh, ndim: int) -> tuple[tuple[str, ...], ...]:
    return dim_axes(representable(tuple(placements), mesh, ndim), mesh, ndim)


def _sharding(frame: Frame, axes: Iterable[tuple[str, ...]]) -> Any:
    return frame.sharding(*(names or None for names in axes))


def _merged(call: Call, mesh: DeviceMesh, metas: list[Meta | None]) -> Merged | None:
    """What the rule of the call says of its inputs and outputs."""
    replicated = (Replicate(),) * mesh.ndim
    placements = [
        replicated if form.placements is None else form.placements
        for form in call.forms
        if isinstance(form, Form)
    ]
    return Query(call, metas).ask(placements, tuple(mesh.shape), mesh)


class Query:
    """What a rule is asked about a call: all but placements. It holds no tensors."""

    def __init__(self, call: Call, metas: Sequence[Meta | None]) -> None:
        self._func, self._args, self._kwargs = call.info.func, list(call.args), call.kwargs
        self._leaves = [
            (form.shape, form.dtype) if isinstance(form, Form) else leaf
            for leaf, form in zip(call.leaves, call.forms, strict=True)
        ]
        self._is_tensor = [isinstance(form, Form) for form in call.forms]
        self.shapes = [None if m is None else m.shape for m in metas]
        if not self.shapes and call.info.mutated:
            # Rules know the functional overload; its result is like what this one writes to: self.
            self.shapes = [next(form.shape for form in call.forms if isinstance(form, Form))]

    @property
    def tensors(self) -> list[tuple[int, ...]]:
        """The shapes of the tensors."""
        pairs = zip(self._leaves, self._is_tensor, strict=True)
        return [leaf[0] for leaf, is_tensor in pairs if is_tensor]

    def argument(self, name: str) -> Any:
        """What the operation is given by that name, or its default; None if it takes none."""
        args = fill(list(self._args), self._leaves)
        kwargs = {key: fill(value, self._leaves) for key, value in self._kwargs.items()}
        for i, own in enumerate(schema_of(self._func).arguments):
            if own.name == name:
                return args[i] if i < len(args) else kwargs.get(name, own.default_value)
        return None

    def ask(
        self,
        placements: Sequence[tuple[Placement, ...]],
        mesh_shape: tuple[int, ...],
        mesh: DeviceMesh | None = None,
    ) -> Merged | None:
        """What the rule says with the tensors in these placements; None if there is none."""
        given = iter(placements)
        infos = [
            TensorInfo(leaf[0], next(given), leaf[1]) if is_tensor else leaf
            for leaf, is_tensor in zip(self._leaves, self._is_tensor, strict=True)
        ]
        args = tuple(fill(list(self._args), infos))
        kwargs = {name: fill(value, infos) for name, value in self._kwargs.items()}
        return infer(self._func, args, kwargs, self.shapes, mesh_shape, mesh)


def representable(
    placements: tuple[Placement, ...], mesh: DeviceMesh, ndim: int
) -> tuple[Placement, ...]:
    """``placements`` with those strided shards replicated that no sharding of an array expresses.

    torch gives ``_StridedShard(0, split_factor=6)`` to the flattening of ``[6, n]`` with ``n``
    sharded: shards of six pieces each. XLA shards a dim in contiguous pieces only.
    """
    try:
        dim_mesh_dims(placements, tuple(mesh.shape), ndim)
    except PlacementError:
        return tuple(Replicate() if isinstance(p, StridedShard) else p for p in placements)
    return placements


def _compiler_placements(
    call: Call, mesh: DeviceMesh, metas: list[Meta | None]
) -> list[tuple[Placement, ...]]:
    """Compile the operation alone with its input shardings and read back what XLA chose.

    What XLA chose is the layout in which it can give the result without extra communication; an
    axis group that is no whole mesh dim counts as replicated.
    """
    lowered = lowered_function(call.info)

    def run(leaves: Any) -> Any:
        counter = iter(range(1_000_000))
        values = [
            form.logical(leaf) if isinstance(form, Form) else leaf
            for leaf, form in zip(leaves, forms, strict=True)
        ]
        kwargs = {name: fill(value, values) for name, value in call.kwargs.items()}
        fresh, writes = lowered(
            lambda: rng.key_of(rng.words(), next(counter)), fill(list(call.args), values), kwargs
        )
        return [value for value in (*fresh, *writes) if value is not None]

    # Without varying axes: along those each device computes by itself.
    forms = [f.with_varying(()) if isinstance(f, Form) else f for f in call.forms]
    leaves = [
        jax.ShapeDtypeStruct(f.array_shape, f.jax_dtype, sharding=f.sharding)
        if isinstance(f, Form)
        else f(0)
        for f in forms
    ]
    with jax.enable_x64(True), executor.running_at_once():
        compiled = jax.jit(run).lower(leaves).compile()
    chosen = iter(compiled.output_shardings)
    result: list[tuple[Placement, ...]] = []
    for meta in metas:
        placements = (Replicate(),) * mesh.ndim
        if meta is not None:
            spec = getattr(next(chosen), "spec", None)
            if spec is not None:
                try:
                    placements = from_partition_spec(spec, mesh)
                except PlacementError:
                    placements = (Replicate(),) * mesh.ndim
        result.append(placements)
    return result
