"""Gathers sharded parameters and reduces gradients over data-parallel devices, for `relayout`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from xla_dtensor.base import executor
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form, device_form, sharded_form
from xla_dtensor.forms.per_device import logical
from xla_dtensor.mesh import Frame, frame_of
from xla_dtensor.movement.relayout import relayout
from xla_dtensor.parallel._mesh import DataParallel
from xla_dtensor.rules.cost import Collective
from xla_dtensor.runtime import arrays


def gather(array: Any, source: Form, target: Form) -> Any:
    """The parameter as the whole one. Where the dtypes differ the value is cast before it is
    communicated.

    The gathering is an annotation, `relayout`'s: of two explicit ``all_gather``s of one parameter,
    for forward and for backward, XLA's CPU backend keeps one, barrier or not.
    """
    value = logical(array, source)
    if target.jax_dtype != source.jax_dtype:
        value = value.astype(target.jax_dtype)
        if source.sharding is not None:
            value = jax.lax.with_sharding_constraint(value, source.computed_sharding)
    return target.physical(value)


@dataclass(frozen=True)
class Keep:
    """Keeps a gathered parameter between forward and backward, sharded over few devices
    (``reshard_after_forward=4``).

    The form stays that of the whole parameter, as no form of the frame may have it: a finer cut of
    the devices would part it from the tensors that exist.

    Attributes:
        dim: the tensor dim to shard.
        axes: the frame axes of the data-parallel devices that shard parameters, major to minor.
        count: over how many of them, neighbours.
    """

    dim: int
    axes: tuple[str, ...]
    count: int

    def array(self, array: Any, form: Form) -> Any:
        """The whole parameter's array, sharded; None where ``dim`` doesn't divide."""
        sharding = self._sharding(form)
        if sharding is None:
            return None
        if isinstance(array, jax.core.Tracer):
            return jax.lax.with_sharding_constraint(array, sharding)
        with jax.enable_x64(True):
            return arrays.put(array, sharding)

    def _sharding(self, form: Form) -> Any:
        frame = form.frame
        assert frame is not None
        shards = math.prod(frame.sizes[name] for name in form.dim_axes[self.dim])
        if form.shape[self.dim] % (shards * self.count):
            return None
        mesh, became, inner = _cut(frame, self.axes, self.count)
        spec = [became[name] for name in form.varying]
        for d, names in enumerate(form.dim_axes):
            parts = tuple(part for name in names for part in became[name])
            spec.append((*parts, *inner) if d == self.dim else parts)
        partition = jax.sharding.PartitionSpec(*(names or None for names in spec))
        return jax.sharding.NamedSharding(mesh, partition)


@functools.cache
def _cut(
    frame: Frame, axes: tuple[str, ...], count: int
) -> tuple[jax.sharding.Mesh, dict[str, tuple[str, ...]], tuple[str, ...]]:
    """The frame's JAX mesh, cut where ``count`` neighbours along ``axes`` end.

    Returns:
        the mesh; the axes that each of the frame's has become; the neighbours' axes.
    """
    wanted = count
    became: dict[str, tuple[str, ...]] = {name: (name,) for name in frame.sizes}
    sizes = dict(frame.sizes)
    inner: list[str] = []
    for name in reversed(axes):
        if count % sizes[name]:
            if sizes[name] % count:
                raise UnsupportedOpError(
                    f"fully_shard(reshard_after_forward={wanted}): {wanted} neighbours along "
                    f"{list(axes)} of {frame!r} are no part of a mesh; give a number that divides "
                    "with the mesh dims' sizes"
                )
            outer, part = became[name] = (f"{name}.outer", f"{name}.inner")
            sizes |= {outer: sizes[name] // count, part: count}
            count = sizes[name]
            inner.insert(0, part)
        else:
            inner.insert(0, name)
        count //= sizes[name]
        if count == 1:
            break
    names = [part for name in frame.sizes for part in became[name]]
    devices = frame.jax_mesh.devices.reshape([sizes[name] for name in names])
    return jax.sharding.Mesh(devices, tuple(names)), became, tuple(inner)


@dataclass(frozen=True)
class Reduce:
    """The sum over devices of a gradient that varies along data-parallel axes, times ``scale``.

    One explicit collective where the devices' blocks line up, as XLA's CPU backend makes an
    all-reduce and a slice of an annotated sum; else the sum with its new sharding.

    Attributes:
        dim: the tensor dim that ``shard_axes`` shard in the target.
        shard_axes: those along which the sum is scattered.
        axes: all those that the sum is over; of them the source varies along some.
        scale: what the sum is multiplied with; with float16 half of it before the sum, as torch.
    """

    dim: int
    shard_axes: tuple[str, ...]
    axes: tuple[str, ...]
    scale: float

    def moves(self, source: Form, target: Form) -> list[Collective]:
        """What it communicates."""
        assert source.frame is not None
        nbytes: float = math.prod(_block(source)) * source.dtype.itemsize
        scattered = tuple(name for name in self.shard_axes if name in source.varying)
        rest = tuple(name for name in source.varying if name in self.axes and name not in scattered)
        found = []
        for kind, axes in (("reduce-scatter", scattered), ("all-reduce", rest)):
            if axes:
                count = math.prod(source.frame.sizes[name] for name in axes)
                found.append(Collective(kind, axes, count, nbytes))
                nbytes /= count
        return found

    def __call__(self, array: Any, source: Form, target: Form) -> Any:
        before, after = self._factors(target)
        summed = tuple(name for name in source.varying if name in self.axes)
        if not summed:
            value = logical(array, source) * _as(before * after, target)
            return target.physical(value)
        if not set(self.shard_axes) <= set(summed) or not _line_up(
            target, source, self.dim, self.shard_axes
        ):
            value = logical(array, source) * _as(before, target)
            positions = tuple(source.varying.index(name) for name in summed)
            value = jnp.sum(value, axis=positions, dtype=value.dtype)
            return target.physical(value * _as(after, target))
        rest = tuple(name for name in summed if name not in self.shard_axes)
        lead = len(source.varying)

        def one(block: Any) -> Any:
            value = block.reshape(block.shape[lead:]) * _as(before, target)
            if self.shard_axes:
                wanted = _block(target)[self.dim] * _count(target, self.shard_axes)
                pads = [(0, 0)] * value.ndim
                pads[self.dim] = (0, wanted - value.shape[self.dim])
                # First, so that what is left to add up is a shard.
                value = jax.lax.psum_scatter(
                    jnp.pad(value, pads), self.shard_axes, scatter_dimension=self.dim, tiled=True
                )
            if rest:
                value = jax.lax.psum(value, rest)
            value = value * _as(after, target)
            return value.reshape((1,) * len(target.varying) + value.shape)

        return _per_device(one, _even(array, source), source, target)

    def _factors(self, target: Form) -> tuple[float, float]:
        if target.jax_dtype != jnp.float16 or self.scale >= 1:
            return 1.0, self.scale
        # A power of two: float16 loses no digit by it.
        before = 2.0 ** -((-math.log2(self.scale)) // 2)
        return before, self.scale / before


def reduce_over_devices(
    grad: Any, form: Form, parallel: DataParallel, dim: int | None, factor: float
) -> Any:
    """The average of the devices' gradients of a parameter, in its layout.

    Args:
        form: the parameter's.
        dim: that it is sharded along; None if it is whole.
        factor: what the sum is divided by.
    """
    # What was made after `replicate` (of meta tensors, say) lies on one device until it is used.
    frame = frame_of(parallel.mesh) if form.frame is None else form.frame
    executor.current().place(grad._storage_, frame)
    source = grad._form.placed(frame)
    axes = parallel.axes
    varying = tuple(name for name in source.varying if name not in axes)
    about = form.shape, form.stride, 0, grad.dtype
    if form.is_sharded:
        assert form.mesh is not None and form.placements is not None
        target = sharded_form(form.mesh, form.placements, *about, varying=varying)
    else:
        target = device_form(frame, *about, varying=varying)
    # Along an axis on which the devices agree, the sum is a multiple.
    agreeing = [name for name in axes if name not in source.varying]
    scale = 1 / factor
    for name in agreeing:
        scale *= frame.sizes[name]
    shard_axes = () if dim is None else parallel.shard_axes
    return relayout(grad, source, target, Reduce(dim or 0, shard_axes, axes, scale))


def _as(factor: float, form: Form) -> Any:
    return jnp.asarray(factor, form.jax_dtype)


def _count(form: Form, axes: tuple[str, ...]) -> int:
    assert form.frame is not None
    return math.prod(form.frame.sizes[name] for name in axes)


def _block(form: Form) -> tuple[int, ...]:
    """The shape of what one device holds of the padded tensor."""
    return tuple(
        size // _count(form, names)
        for size, names in zip(form.padded_shape, form.dim_axes, strict=True)
    )


def _line_up(sharded: Form, whole: Form, dim: int, axes: tuple[str, ...]) -> bool:
    """Whether the devices' blocks of ``sharded`` along ``axes``, put together along ``dim``, are
    their blocks of ``whole``."""
    if sharded.frame is not whole.frame or sharded.unreduced or whole.unreduced:
        return False
    if not axes:
        return sharded.dim_axes == whole.dim_axes
    for d, (outer, inner) in enumerate(zip(whole.dim_axes, sharded.dim_axes, strict=True)):
        if inner != (outer + axes if d == dim else outer):
            return False
    # Padding must be at the end of the tensor, not between blocks.
    return not whole.dim_axes[dim] or sharded.padded_shape[dim] == whole.padded_shape[dim]


def _even(array: Any, form: Form) -> Any:
    """``array`` with its padding (values on a trace have none)."""
    if tuple(array.shape) == form.array_shape:
        return array
    return form.physical(logical(array, form))


def _per_device(function: Any, array: Any, source: Form, target: Form) -> Any:
    assert source.frame is not None
    return jax.shard_map(
        function,
        mesh=source.frame.jax_mesh,
        in_specs=source.sharding.spec,
        out_specs=target.sharding.spec,
        check_vma=False,
    )(array)
