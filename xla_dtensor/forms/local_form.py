"""The arithmetic between the two views: a sharded tensor's array as one array per device, and back.

Only reshapes and transposes: the dim of a tensor that mesh axes shard, ``[N]``, is ``[n, N / n]``
with the first dim an axis of devices. Where the sharding stays what it was, nothing moves.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from xla_dtensor.base import torch_private
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form, contiguous_stride, device_form
from xla_dtensor.forms.per_device import union
from xla_dtensor.lowering.partitioned.extremes import of_parts
from xla_dtensor.mesh import mesh_dim_axes

# A dim of an array: the name of a frame axis, or the number of a tensor dim.
_Label = str | int

_IDENTITIES = {"sum": 0, "product": 1}


def local_form(form: Form) -> Form:
    """The form of what each device holds of a sharded tensor.

    Raises:
        UnsupportedOpError: a dim doesn't divide: the devices would hold tensors of several shapes.
    """
    assert form.mesh is not None and form.placements is not None and form.frame is not None
    shape = []
    for dim, (size, names) in enumerate(zip(form.shape, form.dim_axes, strict=True)):
        pieces = math.prod(form.frame.sizes[name] for name in names)
        if size % pieces:
            raise UnsupportedOpError(
                f"to_local() of a tensor of shape {list(form.shape)} with placements "
                f"{list(form.placements)} on {form.mesh!r}: dim {dim} of size {size} doesn't "
                f"divide by {pieces}, so the devices would hold tensors of different shapes, which "
                "one process can't show as one tensor. Use full_tensor(), local_shards, or pad the "
                "dim"
            )
        shape.append(size // pieces)
    own = [
        names
        for placement, names in zip(form.placements, mesh_dim_axes(form.mesh), strict=True)
        if not isinstance(placement, Replicate)
    ]
    varying = union(form.frame, [form.varying, *own])
    stride = _dense_stride(tuple(shape), form.stride)
    return device_form(form.frame, tuple(shape), stride, 0, form.dtype, varying, form.meta)


def _dense_stride(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps for ``shape``, in the order of ``like``."""
    order = sorted(range(len(shape)), key=lambda d: (-like[d], d))
    dense = contiguous_stride(tuple(shape[d] for d in order))
    return tuple(dense[order.index(d)] for d in range(len(shape)))


def to_devices(array: Any, source: Form, target: Form) -> Any:
    """The array in ``source``, a sharded form, as one in its `local_form` ``target``."""
    assert source.mesh is not None and source.placements is not None and source.frame is not None
    sizes = source.frame.sizes
    mesh_axes = mesh_dim_axes(source.mesh)
    labels: list[_Label] = [*source.varying]
    shape = [sizes[name] for name in source.varying]
    for i in source.unreduced:
        labels += mesh_axes[i]
        shape += [sizes[name] for name in mesh_axes[i]]
    for dim, names in enumerate(source.dim_axes):
        labels += [*names, dim]
        shape += [*(sizes[name] for name in names), target.shape[dim]]
    array = array.reshape(shape)
    missing = [name for name in target.varying if name not in labels]
    if missing:
        array = _spread(array, missing, source)
        labels = [*missing, *labels]
    wanted: list[_Label] = [*target.varying, *range(len(target.shape))]
    return array.transpose([labels.index(label) for label in wanted])


def _spread(array: Any, axes: list[str], form: Form) -> Any:
    """A reduced ``Partial`` value as parts of it: the value at coordinate 0, the reduction's
    identity elsewhere (of a maximum, minimum or average every device can have the value)."""
    assert form.placements is not None and form.frame is not None
    sizes = [form.frame.sizes[name] for name in axes]
    spread = jnp.broadcast_to(array, (*sizes, *array.shape))
    reduce_op = next(p.reduce_op for p in form.placements if isinstance(p, Partial))
    if reduce_op not in _IDENTITIES:
        return spread
    first = True
    for position in range(len(axes)):
        first = first & (jax.lax.broadcasted_iota(jnp.int32, spread.shape, position) == 0)
    return jnp.where(first, spread, jnp.asarray(_IDENTITIES[reduce_op], array.dtype))


def unreduced_dims(placements: tuple[Placement, ...], form: Form, mesh: Any) -> tuple[int, ...]:
    """The mesh dims whose ``Partial`` gets a leading axis when a local tensor of ``form`` becomes
    a sharded one: where parts differ, and where equal parts don't reduce to themselves."""
    return tuple(
        i
        for i, (placement, names) in enumerate(zip(placements, mesh_dim_axes(mesh), strict=True))
        if isinstance(placement, Partial)
        and (placement.reduce_op in _IDENTITIES or set(names) & set(form.varying))
    )


def from_devices(array: Any, source: Form, target: Form) -> Any:
    """The array in ``source``, a per-device form, as one in ``target``, a sharded form whose
    `local_form` has the same shape. Where parts differ along mesh dims that ``target`` replicates,
    coordinate 0's; ``Partial`` mesh dims without a leading axis are reduced."""
    assert target.mesh is not None and target.frame is not None
    sizes = target.frame.sizes
    mesh_axes = mesh_dim_axes(target.mesh)
    labels: list[_Label] = [*source.varying, *range(len(source.shape))]
    lead = [name for i in target.unreduced for name in mesh_axes[i]]
    wanted: list[_Label] = [*target.varying, *lead]
    for dim, names in enumerate(target.dim_axes):
        wanted += [*names, dim]
    assert target.placements is not None
    for placement, names in zip(target.placements, mesh_axes, strict=True):
        for name in set(names) & set(labels) - set(wanted):
            axis = labels.index(name)
            if isinstance(placement, Partial):
                array = of_parts(array, (axis,), placement.reduce_op)
            else:
                array = array.take(0, axis=axis)
            labels.remove(name)
    missing = [label for label in wanted if label not in labels]
    if missing:
        array = jnp.broadcast_to(array, (*(sizes[str(name)] for name in missing), *array.shape))
        labels = [*missing, *labels]
    array = array.transpose([labels.index(label) for label in wanted])
    return array.reshape(target.array_shape)


def global_meta(
    local: torch.Size, mesh: Any, placements: tuple[Placement, ...], stride: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and strides of the sharded tensor whose devices hold ``local`` each, as torch
    computes them."""
    model = torch.empty_strided(local, stride, device="meta")
    shape, strides = torch_private.compute_global_tensor_info(model, mesh, placements)
    return tuple(shape), tuple(strides)
