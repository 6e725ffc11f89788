"""The one path of every operation on xla tensors."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import torch

from xla_dtensor import rules
from xla_dtensor.base import assertions, events, interrupts, thread_state
from xla_dtensor.base.cache import Cache
from xla_dtensor.base.number_functions import number_value
from xla_dtensor.dispatch import nowhere, other_meshes, several_devices
from xla_dtensor.plans import conditions
from xla_dtensor.execution import lazy
from xla_dtensor.execution.become import become, check_become, refuse_shared
from xla_dtensor.plans.call import Call, Slot, filled_with
from xla_dtensor.dispatch.joining import join
from xla_dtensor.plans.one_mesh import on_one_mesh
from xla_dtensor.plans.ops import SPECIAL, info_of
from xla_dtensor.plans.plan import Plan, mutated_leaves
from xla_dtensor.dispatch.shared_memory import count_writes, run_in_order
from xla_dtensor.plans.view_plan import ViewPlan
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.read import constant_recipe, read
from xla_dtensor.forms.sharing import launching, lock
from xla_dtensor.forms.views import leave_open
from xla_dtensor.lowering import changes as lowering_changes
from xla_dtensor.lowering import (
    families,  # noqa: F401  (registers all lowerings)
)
from xla_dtensor.runtime import abstract, agreement, processes
from xla_dtensor.tensors.base import TensorMethods
from xla_dtensor.tensors.of_form import new_tensor, tensor_class

_plans: Cache[Any, Plan | ViewPlan] = Cache("plans", 2048)
lowering_changes.listen(_plans.clear)
rules.changes.listen(_plans.clear)


@interrupts.atomic
def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Execute an aten overload on xla tensors (and numbers, and CPU tensors among them)."""
    if not interrupts.ready():
        interrupts.install()
    trace = thread_state.current()
    if trace is not None and trace.stand_ins:
        args = [trace.stand_ins.restore(value) for value in args]
        kwargs = {name: trace.stand_ins.restore(value) for name, value in kwargs.items()}
    info = info_of(func)
    if trace is not None and info.view is not None and trace.positions is not None:
        result = trace.positions.view(info, args, kwargs, dispatch)
        if result is not NotImplemented:
            return result
    special = SPECIAL.get(info.name)
    if special is not None:
        observer = events.observer
        if observer is None:
            result = special(func, args, kwargs)
        else:
            result = observer.special(special, func, args, kwargs)
        if result is not NotImplemented:
            return result
    if info.taken_apart:
        # Autograd's kernels do so, but aren't asked in inference mode and below other kernels.
        return func.decompose(*args, **kwargs)
    call = Call(info, args, kwargs)
    if processes.several() and trace is None:
        if join(call):
            call = Call(info, args, kwargs)
        if agreement.every_launch():
            _agree(call, f" at the seed and position {call.stream.position()}")
    tensors = call.leaves
    key = call.key
    if info.mutated:
        written = mutated_leaves(call)
        forms = []
        for i in written:
            target = tensors[i]
            if not isinstance(target, TensorMethods):
                _refuse_host_write(call)
            if target._steps:  # where a write goes depends on the storage's form, too
                forms.append(target._storage_.form)
        key = (key, *forms)
        if len(written) > 1:
            results = run_in_order(call, written, func, args, kwargs, dispatch)
            if results is not NotImplemented:
                return results
    plan = _plans.get(key)
    if plan is None:
        if trace is None:  # such calls have no plan, and come here each time
            results = several_devices.run(call, func, args, kwargs, dispatch)
            if results is not NotImplemented:
                return results
        for by_mesh in (several_devices.by_mesh, other_meshes.run):
            results = by_mesh(call, func, args, kwargs, dispatch)
            if results is not NotImplemented:
                return results
        if processes.several() and not agreement.every_launch():
            _agree(call)
        plan = _plans.put(key, _make_plan(call))
        if processes.several() and isinstance(plan, Plan) and plan.random:
            _agree(call, f" with the seed and position {call.stream.position()}")
    observer = events.observer
    if observer is not None:
        observer.planned(call, plan)
    if isinstance(plan, ViewPlan):
        if trace is not None:
            trace.touched(tensors[0])
        results = plan.make(tensors[0])
    else:
        results = _execute(plan, call, trace)
        if info.counts_writes:
            count_writes([tensors[i] for i in written])
    if observer is not None:
        observer.operation(call, plan)
    return results


def _agree(call: Call, details: str = "") -> None:
    """Let all processes execute the same operation, if it is one on sharded tensors. On per-device
    tensors no device waits for another: a process may do it alone, or something else."""
    if any(form.__class__ is Form and form.is_sharded for form in call.forms):
        agreement.agree(lambda: f"executes {call.described()}{details}")


def _make_plan(call: Call) -> Plan | ViewPlan:
    if torch.Tag.inplace_view in call.info.func.tags:
        raise UnsupportedOpError(
            f"{call.info.name} would change what the tensor itself is, which is not implemented "
            "for this overload; use the form without the underscore and assign it (x = x.t())"
        )
    if call.info.view is not None and _is_ours(call.leaves[0]):
        return ViewPlan(call)
    call.forms = on_one_mesh(call.forms)
    return Plan(call, call.leaves)


def _is_ours(value: Any) -> bool:
    return isinstance(value, TensorMethods)


def _execute(plan: Plan, call: Call, trace: thread_state.Trace | None) -> Any:
    if trace is not None or abstract.current() is not None:
        return _perform(plan, call, trace, None)
    batch = thread_state.batch()
    if batch is None:
        batch = lazy.batch()
        if batch is None:
            with launching():
                return _perform(plan, call, None, None)
    with lock:
        if plan.only_computes:
            # Nothing to ask and nothing to write: what `_perform` does, for most operations.
            forms: Any = plan.result_forms
            result = plan.structure(list(map(new_tensor, batch.add(plan, call), forms)), [])
        else:
            result = _perform(plan, call, None, batch)
        batch.cut()
    return result


def _perform(
    plan: Plan, call: Call, trace: thread_state.Trace | None, batch: thread_state.Batch | None
) -> Any:
    """Ask what may refuse, compute everything, then write: nothing is written by half."""
    mutated: list[Any] = []
    simple = False
    if plan.mutated:
        mutated = [call.leaves[i] for i in plan.mutated]
        simple = len(mutated) == 1 and plan.grown[0] is None  # the write itself asks
        if not simple:
            _check_writes(plan, mutated)
    recipes = None
    arrays: Any
    if plan.run is None:
        arrays = itertools.repeat(None)
    elif trace is None and abstract.current() is not None:
        arrays = nowhere.results(plan)
    elif trace is None:
        if plan.conditions and assertions.switch.eager:
            look = batch.look if isinstance(batch, lazy.Lazy) else None
            if batch is None or look is not None:
                conditions.check(plan.conditions, call, look)
        arrays = _run(plan, call, batch)
    else:
        if plan.conditions:
            conditions.trace(plan.conditions, call, trace)
        constant = _constant(plan, call, trace)
        if constant is not None:
            return constant
        recipes = _recipes(plan, call)
        arrays = _trace(plan, call, trace)
    remaining = iter(arrays)
    results = [
        None if form is None else new_tensor(next(remaining), form) for form in plan.result_forms
    ]
    if simple:
        mutated[0]._storage_.write(next(remaining), plan.base_forms[0])
    elif mutated:
        new = [
            array if grown is None else new_tensor(array, grown)
            for grown, array in zip(plan.grown, remaining, strict=False)
        ]
        for tensor, form, grown, value in zip(
            mutated, plan.base_forms, plan.grown, new, strict=True
        ):
            if grown is None:
                tensor._storage_.write(value, form)
            else:
                become(tensor, value, plan.info.name)
    if recipes is not None:
        made = [tensor for tensor in results if tensor is not None]
        for position, tensor in enumerate(made):
            tensor._storage_.recipe = functools.partial(_cook, plan, recipes, position)
    return plan.structure(results, mutated)


def _check_writes(plan: Plan, mutated: list[Any]) -> None:
    for tensor, grown in zip(mutated, plan.grown, strict=True):
        if grown is None:
            if tensor._storage_.refuses_writes is not None:
                tensor._storage_.check_write()
        else:
            refuse_shared(tensor, plan.info.name, grown.shape)
            check_become(tensor, plan.info.name)


def _run(plan: Plan, call: Call, batch: thread_state.Batch | None) -> Any:
    """The arrays of the call's results and writes, from the plan's executable."""
    # A tensor that gets other memory doesn't find back to what it was.
    if batch is not None and not any(plan.grown):
        return batch.add(plan, call)
    leaves: list[Any] = []
    for leaf, form in zip(call.leaves, call.forms):  # noqa: B905  (strict costs time)
        if form.__class__ is not Form:
            leaves.append(leaf)
        elif _is_ours(leaf):
            leaves.append(read(leaf) if leaf._steps else leaf._storage_.array)
        else:
            leaves.append(to_numpy(leaf))
    bases = []
    for i in plan.mutated:
        tensor = call.leaves[i]
        bases.append(_base(tensor, tensor._storage_.array) if tensor._steps else None)
    if not plan.random:
        with jax.enable_x64(True):
            return plan.eager(None, leaves, bases)
    state = call.stream.take()
    try:
        with jax.enable_x64(True):
            return plan.eager(state, leaves, bases)
    except BaseException:
        call.stream.give_back(state)
        raise


def _base(view: Any, array: Any) -> tuple[Any, tuple[int, ...]]:
    """What a write to a view goes into: its storage's array, and where in that the view lies."""
    return array, leave_open(view._steps)[1]


def _trace(plan: Plan, call: Call, trace: thread_state.Trace) -> Any:
    """The same on tracers, from the plan's function."""
    leaves = [
        number_value(leaf)
        if not isinstance(form, Form)
        else read(leaf)
        if _is_ours(leaf)
        else trace.host_tensor(leaf)
        for leaf, form in zip(call.leaves, call.forms, strict=True)
    ]
    mutated = [call.leaves[i] for i in plan.mutated]
    bases = [_base(t, trace.array_of(t._storage_)) if t._steps else None for t in mutated]
    key = alike = None
    if plan.of_scalars:
        # Of many parameters the step counts are one array; what is made of them is made once.
        key = (plan, *(repr(x) if isinstance(x, _NUMBERS) else id(x) for x in leaves))
        known = trace.scalars.get(key)
        if known is not None:
            return known[1]
        alike = _of_one(call, leaves)
        if alike is not None:
            known = trace.scalars.get(alike)
            if known is not None:
                return known[1] * len(call.args[0])
    given = leaves
    with jax.enable_x64(True):
        if key is not None and trace.wide is not None:
            given = list(map(trace.wide.widened, leaves))
        with trace.scope():
            arrays = plan.run.in_trace(trace, given, bases)
    if key is not None:
        trace.scalars[key] = leaves, arrays  # the leaves, so that their ids stay theirs
        one = list(arrays[:1])
        same = all(array is one[0] for array in arrays)
        if alike is not None and same and one and len(arrays) == len(call.args[0]):
            trace.scalars[alike] = leaves, one
    return arrays


def _of_one(call: Call, leaves: list[Any]) -> Any:
    """What a call on lists does, if it does the same to one scalar again and again: the step counts
    of two groups of parameters, whose lists have other lengths."""
    is_list = call.args and isinstance(call.args[0], list)
    if not is_list or call.kwargs or not call.info.name.startswith("aten::_foreach_"):
        return None

    def text(value: Any) -> Any:
        if not isinstance(value, Slot):
            return repr(value)
        leaf = leaves[value.index]
        return repr(leaf) if isinstance(leaf, _NUMBERS) else id(leaf)

    parts: list[Any] = []
    for value in call.args:
        texts = set(map(text, value)) if isinstance(value, list) else {text(value)}
        if len(texts) != 1:
            return None
        parts.append((isinstance(value, list), *texts))
    return (call.info.name, *parts)


_NUMBERS = (bool, int, float, complex)


def _constant(plan: Plan, call: Call, trace: thread_state.Trace) -> Any:
    """The result of a factory of constant tensors, if the trace wants it made outside."""
    filled = filled_with(call)
    if filled is None:
        return None
    form = plan.result_forms[0]
    assert form is not None
    storage = trace.constant(form, filled)
    return None if storage is None else tensor_class(form)(storage, form)


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
    with thread_state.active(None), jax.ensure_compile_time_eval(), jax.enable_x64(True):
        return plan.eager(None, [recipe() for recipe in recipes], [])[position]


def _refuse_host_write(call: Call) -> None:
    raise UnsupportedOpError(
        f"{call.info.name} would write an xla tensor's value into a CPU tensor; bring the value "
        "over with .cpu() or .full_tensor().cpu() first"
    )
