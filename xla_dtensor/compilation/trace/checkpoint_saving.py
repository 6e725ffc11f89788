"""Tensors that autograd saves while a step is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.utils.checkpoint


@contextlib.contextmanager
def unseen_by_checkpoint() -> Iterator[None]:
    """Tensors that the trace saves aren't saved through the hooks of a ``torch.utils.checkpoint``
    around the call: it counts them, and finds less when it calls the step again."""
    autograd = torch._C._autograd
    hooks = autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or hooks[0].__module__ != torch.utils.checkpoint.__name__:
        yield
        return
    autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        autograd._push_saved_tensors_default_hooks(*hooks)
