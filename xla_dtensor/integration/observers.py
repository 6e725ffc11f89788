"""Observers that the environment asks for."""

from __future__ import annotations

import os
from typing import Any

from xla_dtensor.base import events


class _FromEnvironment:
    """Until the first operation, which is soon enough to load what makes them."""

    def __getattr__(self, name: str) -> Any:
        from xla_dtensor import debug  # noqa: F401  (makes them)

        return getattr(events.observer, name)


def install() -> None:
    """Let `xla_dtensor.debug` be told from the first operation on, if the environment says so."""
    if os.environ.get(events.ENVIRONMENT_VARIABLE):
        events.observe(_FromEnvironment())
