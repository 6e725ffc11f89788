"""The one path of every operation on xla tensors; README.md here explains it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import torch

from xla_dtensor import _context, rng
from xla_dtensor.device_tensor import XLATensor
from xla_dtensor.dispatch import _special  # noqa: F401  (registers its handlers)
from xla_dtensor.dispatch._call import Call, fill, refuse_cpu_leaf
from xla_dtensor.dispatch._ops import SPECIAL, info_of
from xla_dtensor.dispatch._plan import Plan, ViewPlan, mutated_leaves, tensor_class
from xla_dtensor.dispatch._read import constant_recipe, logical_value, read
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.form import Form
from xla_dtensor.lowering import (
    families,  # noqa: F401  (registers all lowerings)
    on_change,
)
from xla_dtensor.sharded_tensor import XLAShardedTensor
from xla_dtensor.storage import Storage
from xla_dtensor.symbolic import number_value

__all__ = ["dispatch", "logical_value", "read", "refuse_cpu_leaf"]

_plans: dict[Any, Plan | ViewPlan] = {}
on_change(_plans.clear)


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Execute an aten overload on xla tensors (and numbers, and CPU tensors among them)."""
    info = info_of(func)
    special = SPECIAL.get(info.name)
    if special is not None:
        result = special(func, args, kwargs)
        if result is not NotImplemented:
            return result
    call = Call(info, args, kwargs)
    tensors = call.leaves
    key = call.key
    if info.mutated:
        # Where a write goes depends on the storages' forms too.
        key = (key, tuple(t._storage_.form for t in tensors if _is_ours(t) and t._steps))
        if not all(map(_is_ours, (tensors[i] for i in mutated_leaves(call)))):
            _refuse_host_write(call)
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(call)
        _plans[key] = plan
    if isinstance(plan, ViewPlan):
        trace = _context.current()
        if trace is not None:
            trace.touched(tensors[0])
        return plan.make(tensors[0])
    return _execute(plan, call)


def _make_plan(call: Call) -> Plan | ViewPlan:
    if torch.Tag.inplace_view in call.info.func.tags:
        raise UnsupportedOpError(
            f"{call.info.name} would change the shape of the tensor itself, which an xla tensor "
            "can't; use the form without the underscore and assign it (x = x.t())"
        )
    if call.info.view is not None and _is_ours(call.leaves[0]):
        return ViewPlan(call)
    return Plan(call, call.leaves)


def _is_ours(value: Any) -> bool:
    return isinstance(value, XLATensor | XLAShardedTensor)


def _execute(plan: Plan, call: Call) -> Any:
    trace = _context.current()
    if trace is not None and plan.info.name in _FILLS:
        form = plan.result_forms[0]
        assert form is not None
        storage = trace.constant(form, _FILLS[plan.info.name](call))
        if storage is not None:
            return tensor_class(form)(storage, form)
    leaves = [
        leaf if not isinstance(form, Form) else read(leaf) if _is_ours(leaf) else _host(leaf, trace)
        for leaf, form in zip(call.leaves, call.forms, strict=True)
    ]
    mutated = [call.leaves[i] for i in plan.mutated]
    bases = [
        None
        if not t._steps
        else t._storage_.array
        if trace is None
        else trace.array_of(t._storage_)
        for t in mutated
    ]
    if trace is None:
        state = rng.words() if plan.random else None
        with jax.enable_x64(True):
            arrays = plan.eager(state, leaves, bases)
        if plan.random:
            rng.advance()
        recipes = None
    else:
        recipes = _recipes(plan, call)
        leaves = [number_value(leaf) for leaf in leaves]
        with jax.enable_x64(True):
            arrays = plan.run(trace.random_key, leaves, bases, False)
    results: list[Any] = []
    position = 0
    for form in plan.result_forms:
        if form is None:
            results.append(None)
            continue
        storage = Storage(arrays[position], form)
        if recipes is not None:
            storage.recipe = functools.partial(_cook, plan, recipes, position)
        results.append(tensor_class(form)(storage, form))
        position += 1
    for tensor, form in zip(mutated, plan.base_forms, strict=True):
        tensor._storage_.write(arrays[position], form)
        position += 1
    return plan.returns(results, call.leaves)


def _recipes(plan: Plan, call: Call) -> list[Any] | None:
    """Per leaf how to compute it outside of the trace, if every leaf can be."""
    if plan.mutated or plan.random:
        return None
    recipes: list[Any] = []
    for leaf in call.leaves:
        if _is_ours(leaf):
            recipe = constant_recipe(leaf)
            if recipe is None:
                return None
            recipes.append(recipe)
        elif isinstance(leaf, int | float | complex):
            recipes.append(functools.partial(_same, leaf))
        else:
            return None
    return recipes


def _same(value: Any) -> Any:
    return value


def _cook(plan: Plan, recipes: list[Any], position: int) -> Any:
    with _context.active(None), jax.ensure_compile_time_eval(), jax.enable_x64(True):
        return plan.eager(None, [recipe() for recipe in recipes], [])[position]


# Factories of constant tensors: what they fill the new tensor with.
_FILLS: dict[str, Any] = {
    "aten::empty.memory_format": lambda call: 0,
    "aten::empty_like.default": lambda call: 0,
    "aten::zeros.default": lambda call: 0,
    "aten::zeros_like.default": lambda call: 0,
    "aten::new_zeros.default": lambda call: 0,
    "aten::ones.default": lambda call: 1,
    "aten::ones_like.default": lambda call: 1,
    "aten::full.default": lambda call: fill(call.args[1], call.leaves),
    "aten::full_like.default": lambda call: fill(call.args[1], call.leaves),
}


def _host(tensor: Any, trace: _context.Trace | None) -> Any:
    if trace is not None:
        return trace.host_tensor(tensor)
    from xla_dtensor.transfer import to_numpy

    return to_numpy(tensor)


def _refuse_host_write(call: Call) -> None:
    raise UnsupportedOpError(
        f"{call.info.name} would write an xla tensor's value into a CPU tensor; bring the value "
        "over with .cpu() or .full_tensor().cpu() first"
    )
