"""``scan_layers``: layers of one kind, one after another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def scan_layers(
    layers: Iterable[nn.Module],
    input_data: Any,
    partition_fn: Any = None,
    is_layer_pure: bool = False,
) -> Any:
    """The output of the last layer, each of which gets that of the one before.

    In a compiled step the program has each layer.

    Args:
        layers: modules; of one structure in torch_xla, any here.
        input_data: what the first one takes.
        partition_fn, is_layer_pure: torch_xla's; no effect.

    Returns:
        what the last one returns; ``input_data`` if there are none.

    Example::

        import torch
        from xla_dtensor.compat.torch_xla.experimental.scan_layers import scan_layers

        layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3)).to("xla")
        assert scan_layers(layers, torch.ones(2, 4, device="xla")).shape == (2, 4)
    """
    value = input_data
    for layer in layers:
        value = layer(value)
    return value
