"""Whether something is a tensor of ours, for hooks that are there before the first one: the classes
wait for it, and with them JAX."""

from __future__ import annotations

import sys
from typing import Any


def is_ours(value: Any) -> bool:
    """Whether ``value`` is an `XLATensor` or an `XLAShardedTensor`."""
    base = sys.modules.get("xla_dtensor.tensors.base")
    return base is not None and isinstance(value, getattr(base, "TensorMethods", ()))
