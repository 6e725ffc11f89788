"""What test programs use of ``torch_xla.utils.utils``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any


class SampleGenerator:
    """The same batch a number of times, as a loader.

    Args:
        data: the batch.
        sample_count: how many times.
    """

    def __init__(self, data: Any, sample_count: int) -> None:
        self._data, self._count = data, sample_count

    def __iter__(self) -> Iterator[Any]:
        return iter([self._data] * self._count)

    def __len__(self) -> int:
        return self._count


def getenv_as(name: str, type: Callable[[str], Any], defval: Any = None) -> Any:
    """An environment variable as something else than text."""
    value = os.environ.get(name)
    return defval if value is None else type(value)
