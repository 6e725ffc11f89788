"""Asks layout rules for the placements of a call's results, and those its arguments should have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.distributed.tensor import Placement

from xla_dtensor.base.torch_private import OpOverload
from xla_dtensor.base.torch_private.attributes import schema_of
from xla_dtensor.errors import LayoutRuleError
from xla_dtensor.rules.alternatives import Merged
from xla_dtensor.rules.call import Call, OutShapes, _tensors, bind, tensors_text
from xla_dtensor.rules.merging import Placements, shard_dim
from xla_dtensor.rules.registry import Registration, UserRule, _by_notation, find_registration


def infer(
    func: OpOverload,
    args: tuple,
    kwargs: dict,
    out_shapes: OutShapes,
    mesh_shape: tuple[int, ...],
    mesh: Any = None,
) -> Merged | None:
    """Input and output layouts of one call; None if no rule speaks for it.

    Raises:
        LayoutRuleError: what the rule says doesn't fit the call.
    """
    found = find_registration(func)
    if found is None:
        return None
    call = Call(
        func, bind(func, args, kwargs), tuple(out_shapes), tuple(mesh_shape), mesh, (args, kwargs)
    )
    merged = ask(found.rule, call)
    if merged is None:
        return None
    _check(found, call, merged)
    return _written(call, merged)


def ask(rule: UserRule, call: Call) -> Merged | None:
    """What `rule` says of `call`, a notation read.

    Raises:
        LayoutRuleError: a notation doesn't fit the call.
    """
    said = rule(call)
    return said if not isinstance(said, str) else _by_notation(said, call, multilinear=False)


def _check(found: Registration, call: Call, merged: Any) -> None:
    """Raise if what a rule said can't be true of the call."""
    about = (
        f"the layout rule of {call.func} ({found.text!r}, {found.kind} rule from {found.where}), "
        f"called with {tensors_text(call)},"
    )
    if not isinstance(merged, Merged):
        raise LayoutRuleError(
            f"{about} returned {merged!r}; it returns Merged layouts (call.merge, call.follow), a "
            "notation, or None"
        )
    if len(merged.outputs) != call.n_outputs:
        raise LayoutRuleError(
            f"{about} gave {len(merged.outputs)} output layouts for {call.n_outputs} outputs"
        )
    outputs = list(zip(call.out_shapes, merged.outputs, strict=True))
    inputs: list[Any] = []
    if found.kind != "family":  # ours may name fewer
        if len(merged.inputs) != len(call.tensors):
            raise LayoutRuleError(
                f"{about} gave {len(merged.inputs)} input layouts for {len(call.tensors)} tensors"
            )
        inputs = [(t.shape, p) for t, p in zip(call.tensors, merged.inputs, strict=True)]
    for what, each in (("an output", outputs), ("an input", inputs)):
        for shape, placements in each:
            if shape is None:
                continue
            if len(placements) != len(call.mesh_shape) or not all(
                isinstance(p, Placement) for p in placements
            ):
                raise LayoutRuleError(
                    f"{about} gave {placements} for {what} of shape {list(shape)}: a layout has "
                    "one placement per mesh dim"
                )
            dims = [shard_dim(p) for p in placements]
            if any(d is not None and not 0 <= d < len(shape) for d in dims):
                raise LayoutRuleError(
                    f"{about} gave {placements} for {what} of shape {list(shape)}, which has "
                    f"{len(shape)} dims"
                )


def infer_placements(
    func: OpOverload,
    args: tuple,
    kwargs: dict,
    out_shapes: list[tuple[int, ...] | None],
    mesh_shape: tuple[int, ...],
) -> list[Placements] | None:
    """The placements of each tensor result; None if no rule speaks for `func`.

    `out_shapes` is flat, with None for a result that is no tensor (its placements mean nothing).
    """
    merged = infer(func, args, kwargs, out_shapes, mesh_shape)
    return None if merged is None else list(merged.outputs)


def _written(call: Call, merged: Merged) -> Merged:
    """A result that is an argument, written in place, stays laid out as that argument is; an
    ``out=`` tensor that gets another shape is laid out as the rule says."""
    outputs = list(merged.outputs)
    written = [a for a in schema_of(call.func).arguments if a.alias_info and a.alias_info.is_write]
    by_alias = {tuple(a.alias_info.before_set): a for a in written}
    at = 0
    for result in schema_of(call.func).returns:
        argument = by_alias.get(tuple(result.alias_info.before_set)) if result.alias_info else None
        targets = list(_tensors(call.args[argument.name])) if argument else [None]
        for target in targets:
            if target is not None and at < len(outputs):
                shape = call.out_shapes[at]
                if shape is None or tuple(shape) == tuple(target.shape):
                    outputs[at] = target.placements
            at += 1
    return replace(merged, outputs=tuple(outputs))
