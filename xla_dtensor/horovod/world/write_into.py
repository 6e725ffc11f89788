"""Writing the result of a collective into a tensor: what Horovod's in-place functions do."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.movement import in_place
from xla_dtensor.movement.vary import forget_variation
from xla_dtensor.tensors.device_tensor import XLATensor


def written(target: Any, value: Any) -> Any:
    """``target`` with ``value``; or ``value`` itself, where other tensors may see the target's
    memory: a copy into it would vary.

    Args:
        target: a tensor.
        value: one of its shape.
    """
    if isinstance(target, XLATensor) and (target._steps or target._storage_.is_shared(target)):
        return value.to(target.dtype)
    write(target, value)
    return target


def write(target: Any, value: Any) -> None:
    """Let ``target`` have ``value``: as a per-device tensor it varies then as ``value`` does.

    Args:
        target: a tensor.
        value: one of its shape.

    Raises:
        UnsupportedOpError: it is a CPU tensor, and ``value`` differs from device to device.
    """
    with torch.no_grad():
        if isinstance(target, XLATensor) and isinstance(value, XLATensor):
            in_place.put(target, value.to(target.dtype))
            if target.varying != value.varying:  # of memory that others see it is a copy
                forget_variation(target, value.varying)
        elif isinstance(value, XLATensor) and value.varying:
            raise UnsupportedOpError(
                f"a collective in place of a CPU tensor of shape {list(target.shape)}, whose "
                "result differs from rank to rank: move the tensor to the xla device first"
            )
        else:
            target.copy_(value)
