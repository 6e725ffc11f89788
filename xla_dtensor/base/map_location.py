"""The `map_location` of the ``torch.load`` that is running, for code that rebuilds tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Loading(threading.local):
    device_of: Callable[[str], torch.device | None] | None = None


_loading = _Loading()


@contextmanager
def loading(device_of: Callable[[str], torch.device | None]) -> Iterator[None]:
    """While the block runs, `device_for` answers with ``device_of``."""
    before = _loading.device_of
    _loading.device_of = device_of
    try:
        yield
    finally:
        _loading.device_of = before


def device_for(location: str) -> torch.device | None:
    """The device for what was saved on ``location`` (``"xla:0"``); None if it was given no other,
    or nothing is being loaded."""
    return None if _loading.device_of is None else _loading.device_of(location)


def leaves_xla() -> bool:
    """Whether what was saved on xla devices is put elsewhere: no mesh is needed for it."""
    device: Any = device_for("xla:0")
    return device is not None and device.type != "xla"
