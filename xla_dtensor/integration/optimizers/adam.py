"""Adam's update of all parameters as one operation, in compiled steps.

The same to XLA as torch's dozen operations with each parameter, and traced and lowered in a tenth
of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_dtensor.base.ours import is_ours
from xla_dtensor.tensors.backend import backend

Update = Callable[..., None]


def at_once(function: Update, options: dict[str, Any], lists: Sequence[Any]) -> bool:
    """Whether `update` can stand for one of torch's functions.

    Args:
        function: ``_multi_tensor_adam`` or ``_fused_adam``, or another one.
        options: its keyword arguments.
        lists: its other arguments: parameters, gradients, moments, step counts.
    """
    if function.__name__ not in ("_multi_tensor_adam", "_fused_adam"):
        return False
    if options.get("has_complex") or options.get("differentiable"):
        return False
    if any(isinstance(options.get(name), torch.Tensor) for name in ("beta1", "beta2")):
        return False
    params, *alike, _, steps = lists[:6]
    # After ``model.half()`` torch has an error for state of another dtype.
    same = all(len({t.dtype for t in each}) == 1 for each in zip(params, *alike, strict=True))
    return same and all(is_ours(step) for step in steps)


def update(
    params: list[Any],
    grads: list[Any],
    exp_avgs: list[Any],
    exp_avg_sqs: list[Any],
    max_exp_avg_sqs: list[Any],
    state_steps: list[Any],
    grad_scale: Any = None,
    found_inf: Any = None,
    *,
    lr: Any,
    decoupled_weight_decay: bool,
    has_complex: bool = False,
    capturable: bool = False,
    differentiable: bool = False,
    **options: Any,
) -> None:
    """torch's ``_fused_adam``, whose numbers may be inputs of the program: a schedule of the
    learning rate, or of the betas, is no new program. torch's schema takes them for constants."""
    from xla_dtensor.dispatch.shared_memory import count_writes

    if not params:
        return
    torch._foreach_add_(state_steps, 1)
    aten = torch.ops.aten
    func = aten._fused_adamw_ if decoupled_weight_decay else aten._fused_adam_
    overload = func.tensor_lr if isinstance(lr, torch.Tensor) else func.default
    lists = params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
    numbers = {"lr": lr, **options, "grad_scale": grad_scale, "found_inf": found_inf}
    # Not by way of torch, a mode of the trace's or its dispatcher, which would ask for the numbers.
    backend().dispatch(overload, lists, numbers)
    count_writes([*params, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs])
    if found_inf is not None:
        torch._foreach_sub_(state_steps, [found_inf] * len(state_steps))
