"""``pin_memory()`` of CPU tensors where "xla" is the accelerator, and ``.xla()``.

XLA copies to its devices from any memory and C++ would ask for an allocator that no device written
in Python can name, so there is no pinned memory: ``pin_memory()`` is the copy that it is in torch,
and ``is_pinned()`` says that it isn't.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import backend_registration

from xla_dtensor.integration.device.accelerator import is_xla


def install() -> None:
    """Hook the methods of ``torch.Tensor``."""
    tensor: Any = torch.Tensor
    pin, is_pinned = tensor.pin_memory, tensor.is_pinned

    @functools.wraps(pin)
    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if not _would_be_asked(self, device):
            return pin(self, *(() if device is None else (device,)))
        if self.device.type != "cpu" or self.layout != torch.strided:
            raise RuntimeError(
                f"cannot pin a tensor on {self.device}, only dense CPU tensors can be pinned"
            )
        with torch.no_grad():
            return self.detach().clone(memory_format=torch.preserve_format)

    @functools.wraps(is_pinned)
    def knows_whether_pinned(self: torch.Tensor, device: Any = None) -> bool:
        if _would_be_asked(self, device):
            return False
        return is_pinned(self, *(() if device is None else (device,)))

    tensor.pin_memory, tensor.is_pinned = pin_memory, knows_whether_pinned
    tensor.xla = _to_xla
    # Module.xla() and PackedSequence.xla(). Not the tensor's own: its is_xla is torch's already.
    backend_registration.generate_methods_for_privateuse1_backend(for_tensor=False)


def _would_be_asked(tensor: torch.Tensor, device: Any) -> bool:
    if device is not None:
        return torch.device(device).type == "xla"
    return tensor.device.type in ("cpu", "xla") and is_xla()


def _to_xla(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """The tensor on the xla device: torch's ``.cuda()`` for it.

    Args:
        device: ``"xla"``, ``"xla:0"`` or 0, which are the same.
        non_blocking: as in ``.to``.
        memory_format: as in ``.to``.
    """
    if device is None:
        device = "xla"
    elif isinstance(device, int):
        device = f"xla:{device}"
    return self.to(device, non_blocking=non_blocking, memory_format=memory_format)
