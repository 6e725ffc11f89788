"""The cache key of a compiled program: hashes of its StableHLO text and of its inputs' shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from xla_dtensor.lowering.partitioned.named import with_names


def text_of(lowered: Any) -> tuple[str, Sequence[str] | None]:
    """What a program is known by: a hash of its text, which doesn't say on which devices; and the
    names of the functions in it that XLA calls back (`lowering/partitioned/named.py`)."""
    text, names = with_names(lowered.as_text())
    return hashlib.sha256(text.encode()).hexdigest(), names


def inputs_of(layouts: Sequence[tuple[Any, ...]]) -> str:
    """A hash of the inputs' shapes and dtypes: the text lacks those that the program doesn't use.

    Args:
        layouts: as of `input_layouts.layouts`.
    """
    words = [f"{dtype}{list(shape)}" for shape, dtype, *_ in layouts]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()
