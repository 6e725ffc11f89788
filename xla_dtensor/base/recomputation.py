"""The callback for when ``torch.utils.checkpoint`` recomputes a block; `integration` calls it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

_Watcher = tuple[Callable[[], Any], Callable[[Any], AbstractContextManager[Any]]]
watchers: list[_Watcher] = []


def watch(
    remember: Callable[[], Any], restore: Callable[[Any], AbstractContextManager[Any]]
) -> None:
    """Be told of recomputations.

    Args:
        remember: called when a block is about to run first.
        restore: gives a context that its recomputation runs in, from what ``remember`` gave then.
    """
    watchers.append((remember, restore))
