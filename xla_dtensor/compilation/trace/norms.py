"""``BatchNorm(momentum=None)`` in a compiled step: a cumulative average over all batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private import BatchNorm
from xla_dtensor.compilation.code.patched import patched


@contextlib.contextmanager
def cumulative_norms() -> Iterator[None]:
    """In the block these layers compute with the number of batches as a tensor: torch asks for it
    as a Python number, which doesn't exist while a step is traced."""
    trace, forward = executor.trace(), BatchNorm.forward

    def tracing(module: Any, x: torch.Tensor) -> torch.Tensor:
        if executor.trace() is trace and _is_cumulative(module):
            return _normalized(module, x)
        return forward(module, x)

    with patched(BatchNorm, "forward", tracing):
        yield


def _is_cumulative(module: Any) -> bool:
    return (
        module.momentum is None
        and module.training
        and module.track_running_stats
        and module.num_batches_tracked is not None
    )


def _normalized(module: Any, x: torch.Tensor) -> torch.Tensor:
    module._check_input_dim(x)
    running = module.running_mean, module.running_var
    latest = tuple(statistic.detach().clone() for statistic in running)
    # With a momentum of 1 `latest` becomes this batch's mean and variance.
    out = functional.batch_norm(x, *latest, module.weight, module.bias, True, 1.0, module.eps)
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        for statistic, new in zip(running, latest, strict=True):
            wide = torch.promote_types(statistic.dtype, torch.float32)
            share = 1.0 / module.num_batches_tracked.to(wide)
            statistic.copy_(new * share + statistic * (1.0 - share))
    return out
