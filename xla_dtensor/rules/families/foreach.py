"""Ops on lists of tensors: the rule of the elementwise op, list element by list element."""

from __future__ import annotations

from typing import Any

from xla_dtensor.base.torch_private import OpOverload
from xla_dtensor.base.torch_private.attributes import schema_of
from xla_dtensor.rules.alternatives import Merged, merge
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.families.pointwise import elementwise_alternatives, partial_alternatives
from xla_dtensor.rules.families.reduction import norm_reduction, reduce_placements
from xla_dtensor.rules.merging import TensorInfo
from xla_dtensor.rules.registry import FOREACH, Rule, register_kind


def foreach_rule(func: OpOverload) -> Rule | None:
    name = schema_of(func).name.split("::")[1]
    if name.startswith("_fused_"):
        return fused_optimizer
    if name.removesuffix("_") == "_amp_foreach_non_finite_check_and_unscale":
        return unscale
    if name.removesuffix("_") in REDUCTIONS:
        return foreach_reduction
    return foreach_elementwise


def foreach_elementwise(call: Call) -> Merged | None:
    """elementwise, per list element"""
    lists = [value for value in call.args.values() if _is_tensor_list(value)]
    if not lists:
        return None
    single = [value for value in call.args.values() if isinstance(value, TensorInfo)]
    name = call.name.removeprefix("_foreach_")
    per_element = []
    for elements in zip(*lists, strict=True):
        tensors = [*elements, *single]
        options = elementwise_alternatives(tensors)
        options += partial_alternatives(name, len(tensors))
        per_element.append(merge(options, tensors, 1, call.mesh_shape))
    inputs = [merged.inputs[i] for i in range(len(lists)) for merged in per_element]
    # A tensor that all elements share is used as the first needs it.
    inputs += per_element[0].inputs[len(lists) :] if per_element else ()
    outputs = [merged.outputs[0] for merged in per_element]
    return Merged(tuple(inputs), tuple(outputs[: call.n_outputs]))


def unscale(call: Call) -> Merged | None:
    """elementwise, per gradient; whether any is infinite is known everywhere"""
    merged = foreach_elementwise(call)
    if merged is None or not call.n_outputs:
        return merged
    grads = len(merged.inputs) - 2
    found = merged.inputs[grads]
    return Merged(merged.inputs, (*merged.outputs[:grads], found))


REDUCTIONS = {"_foreach_norm": "norm", "_foreach_max": "max", "_foreach_powsum": "sum"}


def foreach_reduction(call: Call) -> Merged:
    """a full reduction, per list element"""
    reduction: Any = REDUCTIONS[call.name]
    if reduction == "norm":
        order = call.args.get("ord")
        reduction = norm_reduction(2 if order is None else order)
    inputs, outputs = [], []
    for x in call.args["self"]:
        used, out = reduce_placements(x, range(x.ndim), False, reduction, call.mesh_shape)
        inputs.append(used)
        outputs.append(out)
    return Merged(tuple(inputs), tuple(outputs))


def fused_optimizer(call: Call) -> Merged | None:
    """each parameter's update follows that parameter"""
    lists = {name: value for name, value in call.args.items() if _is_tensor_list(value)}
    if "self" not in lists:
        return None
    leading = lists["self"]
    inputs = []
    for name, value in call.args.items():
        if name in lists:
            same = [x.ndim == p.ndim for x, p in zip(value, leading, strict=True)]
            inputs += [
                p.placements if s else x.placements
                for x, p, s in zip(value, leading, same, strict=True)
            ]
        elif isinstance(value, TensorInfo):
            inputs.append(value.placements)
    own = [x.placements for value in lists.values() for x in value]
    return Merged(tuple(inputs), tuple(own[: call.n_outputs]))


def _is_tensor_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(x, TensorInfo) for x in value)


register_kind(FOREACH, foreach_rule)
