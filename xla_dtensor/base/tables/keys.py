"""Makes values hashable for cache keys, and tells apart those that Python calls equal."""

from __future__ import annotations

from typing import Any

import numpy as np


def freeze(value: Any) -> Any:
    """``value`` with its lists as tuples, so that it can be hashed."""
    if isinstance(value, list | tuple):
        return tuple(map(freeze, value))
    return value


def exact(value: Any) -> tuple[type, Any]:
    """``value`` as part of a key that tells apart what Python takes for equal: types (1, 1.0 and
    True), 0.0 and -0.0, ranges of the same numbers, units of time."""
    cls = type(value)
    if isinstance(value, float):
        return cls, value.hex()
    if isinstance(value, complex):
        return cls, (value.real.hex(), value.imag.hex())
    if isinstance(value, np.generic):
        return cls, (value.dtype, value.tobytes())
    if cls is range or cls is slice:
        return cls, tuple(map(exact, (value.start, value.stop, value.step)))
    if cls is tuple:
        return cls, tuple(map(exact, value))
    return cls, freeze(value)


def thaw(value: Any) -> Any:
    """The inverse of `freeze` for arguments: tuples as lists."""
    return [thaw(v) for v in value] if isinstance(value, tuple) else value
