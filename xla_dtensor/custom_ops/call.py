"""One call of a `DFunction` on sharded tensors: layouts, per-device arguments, results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from xla_dtensor.base import events
from xla_dtensor.base.tables.keys import exact
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.custom_ops.distributed_op import DistributedOp, Inferred, infer_by_notation
from xla_dtensor.custom_ops.gradients import Input, Pass
from xla_dtensor.custom_ops.results import results, shapes_of
from xla_dtensor.errors import LayoutRuleError, MeshMismatchError, UnsupportedOpError
from xla_dtensor.mesh import frame_of, mesh_dim_axes, root_mesh
from xla_dtensor.mesh.layout import Layout, layout_of
from xla_dtensor.movement.local_view import as_sharded, gives_gradient_as_it_is, last_local
from xla_dtensor.rules import TensorInfo
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.sharded_tensor import XLAShardedTensor

Function = Callable[..., Any]


@dataclass(frozen=True)
class _Prepared:
    """A call whose layouts are known.

    Attributes:
        args, kwargs: what to call the function with.
        sharded: the sharded tensors among the user's arguments, or those that replaced them.
        inferred: what the rule says.
        replacement: takes the function and gives what is called in its place, or None.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sharded: list[XLAShardedTensor]
    inferred: Inferred
    replacement: Callable[[Function], Function | None]


def call(
    op: DistributedOp,
    function: Function,
    bind: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    view: str,
) -> Any:
    """Run ``function`` (the class's plain ``apply``) on what the devices hold of ``args``, or with
    ``view="global"`` on ``args`` themselves; results are laid out as the op's rule says.

    ``bind`` puts arguments into the order of ``forward``, by position where that takes them so.
    """
    sharded = sharded_tensors(args, kwargs)
    _check_inputs(op, sharded)
    observer = events.observer
    with contextlib.nullcontext() if observer is None else observer.function(op, sharded):
        prepared = _by_preprocess(op, args, kwargs)
        if prepared is None:
            args, kwargs = bind(args, kwargs)
            prepare = _by_layouts if op.rule is None else _by_notation
            prepared = prepare(op, args, kwargs, view)
        if observer is not None:
            observer.inferred(prepared.inferred)
        if view == "global":
            _refuse_per_device(op, prepared)
        state = _state(op, prepared.sharded)
        run = function if view == "global" else _on_devices(op, function, prepared.sharded, state)
        out = (prepared.replacement(run) or run)(*prepared.args, **prepared.kwargs)
        return results(op, out, prepared.inferred, state, view)


def _refuse_per_device(op: DistributedOp, prepared: _Prepared) -> None:
    for x in pytree.tree_leaves((prepared.args, prepared.kwargs)):
        if isinstance(x, XLATensor) and x.varying:
            raise LayoutRuleError(
                f"{op.op_name!r}: preprocess gave a per-device tensor of shape {list(x.shape)}, "
                'but view = "global": forward works on sharded tensors; give x in place of '
                "x.to_local()"
            )


def _state(op: DistributedOp, sharded: Sequence[XLAShardedTensor]) -> Pass:
    meshes = [x.device_mesh for x in sharded]
    axes = frozenset(a for mesh in meshes for group in mesh_dim_axes(mesh) for a in group)
    return Pass(op.op_name, frame_of(meshes[0]), axes)


def sharded_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[XLAShardedTensor]:
    """The sharded tensors among the arguments and in lists and dicts among them, in order."""
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, XLAShardedTensor)]


def _check_inputs(op: DistributedOp, sharded: Sequence[XLAShardedTensor]) -> None:
    root = root_mesh(sharded[0].device_mesh)
    for tensor in sharded:
        if root_mesh(tensor.device_mesh) != root:
            raise MeshMismatchError(
                f"{op.op_name!r}: one tensor is on {sharded[0].device_mesh!r}, another on "
                f"{tensor.device_mesh!r}; bring them together with x.redistribute(mesh, placements)"
            )
        if tensor.layout.is_partial() and not op.allow_partial_inputs:
            raise UnsupportedOpError(
                f"{op.op_name!r} got a partial tensor of shape {list(tensor.shape)}, "
                f"{tensor.layout!r}: each device has a part of a sum, and only what is linear may "
                "be applied to parts. Reduce it first with x.reduce_partial(), or, if the op is "
                f"linear in it, set allow_partial_inputs = True on {type(op).__name__}"
            )


def _by_preprocess(
    op: DistributedOp, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Prepared | None:
    """The call as the op's ``preprocess`` prepares it; None if it doesn't."""
    local = op.preprocess(args, kwargs)
    if local is None:
        return None
    local_args, local_kwargs, values = _checked_preprocess(op, local)
    sharded = sharded_tensors(args, kwargs)
    inferred = op._infer(_key(op, values), lambda: _of_values(op, values, sharded))
    if inferred.inputs is not None:
        before = sharded
        args, kwargs, moved = _redistributed(op, args, kwargs, sharded, inferred.inputs)
        if moved:
            sharded = sharded_tensors(args, kwargs)
            exchanged = _exchanged((local_args, local_kwargs), (args, kwargs), before, sharded)
            if exchanged is None:  # it has computed with what is elsewhere now
                exchanged = _checked_preprocess(op, op.preprocess(args, kwargs))[:2]
            local_args, local_kwargs = exchanged
    replacement = lambda run: op.get_expand_impl(run, inferred.returned, values)
    return _Prepared(tuple(local_args), dict(local_kwargs), sharded, inferred, replacement)


def _exchanged(
    local: tuple[Any, Any],
    given: Any,
    before: Sequence[XLAShardedTensor],
    after: Sequence[XLAShardedTensor],
) -> tuple[Any, Any] | None:
    """What ``preprocess`` has given for the tensors ``before``, for those that the rule has moved
    ``after`` it; None where it has given other tensors than these, what devices hold of them, and
    what it was given."""
    instead: dict = {id(x): x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)}
    for old, new in zip(before, after, strict=True):
        shown = last_local(old)
        if new is not old and not gives_gradient_as_it_is(old):
            return None
        pairs = [(old, new)] if shown is None else [(old, new), (shown, None)]
        for tensor, other in pairs:
            if other is None:
                other = shown if new is old else new.to_local()
            if instead.setdefault(id(tensor), other) is not other:
                return None  # one tensor is two arguments, wanted in two layouts
    leaves, tree = pytree.tree_flatten(local)
    if any(isinstance(x, torch.Tensor) and id(x) not in instead for x in leaves):
        return None
    local_args, local_kwargs = pytree.tree_unflatten([instead.get(id(x), x) for x in leaves], tree)
    return local_args, local_kwargs


def _checked_preprocess(op: DistributedOp, local: Any) -> tuple[Any, Any, list[Any]]:
    if not isinstance(local, tuple) or len(local) != 3:
        raise LayoutRuleError(
            f"{type(op).__name__}.preprocess of {op.op_name!r} returns None or (local_args, "
            f"local_kwargs, cache_values), not {type(local).__name__}"
        )
    return local[0], local[1], list(local[2])


def _key(op: DistributedOp, values: list[Any]) -> Hashable:
    key = tuple(map(exact, values))
    for value in values:
        if isinstance(value, torch.Tensor):
            raise LayoutRuleError(
                f"{type(op).__name__}.preprocess of {op.op_name!r} put a tensor into cache_values; "
                "give what decides the layout: its .layout, its shape"
            )
    try:
        hash(key)
    except TypeError as error:
        raise LayoutRuleError(
            f"{type(op).__name__}.preprocess of {op.op_name!r}: cache_values {values} are the key "
            f"of the layout cache, and must be hashable: {error}"
        ) from None
    return key


def _of_values(
    op: DistributedOp, values: list[Any], sharded: Sequence[XLAShardedTensor]
) -> Inferred:
    returned = _infer_layout(op, sharded, values)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise LayoutRuleError(
            f"{op._describes_rule} returned {returned!r}; with a preprocess that gives values it "
            "returns (layouts of the results, None or layouts of the sharded inputs)"
        )
    outputs, inputs = returned
    if inputs is not None:
        if len(inputs) != len(sharded):
            raise LayoutRuleError(
                f"{op._describes_rule} gave {len(inputs)} input layouts for {len(sharded)} sharded "
                f"arguments of shapes {shapes_of(sharded)}"
            )
        inputs = tuple(inputs)
        for layout in inputs:
            if layout is not None:
                _check_layout(op, layout, sharded)
    return Inferred(_layouts(op, outputs, sharded), inputs, None, returned)


def _by_notation(
    op: DistributedOp, args: tuple[Any, ...], kwargs: dict[str, Any], view: str
) -> _Prepared:
    """The call laid out as the op's notation says, which may want any tensor sharded."""
    mesh = _only_mesh(op, sharded_tensors(args, kwargs))
    args, kwargs = pytree.tree_map(
        lambda x: as_sharded(x, mesh) if isinstance(x, torch.Tensor) else x, (args, kwargs)
    )
    sharded = sharded_tensors(args, kwargs)
    infos = [TensorInfo(tuple(x.shape), x.placements, x.dtype) for x in sharded]
    key = (mesh, *infos)
    inferred = op._infer(key, lambda: infer_by_notation(op, infos, mesh))
    assert inferred.inputs is not None
    layouts = tuple(x.layout for x in sharded)
    args, kwargs, _ = _redistributed(op, args, kwargs, sharded, inferred.inputs)
    return _without_preprocess(op, args, kwargs, view, inferred, layouts)


def _by_layouts(
    op: DistributedOp, args: tuple[Any, ...], kwargs: dict[str, Any], view: str
) -> _Prepared:
    """The call laid out as the op's ``infer_layout`` says."""
    sharded = sharded_tensors(args, kwargs)
    mesh = sharded[0].device_mesh
    layouts = tuple(
        x.layout
        if isinstance(x, XLAShardedTensor)
        else layout_of(mesh, (Replicate(),) * mesh.ndim, x.ndim)
        for x in pytree.tree_leaves((args, kwargs))
        if isinstance(x, torch.Tensor)
    )
    extra = _others(args, kwargs)

    def infer() -> Inferred:
        returned = _infer_layout(op, sharded, layouts, extra)
        return Inferred(_layouts(op, returned, sharded), None, None, returned)

    frozen = tuple(map(exact, extra))
    try:
        hash(frozen)
    except TypeError:
        inferred = infer()  # an argument that can't be a key; nothing is remembered
    else:
        inferred = op._infer((layouts, frozen), infer)
    return _without_preprocess(op, args, kwargs, view, inferred, layouts)


def _without_preprocess(
    op: DistributedOp,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    view: str,
    inferred: Inferred,
    layouts: tuple[Layout, ...],
) -> _Prepared:
    sharded, extra = sharded_tensors(args, kwargs), _others(args, kwargs)
    if view == "local":
        args, kwargs = pytree.tree_map(_to_local, (args, kwargs))
    replacement = lambda run: op.get_expand_impl(run, inferred.returned, layouts, extra)
    return _Prepared(args, kwargs, sharded, inferred, replacement)


def _others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that are no tensors."""
    return [x for x in (*args, *kwargs.values()) if not isinstance(x, torch.Tensor)]


def _only_mesh(op: DistributedOp, sharded: Sequence[XLAShardedTensor]) -> DeviceMesh:
    mesh = sharded[0].device_mesh
    for tensor in sharded:
        if tensor.device_mesh != mesh:
            raise MeshMismatchError(
                f"{op._describes_rule}: one tensor is on {mesh!r}, another on "
                f"{tensor.device_mesh!r}, and a notation speaks of one mesh; bring them together "
                "with x.redistribute(mesh, placements)"
            )
    return mesh


def _infer_layout(op: DistributedOp, sharded: Sequence[XLAShardedTensor], *args: Any) -> Any:
    try:
        return op.infer_layout(*args)
    except LayoutRuleError:
        raise
    except (ValueError, RuntimeError, KeyError, IndexError) as error:
        raise LayoutRuleError(
            f"{op._describes_rule} failed on arguments of shapes {shapes_of(sharded)} laid out as "
            f"{[x.layout for x in sharded]}: {type(error).__name__}: {error}"
        ) from error


def _layouts(
    op: DistributedOp, returned: Any, sharded: Sequence[XLAShardedTensor]
) -> tuple[Layout, ...]:
    layouts = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    for layout in layouts:
        _check_layout(op, layout, sharded)
    return layouts


def _check_layout(op: DistributedOp, layout: Any, sharded: Sequence[XLAShardedTensor]) -> None:
    if not isinstance(layout, Layout) or not layout.is_concrete:
        raise LayoutRuleError(
            f"{op._describes_rule} gave {layout!r} for arguments of shapes {shapes_of(sharded)}; a "
            'rule gives a concrete Layout per result: layout("dp", "None"), or one of its arguments'
        )
    mesh = sharded[0].device_mesh
    if root_mesh(layout.mesh) != root_mesh(mesh):
        raise LayoutRuleError(
            f"{op._describes_rule} gave a layout on another mesh, {layout!r} on {layout.mesh!r}; "
            f"the arguments, of shapes {shapes_of(sharded)}, are on {mesh!r}"
        )


def _redistributed(
    op: DistributedOp,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sharded: Sequence[XLAShardedTensor],
    wanted: Sequence[Layout | None],
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """The arguments in the layouts that the rule wants, and whether any has moved."""
    moved: dict[tuple[int, Layout], XLAShardedTensor] = {}
    leaves, tree = pytree.tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, XLAShardedTensor)]
    # By place: one tensor may be two arguments, wanted in two layouts.
    for place, tensor, layout in zip(places, sharded, wanted, strict=True):
        if layout is None or layout == tensor.layout:
            continue
        if layout.ndim is not None and layout.ndim != tensor.ndim:
            raise LayoutRuleError(
                f"{op._describes_rule} wants {layout!r}, of {layout.ndim} dims, for an argument of "
                f"shape {list(tensor.shape)}"
            )
        key = id(tensor), layout
        if key not in moved:
            moved[key] = tensor.redistribute(layout.mesh, layout.placements)
        leaves[place] = moved[key]
    args, kwargs = pytree.tree_unflatten(leaves, tree)
    return args, kwargs, bool(moved)


def _to_local(value: Any) -> Any:
    return value.to_local() if isinstance(value, XLAShardedTensor) else value


def _on_devices(
    op: DistributedOp, function: Function, sharded: Sequence[XLAShardedTensor], state: Pass
) -> Function:
    """``function`` on per-device arguments, whose gradients are those of the whole."""
    # Local tensors are known by identity: to_local() returns the same one every time.
    locals_ = ((last_local(x), x.layout) for x in sharded)
    partial = {id(x): layout for x, layout in locals_ if x is not None and layout.is_partial()}

    def prepare(where: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, XLAShardedTensor):
            raise LayoutRuleError(
                f"{op.op_name!r}: {where} of forward is a sharded tensor of shape "
                f"{list(value.shape)}; forward works on what each device holds: give x.to_local(), "
                'or set view = "global" on the DFunction'
            )
        layout = partial.get(id(value))
        local = value.to("xla") if value.device.type == "cpu" else value
        if not isinstance(local, XLATensor) or not local.requires_grad:
            return local
        return Input.apply(local, layout, state, f"{where} of {op.op_name!r}")

    def run(*args: Any, **kwargs: Any) -> Any:
        prepared = [prepare(f"argument {i}", x) for i, x in enumerate(args)]
        named = {name: prepare(f"argument {name!r}", x) for name, x in kwargs.items()}
        given = {id(x) for x in prepared if isinstance(x, torch.Tensor)}
        out = function(*prepared, **named)
        if any(id(x) in given for x in pytree.tree_leaves(out)):
            raise UnsupportedOpError(
                f"{op.op_name!r}: forward marked an argument as changed in place "
                "(ctx.mark_dirty); return a new tensor instead"
            )
        return out

    return run
