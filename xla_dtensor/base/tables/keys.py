"""Values as parts of keys."""

from __future__ import annotations

from typing import Any

import numpy as np


def freeze(value: Any) -> Any:
    """``value`` with its lists as tuples, so that it can be hashed."""
    if isinstance(value, list | tuple):
        return tuple(map(freeze, value))
    return value


def exact(value: Any) -> tuple[type, Any]:
    """``value`` as part of a key that tells types apart (1, 1.0 and True are equal), and 0.0 from
    -0.0."""
    if isinstance(value, float):
        return type(value), value.hex()
    return type(value), value.tobytes() if isinstance(value, np.floating) else freeze(value)


def thaw(value: Any) -> Any:
    """The inverse of `freeze` for arguments: tuples as lists."""
    return [thaw(v) for v in value] if isinstance(value, tuple) else value
