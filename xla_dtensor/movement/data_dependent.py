"""Overloads whose results' shapes (or Python values) depend on values: CPU torch computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from xla_dtensor.base import executor
from xla_dtensor.base.numbers.row_counts import is_count
from xla_dtensor.dispatch.host_copies import to_cpu
from xla_dtensor.dispatch.out_arguments import into
from xla_dtensor.execution.on_host import refuse_varying
from xla_dtensor.execution.value_checks import assert_true
from xla_dtensor.forms.read import constant_recipe
from xla_dtensor.movement.distribute import lay_out
from xla_dtensor.movement.factories import replicated
from xla_dtensor.plans.ops import handles, info_of
from xla_dtensor.tensors.indexing import check_masks, is_masked_fill
from xla_dtensor.tensors.indexing import is_mask as _is_mask
from xla_dtensor.tensors.of_form import is_ours


@handles(
    "aten::nonzero.default",
    "aten::masked_select.default",
    "aten::_unique.default",
    "aten::_unique2.default",
    "aten::unique_dim.default",
    "aten::unique_consecutive.default",
    "aten::unique_dim_consecutive.default",
    "aten::bincount.default",
    "aten::argwhere.default",
    "aten::histogram.bin_ct",
    "aten::equal.default",
    "aten::allclose.default",
)
def by_cpu_torch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Results whose shape (or Python value) depends on values: computed by CPU torch, and returned
    replicated."""
    tensors = _tensors((args, kwargs))
    ours = list(filter(is_ours, tensors))
    constant = all(map(_is_constant, tensors))  # eagerly none is, and nothing is refused
    if not constant and not all(map(executor.current().can_fetch, ours)):
        name = info_of(func).name
        instead = _INSTEAD.get(name.partition(".")[0])
        hint = "" if instead is None else f" ({instead})"
        what = "result" if name in _TRUTHS else "result's shape"
        executor.current().refuse(f"{name}, whose {what} depends on values{hint},")
    for tensor in ours:
        refuse_varying(tensor._form, f"the shape of {info_of(func).name}'s result")
    recording = executor.NOTHING if constant else executor.current().recording()
    with recording:
        out = func(*_map(args, _to_host_argument), **_map(kwargs, _to_host_argument))
    mesh = next((t._form.mesh for t in ours if t._form.mesh is not None), None)

    def back(tensor: torch.Tensor) -> torch.Tensor:
        if constant:
            executor.current().made_of_constants(tensor)
        if mesh is None:
            return tensor.to("xla")
        return lay_out(tensor, mesh, replicated(mesh))

    return _map(out, lambda x: back(x) if isinstance(x, torch.Tensor) else x)


def _is_constant(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the same in each call of what is traced."""
    if is_ours(tensor):
        return constant_recipe(tensor) is not None
    return executor.current().host_constant(tensor) is not None


_ON_HOST_OUT = {
    "aten::masked_select.out": torch.ops.aten.masked_select.default,
    "aten::nonzero.out": torch.ops.aten.nonzero.default,
}


@handles(*_ON_HOST_OUT)
def _on_host_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    out = kwargs["out"]
    result = by_cpu_torch(_ON_HOST_OUT[info_of(func).name], args, {})
    if out.dtype != result.dtype:
        raise RuntimeError(
            f"{info_of(func).name}: expected out to have dtype {result.dtype}, not {out.dtype}"
        )
    return into(out, result)


_TRUTHS = ("aten::equal.default", "aten::allclose.default")

# Alternatives for messages: the same values, in a result whose shape is known.
_INSTEAD = {
    "aten::bincount": "torch.zeros(n, dtype=torch.int64, device=x.device)"
    ".scatter_add(0, x, torch.ones_like(x)) has n entries",
    "aten::repeat_interleave": "with output_size= it is known: a number, or sum(counts.tolist()) "
    "of which torch._check(n <= most) says what it is at most",
    "aten::nonzero": "torch.nonzero_static(x, size=n) has n entries",
    "aten::index": "torch.where and masked_fill keep the shape",
    "aten::index_put": "values that broadcast, x[mask] = 0, need no count",
    "aten::masked_select": "torch.where and masked_fill keep the shape",
}


def say_instead(name: str, text: str) -> None:
    """Let the refusal of an op ``name``, of another library, say what has a shape that is known."""
    _INSTEAD[name] = text


@handles("aten::equal.default", traced=True)
def _equal(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """In a step what is no matter of values: other shapes, and one and the same tensor, which
    equals itself unless it has NaNs, so that it hasn't is asserted."""
    x, y = args
    if is_ours(x) and is_ours(y) and x.dtype == y.dtype:
        if x.shape != y.shape:
            return False
        if x._storage_ is y._storage_ and x._steps == y._steps:
            message = (
                "torch.equal(x, x) in a compiled step, of a tensor that has NaNs (so it isn't)"
            )
            if x.is_floating_point() or x.is_complex():
                same: Any = x == x
                assert_true(same.all(), message)
            return True
    return by_cpu_torch(func, args, kwargs)


@handles("aten::repeat_interleave.Tensor", traced=True)
def _traced_repeat_interleave(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """With its size given it can be traced."""
    return by_cpu_torch(func, args, kwargs) if kwargs.get("output_size") is None else NotImplemented


@handles("aten::repeat_interleave.Tensor")
def _repeat_interleave(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """With its size given, counts may differ from device to device: each has so many rows."""
    size = kwargs.get("output_size")
    own_counts = size is not None and (args[0]._form.varying or is_count(size))
    return NotImplemented if own_counts else by_cpu_torch(func, args, kwargs)


@handles("aten::index.Tensor")
def _index_by_mask(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not any(map(_is_mask, args[1])):
        return NotImplemented
    known = _at_known_masks(*args)
    return by_cpu_torch(func, args, kwargs) if known is None else func(args[0], known)


@handles("aten::masked_select.default", traced=True)
def _select_by_mask(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, mask = torch.broadcast_tensors(*args)
    known = _at_known_masks(x, [mask])
    if known is None:
        return by_cpu_torch(func, args, kwargs)
    return torch.ops.aten.index.Tensor(x, known)


@handles("aten::index_put.default")
def _index_put_by_mask(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not any(map(_is_mask, args[1])) or is_masked_fill(*args[:3]):
        return NotImplemented
    known = _at_known_masks(*args[:2])
    if known is not None:
        return func(args[0], known, *args[2:], **kwargs)
    return by_cpu_torch(func, args, kwargs)


@handles("aten::index_put_.default", "aten::_index_put_impl_.default")
def _index_put_by_mask_(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not any(map(_is_mask, args[1])) or is_masked_fill(*args[:3]):
        return NotImplemented
    known = _at_known_masks(*args[:2])
    if known is not None:
        return func(args[0], known, *args[2:], **kwargs)
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    out = by_cpu_torch(torch.ops.aten.index_put.default, (*args[:3], accumulate), {})
    return args[0].copy_(out)


def _at_known_masks(x: Any, indices: Sequence[Any]) -> list[Any] | None:
    """In a step where the host can have the masks among the indices: with the positions of the
    entries that are set in the place of each mask; else None."""
    masks = list(filter(_is_mask, indices))
    # Of a mask of no dims (`index_put` itself is given one) there are no positions.
    if executor.current().has_values or not all(m.ndim and is_ours(m) for m in masks):
        return None
    constant = all(map(constant_recipe, masks))
    if not constant and not all(map(executor.current().can_fetch, masks)):
        return None
    check_masks(x, indices)
    found: list[Any] = []
    for index in indices:
        if _is_mask(index):
            with executor.NOTHING if constant else executor.current().recording():
                positions = to_cpu(index).nonzero()
            if constant:
                executor.current().made_of_constants(positions)
            found += positions.to(x.device).unbind(1)
        else:
            found.append(index)
    return found


def _to_host_argument(value: Any) -> Any:
    return to_cpu(value) if is_ours(value) else value


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_map(v, function) for v in value)
    if isinstance(value, dict):
        return {k: _map(v, function) for k, v in value.items()}
    return function(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    return []
