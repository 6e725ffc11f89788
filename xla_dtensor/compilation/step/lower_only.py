"""Calls of a compiled step on tensors without data (``xd.abstract``): lowered, not run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from xla_dtensor.errors import DataDependentError

_elsewhere: list[Callable[..., Any]] = []


@contextlib.contextmanager
def calls_go_to(call: Callable[..., Any]) -> Iterator[None]:
    """Calls of compiled steps where tensors have no data (``xd.abstract``) are those of
    ``call(step, args, kwargs)``, for a block."""
    _elsewhere.append(call)
    try:
        yield
    finally:
        _elsewhere.pop()


def called_without_data(step: Any, args: Any, kwargs: Any) -> Any:
    """What a call of a step is where tensors have no data.

    Raises:
        DataDependentError: nobody has said what it is.
    """
    if _elsewhere:
        return _elsewhere[-1](step, args, kwargs)
    raise DataDependentError(
        f"{step._name()} was called inside of xd.abstract(), where tensors have layouts and no "
        "data to compute with: xd.plan(step, *args) says what it needs"
    )
