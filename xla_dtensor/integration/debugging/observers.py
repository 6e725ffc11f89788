"""An observer that loads `xla_dtensor.debug`, which makes log lines, with the first operation."""

from __future__ import annotations

import sys
from typing import Any

from xla_dtensor.base import events
from xla_dtensor.base.config import config, listen


class _NotLoaded:
    """Until the first operation, which is soon enough to load what makes them."""

    def __getattr__(self, name: str) -> Any:
        from xla_dtensor import debug  # noqa: F401  (makes them)

        return getattr(events.observer, name)


def install() -> None:
    """Let `xla_dtensor.debug` be told from the first operation on, if the switch says so."""
    _changed()
    listen("logs", _changed)


def _changed() -> None:
    if "xla_dtensor.debug" in sys.modules:  # it listens itself
        return
    if config.logs or isinstance(events.observer, _NotLoaded):
        events.observe(_NotLoaded() if config.logs else None)
