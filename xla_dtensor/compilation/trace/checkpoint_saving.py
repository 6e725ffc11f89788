"""Keeps the saved-tensor hooks of ``torch.utils.checkpoint`` off tensors that a trace saves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.utils.checkpoint

from xla_dtensor.base.torch_private import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)


@contextlib.contextmanager
def unseen_by_checkpoint() -> Iterator[None]:
    """Tensors that the trace saves aren't saved through the hooks of a ``torch.utils.checkpoint``
    around the call: it counts them, and finds less when it calls the step again."""
    hooks = top_saved_tensors_hooks(True)
    if hooks is None or hooks[0].__module__ != torch.utils.checkpoint.__name__:
        yield
        return
    pop_saved_tensors_hooks()
    try:
        yield
    finally:
        push_saved_tensors_hooks(*hooks)
