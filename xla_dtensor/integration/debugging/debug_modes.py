"""torch's modes that watch DTensors: ``CommDebugMode``, ``DebugMode``, explicit redistribution.

They look for ``DTensor`` itself, and for what its dispatch does underneath, of which there is
nothing here.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch

from xla_dtensor.base import torch_private
from xla_dtensor.base.ours import OurTensor
from xla_dtensor.base.torch_private import HigherOrderOperator
from xla_dtensor.base.torch_private.attributes import (
    explicit_redistribution,
    record_call,
    record_result,
)
from xla_dtensor.errors import PlacementError
from xla_dtensor.integration.patching.on_import import on_import
from xla_dtensor.integration.patching.take_over import take_over

# torch's functional collectives that do what XLA's do. torch permutes by an all-to-all.
_COLLECTIVES = {
    "all-gather": "all_gather_into_tensor",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all_single",
    "broadcast": "broadcast",
    "permute": "all_to_all_single",
    "reduce-scatter": "reduce_scatter_tensor",
}

_ATTRIBUTE = "_xla_dtensor_watch"


def install() -> None:
    """When their modules are imported. Read in torch 2.11, checked on 2.13."""
    on_import(torch_private.COMM_MODE, _hook_comm_mode)
    on_import(torch_private.debug_mode(), _hook_debug_mode)
    on_import(torch_private.DTENSOR_UTILS, _hook_explicit)


def _any_ours(types: Any) -> bool:
    return any(issubclass(t, OurTensor) for t in types)


def _start(self: Any, watch: Any) -> None:
    vars(self).setdefault(_ATTRIBUTE, []).append(watch)
    watch.start()


def _stop(self: Any) -> None:
    watches = vars(self).get(_ATTRIBUTE)
    if watches:
        watches.pop().stop()


def _leave(original: Any, args: Any, kwargs: Any) -> Any:
    """``__exit__`` of any of them."""
    try:
        return original(*args, **kwargs)
    finally:
        _stop(args[0])


# --- CommDebugMode -------------------------------------------------------------------------------


def _hook_comm_mode(module: Any) -> None:
    methods = vars(module.CommDebugMode)
    take_over(methods["__enter__"], _enter_comm_mode)
    take_over(methods["__exit__"], _leave)
    take_over(methods["__torch_dispatch__"], _operation_in_comm_mode)


def _enter_comm_mode(original: Any, args: Any, kwargs: Any) -> Any:
    from xla_dtensor.debug.communication import Communication

    result = original(*args, **kwargs)
    _start(args[0], Communication(functools.partial(_count, args[0])))
    return result


def _count(mode: Any, kind: str, count: int) -> None:
    """Count as the mode does: in all, and for the module that runs and those around it."""
    packet = getattr(torch.ops.c10d_functional, _COLLECTIVES[kind])
    mode.comm_counts[packet] += count
    tracker = mode.advanced_module_tracker
    direction = "backward" if tracker.is_bw else "forward"
    parents = set(tracker.module_parents_dict[tracker.name]) - {tracker.name}
    for name in (tracker.name, *parents):
        if name not in mode.comm_module_counts:
            mode.comm_module_counts[name] = {
                "forward": defaultdict(int),
                "backward": defaultdict(int),
            }
        mode.comm_module_counts[name][direction][packet] += count


def _operation_in_comm_mode(original: Any, args: Any, kwargs: Any) -> Any:
    """Note an operation on our tensors in the mode's list; what it communicates is told while it
    runs. Of a collective on per-device tensors, too, or it would count twice."""
    mode, func, types, *rest = args
    if isinstance(func, HigherOrderOperator) or not _any_ours(types):
        return original(*args, **kwargs)
    given = rest[0] if rest else kwargs.get("args", ())
    named = (rest[1] if len(rest) > 1 else kwargs.get("kwargs")) or {}
    tracker = mode.advanced_module_tracker
    sharded = [x for x in given if isinstance(x, torch.distributed.tensor.DTensor)]
    operations = mode.comm_module_operation_counts.setdefault(tracker.name, {"operations_list": []})
    operations["operations_list"].append(
        {
            "name": func,
            "input_shape": [x.shape for x in sharded],
            "input_sharding": [x.placements for x in sharded],
            "device_mesh": str(sharded[-1].device_mesh) if sharded else "",
            "is_bw": tracker.is_bw,
            "is_activation_checkpointing": tracker.activation_checkpointing,
        }
    )
    return func(*given, **named)


# --- DebugMode -----------------------------------------------------------------------------------


def _hook_debug_mode(module: Any) -> None:
    mode: Any = vars(module).get("DebugMode")
    if mode is None:
        return
    methods = vars(mode)
    take_over(methods["__enter__"], _enter_debug_mode)
    take_over(methods["__exit__"], _leave)
    handler = functools.partial(_operation_in_debug_mode, vars(module))
    take_over(methods["__torch_dispatch__"], handler)


def _enter_debug_mode(original: Any, args: Any, kwargs: Any) -> Any:
    from xla_dtensor.debug.communication import Redistributions

    result = original(*args, **kwargs)
    _start(args[0], Redistributions(functools.partial(_show, args[0])))
    return result


def _show(mode: Any, argument: int | str, source: Any, target: Any) -> None:
    """A line for a redistribution, below its operation's."""
    explicit = isinstance(argument, str)
    with mode.record_redistribute_calls(argument, source, target, is_explicit=explicit):
        pass


def _operation_in_debug_mode(module: Any, original: Any, args: Any, kwargs: Any) -> Any:
    """A line for an operation on our tensors, as for one on DTensors."""
    mode, func, types, *rest = args
    if isinstance(func, HigherOrderOperator) or not _any_ours(types):
        return original(*args, **kwargs)
    given = rest[0] if rest else kwargs.get("args", ())
    named = (rest[1] if len(rest) > 1 else kwargs.get("kwargs")) or {}
    stack = mode.record_stack_trace
    call = module["_OpCall"](func, given, named, mode.call_depth, stack=stack)
    module["_run_dispatch_pre_log_hooks"](call, func, types, given, named)
    record_call(mode, call)
    result = func(*given, **named)
    record_result(mode, call, result)
    module["_run_dispatch_hooks"](call, func, types, given, named, result)
    return result


# --- ExplicitRedistributionContext ---------------------------------------------------------------


def _hook_explicit(module: Any) -> None:
    methods = vars(module.ExplicitRedistributionContext)
    take_over(methods["__enter__"], functools.partial(_enter_explicit, module))
    take_over(methods["__exit__"], _leave)


def _enter_explicit(module: Any, original: Any, args: Any, kwargs: Any) -> Any:
    from xla_dtensor.debug.communication import Guarded

    result = original(*args, **kwargs)
    _start(args[0], Guarded(functools.partial(_observe, vars(module))))
    return result


def _observe(module: Any, name: str, redistributions: Any, mesh: Any) -> None:
    """As the context does for DTensors: raise, or warn, if the innermost context of the thread
    forbids what is about to be redistributed."""
    active = explicit_redistribution(module["ExplicitRedistributionContext"])
    if active is None:
        return
    is_strict, raises = active
    if not is_strict:
        redistributions = [
            each
            for each in redistributions
            if any(transfer.kind != "cut" for transfer in each.transfers)
        ]
    if not redistributions:
        return
    text = (
        f"Implicit redistribution occurred for {name} while ExplicitRedistributionContext was "
        f"active: on {mesh!r} it wants {'; '.join(map(str, redistributions))}. Call "
        "x.redistribute(placements=...) before it"
    )
    if raises:
        raise PlacementError(text)
    module["logger"].warning(text)
