"""Calls on tensors of several device sets or meshes, split up into one call for each.

Several device sets: the stages of a pipeline in one `clip_grad_norm_`, one optimizer, one moving
average. Several meshes that cut up the same devices in different ways, of which none has the dims
of all: experts, and the rest of a model.

A call on lists (``_foreach_``, ``_fused_``) does the same to each element by itself, so it is made
once for each set of devices, or mesh. In any call a scalar (the norm of all gradients, a loss) goes
where the other tensors are, as torch lets a scalar of the CPU join tensors of any device.
Everything else raises `MeshMismatchError`, as does a scalar whose gradient would have to find its
way back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.forms.form import Form, device_form
from xla_dtensor.forms.read import logical_value
from xla_dtensor.mesh import Frame
from xla_dtensor.plans.call import Call
from xla_dtensor.plans.one_mesh import on_one_mesh
from xla_dtensor.plans.plan import mutated_leaves
from xla_dtensor.runtime import arrays
from xla_dtensor.tensors.of_form import is_ours, new_tensor

_ON_LISTS = ("aten::_foreach_", "aten::_fused_")
Dispatch = Callable[[Any, Any, dict[str, Any]], Any]


def by_mesh(call: Call, func: Any, args: Any, kwargs: dict[str, Any], dispatch: Dispatch) -> Any:
    """Execute a call on lists whose tensors are on several meshes that can't be taken for one.

    Returns:
        its results; ``NotImplemented`` if there is one mesh, or the call isn't of that kind.
    """
    if not call.info.name.startswith(_ON_LISTS):
        return NotImplemented
    forms = [f for f in on_one_mesh(call.forms) if f.__class__ is Form and f.mesh is not None]
    if len({form.mesh for form in forms}) < 2:
        return NotImplemented
    return _by_place(func, args, kwargs, dispatch, _mesh)


def run(call: Call, func: Any, args: Any, kwargs: dict[str, Any], dispatch: Dispatch) -> Any:
    """Execute a call whose tensors are on several sets of devices.

    Returns:
        its results; ``NotImplemented`` if they are on one, if it can't be done, and in a trace.
    """
    # A compiled step is one XLA program, which runs on one set of devices.
    if executor.trace() is not None:
        return NotImplemented
    frames: dict[tuple[int, ...], Frame] = {}
    for form in call.forms:
        if form.__class__ is Form and form.frame is not None:
            frames.setdefault(form.frame.device_ids, form.frame)
    if len(frames) < 2:
        return NotImplemented
    if call.info.name.startswith(_ON_LISTS):
        results = _by_place(func, args, kwargs, dispatch, _devices)
        if results is not NotImplemented:
            return results
    home = _home(call, frames)
    if home is None:
        return NotImplemented
    args, kwargs = pytree.tree_map_only(
        is_ours, functools.partial(_at, home=home), (tuple(args), kwargs)
    )
    return dispatch(func, args, kwargs)


# --- lists ---------------------------------------------------------------------------------------


def _by_place(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    dispatch: Dispatch,
    place: Callable[[list[Any]], Any],
) -> Any:
    """A call on lists, once for the elements in each place."""
    count = len(args[0])
    lists = [v for v in (*args, *kwargs.values()) if _is_list(v, count)]
    groups: dict[Any, list[int]] = {}
    for i in range(count):
        groups.setdefault(place([values[i] for values in lists]), []).append(i)
    if len(groups) < 2:
        return NotImplemented
    results: list[Any] = [None] * count
    for indices in groups.values():

        def part(value: Any, indices: list[int] = indices) -> Any:
            return [value[i] for i in indices] if _is_list(value, count) else value

        made = dispatch(func, list(map(part, args)), {n: part(v) for n, v in kwargs.items()})
        if made is not None:
            for i, result in zip(indices, made, strict=True):
                results[i] = result
    return None if all(result is None for result in results) else results


def _is_list(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count


def _devices(tensors: list[Any]) -> tuple[int, ...] | None:
    """The devices of the first that has some; None if all are of the default device."""
    for tensor in tensors:
        if is_ours(tensor) and tensor._form.frame is not None:
            return tensor._form.frame.device_ids
    return None


def _mesh(tensors: list[Any]) -> DeviceMesh | None:
    """The mesh of the first that is sharded."""
    for tensor in tensors:
        if is_ours(tensor) and tensor._form.mesh is not None:
            return tensor._form.mesh
    return None


# --- scalars -------------------------------------------------------------------------------------


def _home(call: Call, frames: dict[tuple[int, ...], Frame]) -> Frame | None:
    """The devices to which all scalars can go."""
    written = set(mutated_leaves(call))
    fixed: dict[tuple[int, ...], Frame] = {}
    for i, (leaf, form) in enumerate(zip(call.leaves, call.forms, strict=True)):
        if (
            form.__class__ is Form
            and form.frame is not None
            and not _may_move(leaf, form, i in written)
        ):
            fixed[form.frame.device_ids] = form.frame
    if len(fixed) > 1:
        return None
    return next(iter(fixed.values() or frames.values()))


def _may_move(leaf: Any, form: Form, written: bool) -> bool:
    needs_gradient = torch.is_grad_enabled() and leaf.requires_grad
    return not (form.shape or form.varying or form.meta or written or needs_gradient)


def _at(leaf: Any, home: Frame) -> Any:
    """A scalar on the devices of ``home``, the same on each; what is there already as it is."""
    form = leaf._form
    if form.frame is None or form.frame.device_ids == home.device_ids:
        return leaf
    value = arrays.put(logical_value(leaf), home.replicated)
    return new_tensor(value, device_form(home, (), dtype=form.dtype))
