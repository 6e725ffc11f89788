"""Devices for libraries that choose one themselves."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is loaded from elsewhere

import pytest

import xla_dtensor as xd

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()

Chosen = Callable[[str], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def choose(device: str) -> Iterator[None]:
    """A block in which libraries find this device, "xla" or "cpu"; accelerate forgets what it had
    found before."""
    switch: Any = {"xla": "xla", "cpu": "never"}[device]
    _forget()
    with xd.config.override(device=switch):
        yield
    _forget()


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chosen]:
    """`choose`, without accelerate's own variable."""
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    yield choose
    _forget()


def _forget() -> None:
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # accelerate sets it where it gets a plugin
    with contextlib.suppress(ImportError):
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
