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


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Chosen]:
    """``with chosen("xla")``, or ``"cpu"``: libraries find this device; accelerate forgets what it
    had found."""
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)

    @contextlib.contextmanager
    def choose(device: str) -> Iterator[None]:
        switch: Any = {"xla": "xla", "cpu": "never"}[device]
        _forget()
        with xd.config.override(device=switch):
            yield
        _forget()

    yield choose
    _forget()


def _forget() -> None:
    with contextlib.suppress(ImportError):
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
