"""torchtitan's memory budget of activation checkpointing, which it leaves to torch.compile.

It sets torch's setting and has blocks and loss compiled, one by one. Here the step is compiled as a
whole, and `xd.compile` goes by the setting (`compilation/budget/`), so that nothing else need be.
"""

from __future__ import annotations

import weakref
from typing import Any

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.integration.patching.take_over import take_over

_models: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those with a budget."""


def hook_activations(module: Any) -> None:
    """``torchtitan.distributed.activation_checkpoint``; that of 0.2.2 has other functions."""
    if hasattr(module, "MemoryBudgetAC"):
        take_over(module.MemoryBudgetAC.apply, _apply)


def hook_loss(module: Any) -> None:
    """``torchtitan.components.loss``."""
    base: Any = getattr(module, "BaseLoss", None)
    if hasattr(base, "_maybe_compile"):
        take_over(base._maybe_compile, _compile_loss)


def is_within(model: Any) -> bool:
    """Whether a model has a budget."""
    return model in _models


def check(trainer: Any) -> None:
    """Refuse a budget that nothing goes by.

    Raises:
        UnsupportedOpError: forward and backward aren't compiled.
    """
    eager = trainer.config.training.disable_cuda_graphs
    if eager and any(map(is_within, trainer.model_parts)):
        raise UnsupportedOpError(
            "a memory budget of activation checkpointing with training.disable_cuda_graphs: eager "
            "operations save what they need for the backward pass, whatever the budget. Leave "
            "forward and backward compiled, or take full or selective activation checkpointing"
        )


def _apply(original: Any, args: Any, kwargs: Any) -> Any:
    from torchtitan.tools.utils import device_type

    config, model = args[0].config, args[1] if len(args) > 1 else kwargs["model"]
    if device_type == "xla":
        if config.visualize_memory_budget_pareto:
            raise UnsupportedOpError(
                "visualize_memory_budget_pareto of torchtitan's activation checkpointing: the "
                "picture is drawn by torch.compile's partitioner, which has no part in this; leave "
                "it out"
            )
        _models.add(model)
    return original(*args, **kwargs)


def _compile_loss(original: Any, args: Any, kwargs: Any) -> None:
    """It is part of the step, which is compiled."""
    from torchtitan.tools.utils import device_type

    if device_type != "xla":
        original(*args, **kwargs)
