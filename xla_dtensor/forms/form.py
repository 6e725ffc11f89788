"""The physical form of a tensor: how its logical value lies in one ``jax.Array``.

    (varying axes...) + (unreduced mesh dims...) + (logical dims, padded to divide)

The leading axes stand for mesh axes along which devices hold different values that no tensor dim
shows. One per *varying* axis: the tensor is something else on each device along it (a per-device
tensor, or a sharded one on a submesh); operations run on each by itself (`per_device.py`). One per
*unreduced* mesh dim: parts of one value, a pending ``Partial``. ``Shard`` puts mesh axes on a
logical dim; a dim that doesn't divide is padded at its end (XLA's program inputs and outputs must
be even). Forms are interned, equal ones the same object: the dispatcher's keys hash in no time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from xla_dtensor.base.dtypes import to_jax_dtype
from xla_dtensor.base.tables.cache import Interned
from xla_dtensor.base.torch_private import DTensorSpec, TensorMeta
from xla_dtensor.errors import MeshMismatchError, PlacementError
from xla_dtensor.lowering.partitioned.extremes import of_parts
from xla_dtensor.mesh import Frame, dim_axes, frame_of, frames_stay, mesh_dim_axes

if TYPE_CHECKING:
    import jax
    import numpy as np


class Form:
    """What a tensor is, apart from its data. Immutable and interned; make one with
    `sharded_form` or `device_form`.

    Attributes:
        mesh: the mesh of a sharded tensor; None for a per-device tensor.
        placements: one per mesh dim; None for a per-device tensor.
        varying: the frame axes along which devices hold different tensors, in the frame's order.
        unreduced: the ``Partial`` mesh dims that have a leading axis (their reduction is pending).
        frame: the JAX mesh that the array lives on; None for an array of the default device.
        shape, stride, offset, dtype: as torch sees the tensor.
        meta: whether it has no value (torch's "meta" device): there is no array.
        memory: where the array rests between programs, JAX's name of it (``"pinned_host"``); None
            for the devices' own. Programs compute in that: what rests elsewhere they fetch.
        padded_shape: the logical dims of the array.
        sharding: the array's ``NamedSharding``; None without a frame.
        spec: torch's ``DTensorSpec``; None for a per-device tensor.
    """

    __slots__ = (
        "__weakref__",
        "_anywhere",
        "_at_start",
        "dim_axes",
        "dtype",
        "frame",
        "jax_dtype",
        "memory",
        "mesh",
        "meta",
        "offset",
        "padded_shape",
        "placements",
        "shape",
        "sharding",
        "spec",
        "stride",
        "unreduced",
        "varying",
    )

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] | None
    varying: tuple[str, ...]
    meta: bool
    memory: str | None
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
    _anywhere: Form | None
    _at_start: Form | None

    @property
    def is_sharded(self) -> bool:
        """Whether this is the global view (an `XLAShardedTensor`'s form)."""
        return self.mesh is not None

    @property
    def has_own_value(self) -> bool:
        """Whether a per-device tensor varies, and yet has one value in this process: that of its
        one device."""
        if not self.varying or self.mesh is not None or self.frame is None:
            return False
        return self.frame.one_each

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of the array in this form."""
        lead: tuple[int, ...] = ()
        if self.varying:
            assert self.frame is not None
            lead = tuple(self.frame.sizes[axis] for axis in self.varying)
        if self.unreduced:
            assert self.mesh is not None
            lead += tuple(self.mesh.shape[i] for i in self.unreduced)
        return lead + self.padded_shape

    def logical(self, array: jax.Array) -> jax.Array:
        """The logical value in ``array``: pending reductions done, padding cut off.
        Of a tensor that varies ``array`` is one device's part, without the varying axes.
        """
        array = self.fetched(array)
        if self.unreduced:
            array = self._reduce(array)
        if tuple(array.shape) != self.shape:
            from jax.lax import slice  # indexed, it would be a gather, and XLA gather all of it

            return slice(array, [0] * array.ndim, self.shape)
        return array

    def fetched(self, array: jax.Array) -> jax.Array:
        """``array`` in the devices' memory."""
        if self.memory is None:
            return array
        import jax

        space = jax.memory.Space.Device
        if jax.typeof(array).memory_space == space:
            return array
        fetched = jax.device_put(array, space)
        if self.varying or tuple(array.shape) != self.array_shape:
            return fetched
        # Shards first, or XLA gathers what the host has, in the host's memory.
        return jax.lax.with_sharding_constraint(fetched, self.computed_sharding)

    @property
    def computed_sharding(self) -> Any:
        """The sharding while programs compute: in the devices' memory."""
        return self.sharding if self.memory is None else self.with_memory(None).sharding

    def physical(self, value: jax.Array) -> jax.Array:
        """``value`` padded to an even sharding (without pending reductions; with or without the
        varying axes)."""
        if self.padded_shape == self.shape:
            return value
        import jax.numpy as jnp

        pads = [(0, 0)] * (value.ndim - len(self.shape))
        pads += [(0, p - n) for p, n in zip(self.padded_shape, self.shape, strict=True)]
        return jnp.pad(value, pads)

    def reduced(self) -> Form:
        """This form without pending reductions: what a freshly computed value has."""
        if not self.unreduced:
            return self
        assert self.mesh is not None and self.placements is not None
        return self.with_placements(self.mesh, self.placements)

    def with_placements(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Form:
        """The same tensor on ``mesh`` with ``placements``."""
        return sharded_form(
            mesh,
            placements,
            self.shape,
            self.stride,
            self.offset,
            self.dtype,
            varying=self.varying,
            meta=self.meta,
        )

    def at_start(self) -> Form:
        """The same tensor at the start of its memory; what only reads it does the same there."""
        if not self.offset:
            return self
        known = self._at_start
        if known is None or (known.frame and not known.frame.is_current):  # since refined
            known = self._at_start = self._with(offset=0)
        return known

    def with_varying(self, varying: tuple[str, ...]) -> Form:
        """The same tensor, varying along exactly these axes of its frame."""
        return self if varying == self.varying else self._with(varying=varying)

    def with_meta(self, meta: bool) -> Form:
        """The same tensor with or without a value."""
        return self if meta == self.meta else self._with(meta=meta)

    def with_memory(self, memory: str | None) -> Form:
        """The same tensor, resting in that memory. One of the default device has no choice."""
        return self if memory == self.memory or self.frame is None else self._with(memory=memory)

    def on_current_frame(self) -> Form:
        """The same sharded tensor, with the axes that its mesh's dims consist of by now.

        Raises:
            MeshMismatchError: it varies along an axis that has since been cut finer.
        """
        assert self.mesh is not None and self.frame is not None
        if self.frame.is_current:
            return self
        frame = frame_of(self.mesh)
        self.check_axes("a view of what devices hold", frame)
        return self._with()

    def _with(self, **changed: Any) -> Form:
        names = "offset", "varying", "meta", "memory"
        about = {name: getattr(self, name) for name in names} | changed
        about |= {"shape": self.shape, "stride": self.stride, "dtype": self.dtype}
        if self.mesh is None:
            return device_form(self.frame, **about)
        assert self.placements is not None
        return sharded_form(self.mesh, self.placements, unreduced=self.unreduced, **about)

    def placed(self, frame: Frame | None) -> Form:
        """The form of a per-device tensor of the default device once it is on all of ``frame``'s;
        any other form is itself."""
        if self.frame is not None or frame is None:
            return self
        about = self.shape, self.stride, self.offset, self.dtype
        return device_form(frame, *about, meta=self.meta)

    def anywhere(self) -> Form | None:
        """Of a per-device tensor with one value, which is `placed` with what it is computed with:
        its form on no frame, the same one wherever it lies. None for any other."""
        if self.mesh is not None or self.varying or self.meta or self.memory is not None:
            return None
        if self.frame is None:
            return self
        if self._anywhere is None:
            self._anywhere = device_form(None, self.shape, self.stride, self.offset, self.dtype)
        return self._anywhere

    def _reduce(self, array: jax.Array) -> jax.Array:
        assert self.placements is not None
        reduce_op = self.placements[self.unreduced[0]].reduce_op
        return of_parts(array, tuple(range(len(self.unreduced))), reduce_op)

    def __repr__(self) -> str:
        where = f"{self.mesh!r}, {list(self.placements or ())}" if self.mesh else f"{self.frame}"
        if self.varying:
            where += f", varying along {', '.join(self.varying)}"
        if self.memory:
            where += f", in {self.memory}"
        return f"Form({list(self.shape)}, {self.dtype}, {where})"

    def check_axes(self, what: str, frame: Frame) -> None:
        """Raise if a tensor varies along an axis that ``frame`` doesn't have.

        Args:
            what: is to be done with the tensor.
            frame: of the mesh, or of the other tensors, that it is to be done with.

        Raises:
            MeshMismatchError: the tensor lives on other devices, or on a mesh that cuts them
                differently.
        """
        own = self.frame
        if own is None or own is frame:
            return
        if own.device_ids != frame.device_ids:
            raise MeshMismatchError(
                f"{what}: one tensor is on {own.root!r} (devices {list(own.device_ids)}), another "
                f"or the mesh on {frame.root!r} (devices {list(frame.device_ids)})"
            )
        missing = [axis.name for axis in own.axes if axis not in frame.axes]
        missing = [name for name in missing if name in self.varying]
        if missing:
            why = (
                f"{own.root!r}, which has since been cut finer, into {frame!r}: make all meshes "
                "before the tensors"
                if own.root == frame.root
                else f"{own!r}, which {frame!r} cuts differently: make one mesh of the other "
                "(mesh[...], _flatten, _unflatten)"
            )
            raise MeshMismatchError(
                f"{what}: a tensor of shape {list(self.shape)} varies along {missing} of {why}"
            )


_forms: Interned[tuple[Any, ...], Form] = Interned("forms", 2048)


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
    varying: tuple[str, ...] = (),
    meta: bool = False,
    memory: str | None = None,
) -> Form:
    """The form of a global-view tensor. ``placements`` must be normalised.

    Raises:
        PlacementError: it varies along an axis that one of its mesh dims consists of.
    """
    shape = tuple(shape)
    stride = contiguous_stride(shape) if stride is None else tuple(stride)
    frame = frame_of(mesh)
    about = shape, stride, offset, dtype
    # The frame is part of the key: a refined one has other axis names.
    key = (mesh, placements, frame, *about, unreduced, varying, meta, memory)
    form = _forms.get(key)
    if form is not None:
        return form
    with frames_stay():
        # Between this and the look above another thread may have refined the frame.
        frame = frame_of(mesh)
        key = (mesh, placements, frame, *about, unreduced, varying, meta, memory)
        axes = mesh_dim_axes(mesh)
        if set(varying) & {name for names in axes for name in names}:
            raise PlacementError(
                f"a tensor on {mesh!r} can't vary along {list(varying)}, which is part of its mesh"
            )
        form = _new_form(shape, stride, offset, dtype, varying, meta, memory)
        form.mesh, form.placements, form.unreduced, form.frame = mesh, placements, unreduced, frame
        form.dim_axes = dim_axes(placements, mesh, len(shape))
        form.padded_shape = tuple(
            _round_up(n, math.prod(frame.sizes[name] for name in names))
            for n, names in zip(shape, form.dim_axes, strict=True)
        )
        lead = [*varying, *(axes[i] for i in unreduced)]
        spec = (names or None for names in (*lead, *form.dim_axes))
        form.sharding = frame.sharding(*spec, memory=memory)
        form.spec = DTensorSpec(
            mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype)
        )
    return _forms.put(key, form)


def device_form(
    frame: Frame | None,
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    varying: tuple[str, ...] = (),
    meta: bool = False,
    memory: str | None = None,
) -> Form:
    """The form of a per-device tensor: one on each device of ``frame`` along the varying axes, the
    same one along the others."""
    shape = tuple(shape)
    stride = contiguous_stride(shape) if stride is None else tuple(stride)
    key = (None, None, frame, shape, stride, offset, dtype, (), varying, meta, memory)
    form = _forms.get(key)
    if form is None:
        form = _new_form(shape, stride, offset, dtype, varying, meta, memory)
        form.mesh, form.placements, form.unreduced, form.frame = None, None, (), frame
        form.dim_axes = ((),) * len(shape)
        form.padded_shape = shape
        form.sharding = None if frame is None else frame.sharding(*varying, memory=memory)
        form.spec = None
        form = _forms.put(key, form)
    return form


def _new_form(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    varying: tuple[str, ...],
    meta: bool,
    memory: str | None,
) -> Form:
    form: Form = object.__new__(Form)
    form.varying, form.meta, form.memory = varying, meta, memory
    form.shape, form.stride, form.offset, form.dtype = shape, stride, offset, dtype
    form.jax_dtype, form._at_start, form._anywhere = to_jax_dtype(dtype), None, None
    return form


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
