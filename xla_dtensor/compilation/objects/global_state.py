"""torch's settings (grad mode, autocast, hooks, modes), as part of the key of programs."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.utils.checkpoint

from xla_dtensor.base import sequence_order
from xla_dtensor.base.tables.keys import exact
from xla_dtensor.base.torch_private import (
    activation_memory_budget,
    count_of_dispatch_modes,
    count_of_function_modes,
    default_device_context,
    dispatch_mode_at,
    function_mode_at,
    is_torch_function_enabled,
    top_saved_tensors_hooks,
)
from xla_dtensor.compilation.code.identities import SameIdentity
from xla_dtensor.compilation.code.names import describe
from xla_dtensor.compilation.code.reflection import referents
from xla_dtensor.compilation.objects.found import is_atom
from xla_dtensor.mesh import current_mesh
from xla_dtensor.tensors.of_form import is_ours
from xla_dtensor.tensors.subclasses import is_shown


def text_of(value: Any) -> str:
    """An argument, in words."""
    if is_ours(value):
        form = value._form
        text = f"{list(form.shape)} {form.dtype}"
        if is_shown(value):
            text = f"{type(value).__name__} {text}"
        if form.placements is not None:
            text += f" {list(form.placements)}"
        return text + (", requires_grad" if value.requires_grad else "")
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {value.dtype} on {value.device}"
    text = repr(value)
    return text if len(text) < 100 else f"{text[:97]}..."


STATE = (
    *("torch.is_grad_enabled()", "torch.is_inference_mode_enabled()", "torch.get_default_dtype()"),
    *("torch.get_float32_matmul_precision()", "torch.are_deterministic_algorithms_enabled()"),
    "torch.is_deterministic_algorithms_warn_only_enabled()",
    *("torch.is_anomaly_enabled()", "torch.is_anomaly_check_nan_enabled()"),
    *("autocast on xla", "autocast on the CPU", "autocast's dtype on xla", "its dtype on the CPU"),
    "torch.is_autocast_cache_enabled()",
    *("torch.get_default_device()", "saved-tensor hooks", "torch's modes", "__torch_function__"),
    *("the order of sequences in context_parallel", "the current mesh"),
    "torch._functorch.config.activation_memory_budget",
)


def global_state() -> tuple[Any, ...]:
    """torch's settings of this moment that change what a step computes."""
    on_xla, on_cpu = torch.is_autocast_enabled("xla"), torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        on_xla,
        on_cpu,
        torch.get_autocast_dtype("xla") if on_xla else None,
        torch.get_autocast_dtype("cpu") if on_cpu else None,
        torch.is_autocast_cache_enabled(),
        getattr(default_device_context, "device_context", None),
        _saving() if top_saved_tensors_hooks(True) is not None else None,
        _modes() if count_of_function_modes() or count_of_dispatch_modes() else None,
        is_torch_function_enabled(),
        sequence_order.current(),
        current_mesh(),
        activation_memory_budget(),
    )


def saving_hooks() -> list[tuple[str, Any]]:
    """The hooks through which autograd saves tensors, with their names in messages; not those of
    ``torch.utils.checkpoint``, which see none of a compiled step's."""
    hooks = top_saved_tensors_hooks(True)
    if hooks is None or hooks[0].__module__ == torch.utils.checkpoint.__name__:
        return []
    return [(f"the saved-tensor hook {describe(hook)}", hook) for hook in hooks]


def _saving() -> Any:
    return tuple(_key_of_hook(hook) for _, hook in saving_hooks())


def _key_of_hook(hook: Any) -> Any:
    """Hooks that are made anew for each call are the same ones around the same things."""
    if isinstance(hook, types.MethodType):
        return _key_of_hook(hook.__func__), SameIdentity(hook.__self__)
    if not isinstance(hook, types.FunctionType):
        return SameIdentity(hook)
    parts = [part for cell in hook.__closure__ or () for part in referents(cell)]
    parts += hook.__defaults__ or ()
    return hook.__code__, *(exact(x) if is_atom(x) else SameIdentity(x) for x in parts)


def _modes() -> tuple[SameIdentity, ...]:
    """The modes that the user has entered: they see every operation."""
    return tuple(SameIdentity(mode) for _, mode in active_modes())


def active_modes() -> list[tuple[str, Any]]:
    """The modes that are entered, with their names in messages."""
    functions = map(function_mode_at, range(count_of_function_modes()))
    dispatches = map(dispatch_mode_at, range(count_of_dispatch_modes()))
    return [(f"the mode {type(m).__name__}", m) for m in (*functions, *dispatches)]
