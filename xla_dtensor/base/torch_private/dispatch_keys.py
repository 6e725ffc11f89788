"""Dispatch keys in force again, for torch code that runs as a part of an operation's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from xla_dtensor.base.torch_private import DispatchKey, is_key_excluded, set_key_excluded


@contextmanager
def included(key: Any) -> Iterator[None]:
    """A block in which ``key`` is dispatched to: in a kernel torch has left out what came before
    it, as casts of autocast and what tells autograd of views."""
    before = is_key_excluded(key)
    set_key_excluded(key, False)
    try:
        yield
    finally:
        set_key_excluded(key, before)


@contextmanager
def making_history() -> Iterator[None]:
    """A block in which torch can say of a view what its history is. If its base was written to
    since, that is made anew, and `is_leaf` and `grad_fn` fail where none is made: in a kernel,
    and under `no_grad`."""
    with (
        torch.enable_grad(),
        included(DispatchKey.AutogradFunctionality),
        included(DispatchKey.ADInplaceOrView),
    ):
        yield
