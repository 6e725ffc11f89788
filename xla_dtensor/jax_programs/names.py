"""What a module's parameters and buffers are called; tied ones have one name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


class NamedTensors:
    """The tensors of a module by name.

    Attributes:
        parameters: its parameters, each once, by the first of its names.
        buffers: likewise its buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters: dict[str, torch.Tensor] = dict(module.named_parameters())
        self.buffers: dict[str, torch.Tensor] = dict(module.named_buffers())
        self._module = type(module).__name__

    def check(self, given: Iterable[str], values: Mapping[str, Any]) -> None:
        """Raise unless each tensor has a value, and no value is of anything else.

        Raises:
            KeyError: otherwise.
        """
        own = {**self.parameters, **self.buffers}
        if missing := [name for name in own if name not in values]:
            raise KeyError(
                f"{self._module} has {', '.join(missing)}, of which params has no arrays; if the "
                "module has changed since xd.jax.from_module, call that again"
            )
        if unknown := [name for name in given if name not in own]:
            raise KeyError(
                f"params has {', '.join(unknown)}, which {self._module} hasn't (tied parameters "
                "have the first of their names); if the module has changed since "
                "xd.jax.from_module, call that again"
            )
