"""torch_xla's replacements of ``nn.Linear``, which here do nothing: XLA sees ``linear`` whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class XLAPatchedLinear:
    """``nn.functional.linear``, called as torch_xla's function is."""

    @staticmethod
    def apply(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``input`` times the transposed ``weight``, and ``bias``."""
        return nn.functional.linear(input, weight, bias)


def xla_patched_nn_linear_forward(m: Any, input: torch.Tensor) -> torch.Tensor:
    """The forward of the ``nn.Linear`` ``m``."""
    return nn.functional.linear(input, m.weight, m.bias)


EinsumLinear = nn.Linear


def apply_xla_patch_to_nn_linear(module: nn.Module, *_: Any) -> nn.Module:
    """The module as it is: its ``nn.Linear``s reach XLA whole."""
    return module


def apply_backward_optimization_barrier(m: nn.Module) -> None:
    """Nothing: it kept torch_xla's compiler from fusing the sums of all gradients into one; when to
    sum is XLA's to say here, and ``xd.fully_shard`` sums parameter by parameter."""
