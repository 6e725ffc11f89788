"""Gradient checkpointing: torch's own."""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint as torch_checkpoint


def checkpoint(function: Any, *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint``: ``function`` is computed again in the backward pass.

    Args:
        function: of tensors.
        args, kwargs: its arguments.
        use_reentrant: torch_xla's default is True; compiled steps want False, ours.
    """
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
