"""`dispatch`: the one path of every operation on xla tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor import rules
from xla_dtensor.base import events, executor, interrupts
from xla_dtensor.base.numbers import row_comparisons, row_counts
from xla_dtensor.base.tables.cache import Cache
from xla_dtensor.dispatch import several_devices, several_meshes
from xla_dtensor.dispatch.shared_memory import count_writes, run_in_order
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.execution.several import agree
from xla_dtensor.lowering import changes as lowering_changes
from xla_dtensor.lowering import (
    families,  # noqa: F401  (registers all lowerings)
)
from xla_dtensor.plans.call import Call, view_key
from xla_dtensor.plans.one_mesh import on_one_mesh
from xla_dtensor.plans.ops import info_of, infos
from xla_dtensor.plans.plan import Plan, mutated_leaves
from xla_dtensor.plans.view_plan import ViewPlan
from xla_dtensor.runtime import agreement, processes
from xla_dtensor.tensors.of_form import is_ours

# Bounded, as each plan may hold a compiled program, megabytes of the host's memory.
_plans: Cache[Any, Plan | ViewPlan] = Cache("plans", 2048)
lowering_changes.listen(_plans.clear)
rules.changes.listen(_plans.clear)

# Who splits a call up into others, asked in this order: calls on several sets of devices, and on
# several meshes. Such calls get no plan, so they come here each time.
_ROUTES: tuple[Callable[..., Any], ...] = (
    several_devices.run,
    several_devices.by_mesh,
    several_meshes.run,
)


@interrupts.atomic
def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Execute an aten overload on xla tensors (and numbers, and CPU tensors among them)."""
    running = executor.current()
    observer = events.observer
    info = infos.get(func._op) or info_of(func)
    short_key = None
    # In a trace a view's steps may hold numbers of the trace, which a key must not keep
    # (`Call._take_view`).
    if info.view is not None and observer is None and running.trace is None and not kwargs:
        short_key = view_key(info, args)
        plan: Any = None if short_key is None else _plans.get(short_key)
        if plan.__class__ is ViewPlan:
            return plan.make(args[0])
    if not interrupts.ready():
        # The user, Jupyter or asyncio may have set another handler since.
        interrupts.install()
    for route in running.routes:
        result = route(func, args, kwargs)
        if result is not NotImplemented:
            return result
    for route in info.routes if running.trace is None else info.traced_routes:
        if observer is None:
            result = route(func, args, kwargs)
        else:
            result = observer.special(route, func, args, kwargs)
        if result is not NotImplemented:
            return result
    if info.composition is not None:
        # Autograd's kernels do so, but aren't asked in inference mode and below other kernels.
        return info.composition(*args, **kwargs)
    several = processes.several()
    try:
        call = Call(info, args, kwargs)
    except row_counts.Met:
        return row_comparisons.executor().run(func, args, kwargs)
    if several:
        # A tensor that has joined the others' devices has another form, so another key.
        while running.joins(call):
            call = Call(info, args, kwargs)
    plan = _plans.get(call.key)
    if info.mutated:
        written = mutated_leaves(call) if plan is None else plan.mutated
        for i in written:
            if not is_ours(call.leaves[i]):
                _refuse_host_write(call)
        if len(written) > 1:
            results = run_in_order(call, written, func, args, kwargs, dispatch)
            if results is not NotImplemented:
                return results
    if plan is None:
        for takes in _ROUTES:
            results = takes(call, func, args, kwargs, dispatch)
            if results is not NotImplemented:
                return results
        plan = _plans.put(call.key, _made(call))
    if short_key is not None and not several and not info.routes:
        # With several processes a view's base may have to join the others' first.
        _plans.put(short_key, plan)
    if observer is not None:
        observer.planned(call, plan)
    if plan.__class__ is ViewPlan:
        base = call.leaves[0]
        running.touched(base)
        results = plan.make(base)
    else:
        results = running.perform(plan, call)
        if info.counts_writes:
            count_writes([call.leaves[i] for i in written])
    if observer is not None:
        observer.operation(call, plan)
    return results


def _made(call: Call) -> Plan | ViewPlan:
    """Make the plan of a call. Several processes compare calls first: a program that one of them
    compiles and another doesn't would wait in its collectives for ever."""
    # Else `running.joins` has compared this call, as every other.
    if not agreement.every_launch():
        agree(call)
    plan = _make_plan(call)
    if isinstance(plan, Plan) and plan.random:
        agree(call, f" with the seed and position {call.stream.position()}")
    return plan


def _make_plan(call: Call) -> Plan | ViewPlan:
    if torch.Tag.inplace_view in call.info.func.tags:
        raise UnsupportedOpError(
            f"{call.info.name} would change what the tensor itself is, which is not implemented "
            "for this overload; use the form without the underscore and assign it (x = x.t())"
        )
    if call.info.view is not None and is_ours(call.leaves[0]):
        return ViewPlan(call)
    call.forms = on_one_mesh(call.forms)
    return Plan(call, call.leaves)


def _refuse_host_write(call: Call) -> None:
    raise UnsupportedOpError(
        f"{call.info.name} would write an xla tensor's value into a CPU tensor; bring the value "
        "over with .cpu() or .full_tensor().cpu() first"
    )
