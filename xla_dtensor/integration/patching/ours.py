"""Whether an object is a tensor of ours, without importing the tensor classes and JAX.

Hooks ask it that are there before the first such tensor.
"""

from __future__ import annotations

import sys
from typing import Any


def is_ours(value: Any) -> bool:
    """Whether ``value`` is an `XLATensor` or an `XLAShardedTensor`."""
    base = sys.modules.get("xla_dtensor.tensors.base")
    return base is not None and isinstance(value, getattr(base, "TensorMethods", ()))
