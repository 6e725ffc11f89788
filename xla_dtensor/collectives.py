"""Collectives on per-device tensors: explicit communication along a mesh dim.

Each is one collective of XLA's under ``jax.shard_map``. ``group`` is a mesh of one dim, a
``(mesh, dim)``, or ``mesh.get_group(dim)``. They are differentiable as torch's functional
collectives are, which end in the same functions (`integration/functional_collectives.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor import _context
from xla_dtensor.device_tensor import XLATensor
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.form import Form, device_form
from xla_dtensor.mesh.group import MeshGroup, group_of
from xla_dtensor.per_device import union
from xla_dtensor.redistribute import relayout
from xla_dtensor.storage import Storage

_Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Collective:
    """One collective as `relayout` takes it; equal ones share an executable.

    Attributes:
        name: the function below that computes it on one device.
        axes: the frame axes that it communicates along.
        options: its other arguments.
    """

    name: str
    axes: tuple[str, ...]
    options: tuple[Any, ...] = ()

    def __call__(self, array: Any, source: Form, target: Form) -> Any:
        frame = target.frame
        assert frame is not None
        own, result = len(source.varying), len(target.varying)

        def one(block: Any) -> Any:
            value = block.reshape(block.shape[own:])
            value = _FUNCTIONS[self.name](value, self.axes, *self.options)
            return value.reshape((1,) * result + value.shape)

        spec = jax.sharding.PartitionSpec
        return jax.shard_map(
            one,
            mesh=frame.jax_mesh,
            in_specs=spec(*source.varying),
            out_specs=spec(*target.varying),
            check_vma=False,
        )(array)


def _all_reduce(x: Any, axes: Any, op: str) -> Any:
    if op == "sum":
        return jax.lax.psum(x, axes)
    if op == "avg":
        return jax.lax.pmean(x, axes)
    if op == "max":
        return jax.lax.pmax(x, axes)
    if op == "min":
        return jax.lax.pmin(x, axes)
    parts = jax.lax.all_gather(x, axes)
    if op == "product":
        return jnp.prod(parts, axis=0, dtype=x.dtype)
    functions = {"band": jnp.bitwise_and, "bor": jnp.bitwise_or, "bxor": jnp.bitwise_xor}
    return functions[op].reduce(parts, axis=0)


def _all_gather(x: Any, axes: Any) -> Any:
    return jax.lax.all_gather(x, axes, axis=0, tiled=True)


def _reduce_scatter(x: Any, axes: Any, op: str) -> Any:
    if op in ("sum", "avg"):
        total = jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)
        return total if op == "sum" else total / jax.lax.axis_size(axes)
    count = jax.lax.axis_size(axes)
    reduced = _all_reduce(x, axes, op)
    size = x.shape[0] // count
    return jax.lax.dynamic_slice_in_dim(reduced, jax.lax.axis_index(axes) * size, size)


def _all_to_all(x: Any, axes: Any) -> Any:
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


def _broadcast(x: Any, axes: Any, src: int) -> Any:
    # Bits, so that the sum with zeros changes nothing (-0.0, bool).
    chosen = jnp.where(jax.lax.axis_index(axes) == src, x, jnp.zeros_like(x))
    if x.dtype == bool:
        return jax.lax.psum(chosen.astype(jnp.int32), axes).astype(bool)
    return jax.lax.psum(chosen, axes)


def _permute(x: Any, axes: Any, pairs: Any) -> Any:
    return jax.lax.ppermute(x, axes, pairs)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "permute": _permute,
}
_REDUCTIONS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")


def run(name: str, tensor: Any, group: MeshGroup, *options: Any) -> XLATensor:
    """A collective on a per-device tensor; below autograd."""
    if not isinstance(tensor, XLATensor):
        raise UnsupportedOpError(
            f"{name} of a {type(tensor).__name__}: collectives work on per-device tensors; a "
            "sharded tensor is redistributed (x.redistribute(placements=)), or made per-device "
            "with x.to_local()"
        )
    frame, axes, count = group.frame, group.axes, group.size()
    if _context.current() is None:
        tensor._storage_.place(frame)
    source = tensor._form.placed(frame)
    shape, varying = source.shape, union(frame, [source.varying, axes])
    if options and name in ("all_reduce", "reduce_scatter") and options[0] not in _REDUCTIONS:
        raise UnsupportedOpError(
            f"{name} with reduction {options[0]!r} along {list(axes)}: the reductions are "
            f"{', '.join(_REDUCTIONS)}"
        )
    if name in ("reduce_scatter", "all_to_all") and (not shape or shape[0] % count):
        raise UnsupportedOpError(
            f"{name} of a tensor of shape {list(shape)} along {list(axes)}: dim 0 must divide by "
            f"the {count} devices; pad it"
        )
    if name in ("all_reduce", "all_gather", "broadcast"):
        varying = tuple(axis for axis in source.varying if axis not in axes)
    if name == "all_gather":
        shape = (shape[0] * count, *shape[1:]) if shape else (count,)
    elif name == "reduce_scatter":
        shape = (shape[0] // count, *shape[1:])
    target = device_form(frame, shape, None, 0, source.dtype, varying)
    if not axes:  # a group of one device
        return tensor.clone()
    return relayout(tensor, source, target, _Collective(name, axes, options))


Group: TypeAlias = MeshGroup | DeviceMesh | tuple[DeviceMesh, int | str]


def _group(group: Group) -> MeshGroup:
    if isinstance(group, MeshGroup):
        return group
    return group_of(*group) if isinstance(group, tuple) else group_of(group)


def _native(name: str) -> Any:
    # Imported with torch.distributed, which registers their gradients.
    import torch.distributed._functional_collectives

    return getattr(torch.ops._c10d_functional, name)


def all_reduce(tensor: XLATensor, group: Group, op: str = "sum") -> XLATensor:
    """The reduction of the devices' values along a mesh dim, the same on all of them."""
    return _native("all_reduce")(tensor, op, _group(group))


def all_gather(tensor: XLATensor, group: Group, dim: int = 0) -> XLATensor:
    """The devices' values along a mesh dim, concatenated along tensor dim ``dim``."""
    group = _group(group)
    moved = tensor.movedim(dim, 0)
    return _native("all_gather_into_tensor")(moved, group.size(), group).movedim(0, dim)


def reduce_scatter(tensor: XLATensor, group: Group, dim: int = 0, op: str = "sum") -> XLATensor:
    """The reduction of the devices' values, of which each device gets its piece of ``dim``.

    Raises:
        UnsupportedOpError: the dim doesn't divide.
    """
    group = _group(group)
    moved = tensor.movedim(dim, 0)
    return _native("reduce_scatter_tensor")(moved, op, group.size(), group).movedim(0, dim)


def all_to_all(tensor: XLATensor, group: Group) -> XLATensor:
    """Piece ``j`` of device ``i``'s dim 0 becomes piece ``i`` of device ``j``'s.

    Raises:
        UnsupportedOpError: the dim doesn't divide.
    """
    group = _group(group)
    sizes = [tensor.shape[0] // group.size()] * group.size()
    return _native("all_to_all_single")(tensor, sizes, sizes, group)


class _Linear(torch.autograd.Function):
    """Collectives for which torch has no gradient formula."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, name: str, group: MeshGroup, option: Any) -> Any:
        ctx.call = name, group, option
        return run(name, tensor, group, option)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        name, group, option = ctx.call
        if name == "permute":
            back = tuple((dst, src) for src, dst in option)
            return _Linear.apply(grad, "permute", group, back), None, None, None
        total = all_reduce(grad, group)
        return total * (axis_index(group.mesh, group.dim) == option), None, None, None


def broadcast(tensor: XLATensor, group: Group, src: int = 0) -> XLATensor:
    """The value of the device at coordinate ``src`` along a mesh dim, on all of them."""
    return _Linear.apply(tensor, "broadcast", _group(group), src)


def permute(tensor: XLATensor, group: Group, src_dst: Sequence[int]) -> XLATensor:
    """The device at coordinate ``i`` along a mesh dim sends its value to ``src_dst[i]``."""
    pairs = tuple(enumerate(src_dst))
    return _Linear.apply(tensor, "permute", _group(group), pairs)


def axis_index(mesh: DeviceMesh, dim: int | str = 0) -> XLATensor:
    """The coordinate of each device along a mesh dim: an int64 per-device tensor of shape []."""
    group = group_of(mesh, dim)
    frame, axes = group.frame, group.axes
    sizes = [frame.sizes[name] for name in axes]
    varying = union(frame, [axes])
    with jax.enable_x64(True):
        index = jnp.arange(group.size(), dtype=jnp.int64).reshape(sizes)
        index = index.transpose([axes.index(name) for name in varying])
        form = device_form(frame, (), dtype=torch.int64, varying=varying)
        if _context.current() is None:
            index = jax.device_put(index, form.sharding)
    return XLATensor(Storage(index, form), form)
