"""Collectives on arrays: each is one XLA collective under ``jax.shard_map``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch
from torch.distributed.tensor import DTensor

from xla_dtensor.base import executor
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form, device_form
from xla_dtensor.forms.per_device import expand, union
from xla_dtensor.forms.read import read
from xla_dtensor.forms.storage import Storage
from xla_dtensor.mesh import Frame
from xla_dtensor.mesh.group import MeshGroup
from xla_dtensor.movement.relayout import relayout
from xla_dtensor.rules.cost import Collective
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.device_tensor import XLATensor

_Axes: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class _Collective:
    """One collective as `relayout` takes it; equal ones share an executable.

    Attributes:
        name: the function below that computes it on one device.
        axes: the frame axes that it communicates along.
        options: its other arguments.
    """

    name: str
    axes: _Axes
    options: tuple[Any, ...] = ()

    def moves(self, source: Form, target: Form) -> list[Collective]:
        """What it communicates: all that XLA makes of it is one of these."""
        assert target.frame is not None
        count = math.prod(target.frame.sizes[name] for name in self.axes)
        nbytes = math.prod(source.shape) * source.dtype.itemsize
        kind = _KINDS[self.name]
        if self.name == "all_reduce" and self.options[0] in ("band", "bor", "bxor"):
            kind = "all-gather"
        elif self.name == "reduce_scatter" and self.options[0] not in ("sum", "avg"):
            kind = "all-to-all"
        total = nbytes * count if kind == "all-gather" else nbytes
        return [Collective(kind, self.axes, count, total)]

    def __call__(self, array: Any, source: Form, target: Form) -> Any:
        frame = target.frame
        assert frame is not None
        if self.name == "all_reduce" and self.options == ("product",):
            return _product(array, source, frame, self.axes)
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
            # JAX's check counts what all_gather gives as varying, and it is the same on all.
            check_vma=False,
        )(array)


def _product(array: Any, source: Form, frame: Frame, axes: _Axes) -> Any:
    """An all-reduce that JAX has no name for: what XLA makes of a product over devices."""
    whole = union(frame, [source.varying, axes])
    parts = expand(array, source.varying, whole, frame)
    return jnp.prod(parts, axis=tuple(map(whole.index, axes)), dtype=parts.dtype)


def _all_reduce(x: Any, axes: _Axes, op: str) -> Any:
    if op == "sum":
        return jax.lax.psum(x, axes)
    if op == "avg":
        return jax.lax.pmean(x, axes)
    if op == "max":
        return jax.lax.pmax(x, axes)
    if op == "min":
        return jax.lax.pmin(x, axes)
    # Neither XLA's CPU collectives nor NCCL's reduce bitwise.
    return _LOCAL[op](jax.lax.all_gather(x, axes))


def _all_gather(x: Any, axes: _Axes) -> Any:
    return jax.lax.all_gather(x, axes, axis=0, tiled=True)


def _reduce_scatter(x: Any, axes: _Axes, op: str) -> Any:
    if op in ("sum", "avg"):
        total = jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)
        return total if op == "sum" else total / jax.lax.axis_size(axes)
    # JAX's only sums. This moves as much as one does.
    count = jax.lax.axis_size(axes)
    pieces = x.reshape(count, x.shape[0] // count, *x.shape[1:])
    return _LOCAL[op](_all_to_all(pieces, axes))


def _all_to_all(x: Any, axes: _Axes) -> Any:
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


def _broadcast(x: Any, axes: _Axes, src: int) -> Any:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(_broadcast(x.real, axes, src), _broadcast(x.imag, axes, src))
    own = jax.lax.axis_index(axes) == src
    if not jnp.issubdtype(x.dtype, jnp.floating):
        chosen = jnp.where(own, x, jnp.zeros_like(x))
        return (jax.lax.pmax if x.dtype == bool else jax.lax.psum)(chosen, axes)
    # Of its bits, which a sum with zeros leaves as they are: -0.0 + 0.0 would be 0.0.
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jax.lax.bitcast_convert_type(_broadcast(bits, axes, src), x.dtype)


def _permute(x: Any, axes: _Axes, pairs: Any) -> Any:
    return jax.lax.ppermute(x, axes, pairs)


# Reductions of the values of several devices, along dim 0, on one.
_LOCAL: dict[str, Callable[[Any], Any]] = {
    "max": lambda parts: jnp.max(parts, 0),
    "min": lambda parts: jnp.min(parts, 0),
    "product": lambda parts: jnp.prod(parts, 0, dtype=parts.dtype),
    "band": lambda parts: jnp.bitwise_and.reduce(parts, 0),
    "bor": lambda parts: jnp.bitwise_or.reduce(parts, 0),
    "bxor": lambda parts: jnp.bitwise_xor.reduce(parts, 0),
}

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "permute": _permute,
}

_KINDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "broadcast": "all-reduce",
    "permute": "permute",
}

_REDUCTIONS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")

# A sum of bools that is a bool, and so on: torch's.
_OF_BOOLS = {"sum": "max", "bor": "max", "product": "min", "band": "min"}


def _reduction(name: str, op: str, dtype: torch.dtype, axes: _Axes) -> str:
    """The reduction that ``op`` is on ``dtype``.

    Raises:
        UnsupportedOpError: none.
    """
    if op not in _REDUCTIONS:
        raise UnsupportedOpError(
            f"{name} with reduction {op!r} along {list(axes)}: the reductions are "
            f"{', '.join(_REDUCTIONS)}"
        )
    fractional = dtype.is_floating_point or dtype.is_complex
    lacking = {
        "avg": not fractional,
        "max": dtype.is_complex,
        "min": dtype.is_complex,
        "band": fractional,
        "bor": fractional,
        "bxor": fractional,
    }
    if lacking.get(op, False):
        raise UnsupportedOpError(
            f"{name} with reduction {op!r} along {list(axes)} of a tensor of {dtype}: as in torch, "
            "avg is of floating point and complex numbers, max and min of real ones, band, bor and "
            "bxor of integers; convert the tensor first"
        )
    return _OF_BOOLS.get(op, op) if dtype == torch.bool else op


def _check_pairs(pairs: Sequence[tuple[int, int]], count: int, axes: _Axes) -> None:
    targets = [dst for _, dst in pairs]
    if sorted(targets) != list(range(count)):
        raise UnsupportedOpError(
            f"permute with src_dst {targets} along {list(axes)}: each of the {count} devices has "
            "to receive from one, so it must be a permutation of their coordinates"
        )


def run(name: str, tensor: Any, group: MeshGroup, *options: Any) -> XLATensor:
    """A collective on a per-device tensor; below autograd.

    Raises:
        UnsupportedOpError: the tensor is none, its dim 0 doesn't divide, or an option is wrong.
    """
    check_tensor(name, tensor)
    group = group.within(tensor._form.frame)
    frame, axes, count = group.frame, group.axes, group.size()
    running = executor.current()
    own = frame.one_each and tensor._form.frame is None and running.has_values
    if own and not tensor.is_meta:
        tensor = _of_all_processes(tensor, frame)
    elif not tensor.is_meta:
        running.place(tensor._storage_, frame)
    source = tensor._form.placed(frame)
    source.check_axes(name, frame)
    shape, varying = source.shape, union(frame, [source.varying, axes])
    if name in ("all_reduce", "reduce_scatter"):
        options = (_reduction(name, options[0], source.dtype, axes),)
    elif name == "broadcast" and not 0 <= options[0] < count:
        raise UnsupportedOpError(
            f"broadcast from {options[0]} along {list(axes)}: the source is a coordinate along the "
            f"mesh dim, from 0 to {count - 1}"
        )
    elif name == "permute":
        _check_pairs(options[0], count, axes)
    if name in ("reduce_scatter", "all_to_all") and (not shape or shape[0] % count):
        raise UnsupportedOpError(
            f"{name} of a tensor of shape {list(shape)} along {list(axes)}: dim 0 must divide by "
            f"the {count} devices; pad it"
        )
    if name in ("all_reduce", "all_gather", "broadcast"):
        varying = tuple(axis for axis in source.varying if axis not in axes)
    if name == "all_gather":
        if not shape:
            raise UnsupportedOpError(
                f"all_gather of a tensor without dims along {list(axes)}: there is none to "
                "concatenate along; use x.unsqueeze(0)"
            )
        shape = (shape[0] * count, *shape[1:])
    elif name == "reduce_scatter":
        shape = (shape[0] // count, *shape[1:])
    target = device_form(frame, shape, None, 0, source.dtype, varying, source.meta)
    if source.meta:
        return XLATensor(Storage(None, target), target)
    # A group of one device; equal values, which no permutation changes.
    if not axes or (name == "permute" and not set(axes) & set(source.varying)):
        result = tensor.clone()
    else:
        result = relayout(tensor, source, target, _Collective(name, axes, options))
    return _of_this_process(result) if own else result


def _of_all_processes(tensor: XLATensor, frame: Frame) -> XLATensor:
    """What each process has, as one tensor that varies; the processes' own stay theirs."""
    copy = XLATensor(Storage(read(tensor), tensor._form), tensor._form)
    copy._storage_.join(frame, frame.process_axes)
    return copy


def _of_this_process(tensor: XLATensor) -> XLATensor:
    """What this process's one device has, as a tensor of its own."""
    form = tensor._form
    array = arrays.own_shard(read(tensor)).reshape(form.shape)
    form = device_form(None, form.shape, form.stride, 0, form.dtype)
    return XLATensor(Storage(array, form), form)


def summed(axes: _Axes) -> Callable[[Any, Form, Form], Any]:
    """An all-reduce along frame axes, for `relayout`."""
    return _Collective("all_reduce", axes, ("sum",))


def check_tensor(name: str, tensor: Any) -> None:
    """Raise if ``tensor`` is no per-device tensor."""
    if isinstance(tensor, XLATensor):
        return
    kind = "sharded tensor" if isinstance(tensor, DTensor) else f"tensor on {tensor.device}"
    raise UnsupportedOpError(
        f"{name} of a {kind} of shape {list(tensor.shape)}: collectives along dims of an xla mesh "
        "work on per-device tensors. A sharded tensor is redistributed "
        "(x.redistribute(placements=)), or made per-device with x.to_local(); a CPU tensor with "
        "x.to('xla')"
    )
