"""Gradient checkpointing of a module."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils import checkpoint


def checkpoint_module(module: nn.Module) -> nn.Module:
    """Let a module compute its activations again in the backward pass.

    Args:
        module: changed in place; an FSDP wrapper goes around it, and not inside.

    Returns:
        ``module``.

    Example::

        import torch
        from xla_dtensor.compat.torch_xla.distributed.fsdp.utils import checkpoint_module

        layer = checkpoint_module(torch.nn.Linear(4, 4).to("xla"))
        layer(torch.ones(2, 4, device="xla")).sum().backward()
        assert layer.weight.grad.shape == (4, 4)
    """
    forward = module.forward
    module.forward = functools.partial(checkpoint.checkpoint, forward, use_reentrant=False)
    return module
