"""``optimizer.load_state_dict`` of whole tensors into the state of sharded parameters.

Files of libraries have an optimizer's state whole, and on the CPU. torch moves each tensor to the
device of its parameter, which would be one device: the numbers are right, and every moment takes
the memory of the whole parameter there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from xla_dtensor.base import torch_private


def install() -> None:
    """A tensor of a sharded parameter's shape gets the parameter's layout."""
    original = torch_private.optimizer_state_on_device

    @functools.wraps(original)
    def placed(param: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_sharded(param) and not _is_sharded(value) and value.shape == param.shape:
            from xla_dtensor.movement.factories import distribute_tensor

            dtype = param.dtype if param.is_floating_point() else value.dtype
            with torch.no_grad():
                value = distribute_tensor(value.to(dtype), param.device_mesh, param.placements)
        return original(param, value, *args, **kwargs)

    torch_private.replace("optimizer_state_on_device", staticmethod(placed))


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "_form") and tensor._form.is_sharded
