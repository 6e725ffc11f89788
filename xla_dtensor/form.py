"""The physical form of a tensor: how its logical value lies in one ``jax.Array``.

    (leading axes...) + (logical dims, padded to divide)

A leading axis of size ``n`` stands for mesh axes along which devices hold different values that no
tensor dim shows: an unreduced ``Partial``. ``Shard`` puts mesh axes on a logical dim; a dim that
doesn't divide is padded at its end (XLA's program inputs and outputs must be even). Forms are
interned: equal forms are the same object, so that the dispatcher's cache keys hash in no time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement

from xla_dtensor.dtypes import to_jax_dtype
from xla_dtensor.mesh import Frame, dim_axes, frame_of, mesh_dim_axes

if TYPE_CHECKING:
    import jax
    import numpy as np


class Form:
    """What a tensor is, apart from its data. Immutable and interned; make one with
    `sharded_form` or `device_form`.

    Attributes:
        mesh: the mesh of a sharded tensor; None for a per-device tensor.
        placements: one per mesh dim; None for a per-device tensor.
        unreduced: the ``Partial`` mesh dims that have a leading axis (their reduction is pending).
        frame: the JAX mesh that the array lives on; None for an array of the default device.
        shape, stride, offset, dtype: as torch sees the tensor.
        padded_shape: the logical dims of the array.
        sharding: the array's ``NamedSharding``; None without a frame.
        spec: torch's ``DTensorSpec``; None for a per-device tensor.
    """

    __slots__ = (
        "dim_axes",
        "dtype",
        "frame",
        "jax_dtype",
        "mesh",
        "offset",
        "padded_shape",
        "placements",
        "shape",
        "sharding",
        "spec",
        "stride",
        "unreduced",
    )

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] | None
    unreduced: tuple[int, ...]
    frame: Frame | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    jax_dtype: np.dtype
    padded_shape: tuple[int, ...]
    sharding: Any
    spec: DTensorSpec | None
    dim_axes: tuple[tuple[str, ...], ...]

    @property
    def is_sharded(self) -> bool:
        """Whether this is the global view (an `XLAShardedTensor`'s form)."""
        return self.mesh is not None

    def logical(self, array: jax.Array) -> jax.Array:
        """The logical value in ``array``: pending reductions done, padding cut off."""
        if self.unreduced:
            array = self._reduce(array)
        if tuple(array.shape) != self.shape:
            array = array[tuple(slice(0, n) for n in self.shape)]
        return array

    def physical(self, value: jax.Array) -> jax.Array:
        """``value`` padded to an even sharding (without leading axes)."""
        if self.padded_shape == self.shape:
            return value
        import jax.numpy as jnp

        pads = [(0, p - n) for p, n in zip(self.padded_shape, self.shape, strict=True)]
        return jnp.pad(value, pads)

    def reduced(self) -> Form:
        """This form without leading axes: what a freshly computed value has."""
        if not self.unreduced:
            return self
        assert self.mesh is not None and self.placements is not None
        return self.with_placements(self.mesh, self.placements)

    def with_placements(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Form:
        """The same tensor on ``mesh`` with ``placements``."""
        return sharded_form(mesh, placements, self.shape, self.stride, self.offset, self.dtype)

    def placed(self, frame: Frame | None) -> Form:
        """The form of a per-device tensor of the default device once it is on all of ``frame``'s;
        any other form is itself."""
        if self.frame is not None or frame is None:
            return self
        return device_form(frame, self.shape, self.stride, self.offset, self.dtype)

    def _reduce(self, array: jax.Array) -> jax.Array:
        import jax.numpy as jnp

        assert self.placements is not None
        reduce_op = self.placements[self.unreduced[0]].reduce_op
        axes = tuple(range(len(self.unreduced)))
        functions: dict[str, Any] = {
            "sum": jnp.sum,
            "avg": jnp.mean,
            "max": jnp.max,
            "min": jnp.min,
            "product": jnp.prod,
        }
        return functions[reduce_op](array, axis=axes).astype(array.dtype)

    def __repr__(self) -> str:
        where = f"{self.mesh!r}, {list(self.placements or ())}" if self.mesh else f"{self.frame}"
        return f"Form({list(self.shape)}, {self.dtype}, {where})"


_forms: dict[tuple[Any, ...], Form] = {}


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """torch's strides of a freshly made tensor of ``shape``."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def sharded_form(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    unreduced: tuple[int, ...] = (),
) -> Form:
    """The form of a global-view tensor. ``placements`` must be normalised."""
    shape = tuple(shape)
    stride = contiguous_stride(shape) if stride is None else tuple(stride)
    frame = frame_of(mesh)
    # The frame is part of the key: a refined one has other axis names.
    key = (mesh, placements, frame, shape, stride, offset, dtype, unreduced)
    form = _forms.get(key)
    if form is None:
        form = _new_form(shape, stride, offset, dtype)
        form.mesh, form.placements, form.unreduced, form.frame = mesh, placements, unreduced, frame
        form.dim_axes = dim_axes(placements, mesh, len(shape))
        form.padded_shape = tuple(
            _round_up(n, math.prod(frame.sizes[name] for name in names))
            for n, names in zip(shape, form.dim_axes, strict=True)
        )
        lead = [mesh_dim_axes(mesh)[i] for i in unreduced]
        form.sharding = frame.sharding(*(names or None for names in (*lead, *form.dim_axes)))
        form.spec = DTensorSpec(
            mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype)
        )
        _forms[key] = form
    return form


def device_form(
    frame: Frame | None,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Form:
    """The form of a per-device tensor that is the same on every device of ``frame``."""
    shape = tuple(shape)
    stride = contiguous_stride(shape) if stride is None else tuple(stride)
    key = (None, None, frame, shape, stride, offset, dtype, ())
    form = _forms.get(key)
    if form is None:
        form = _new_form(shape, stride, offset, dtype)
        form.mesh, form.placements, form.unreduced, form.frame = None, None, (), frame
        form.dim_axes = ((),) * len(shape)
        form.padded_shape = shape
        form.sharding = None if frame is None else frame.replicated
        form.spec = None
        _forms[key] = form
    return form


def _new_form(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
) -> Form:
    form: Form = object.__new__(Form)
    form.shape, form.stride, form.offset, form.dtype = shape, stride, offset, dtype
    form.jax_dtype = to_jax_dtype(dtype)
    return form


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def partial_dims(placements: tuple[Placement, ...]) -> dict[int, str]:
    """The ``Partial`` mesh dims and their reductions."""
    return {i: p.reduce_op for i, p in enumerate(placements) if isinstance(p, Partial)}
