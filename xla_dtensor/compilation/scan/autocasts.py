"""What ``torch.autocast`` says where a body is written, for when the body runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from xla_dtensor.base.torch_private import DispatchKey
from xla_dtensor.base.torch_private.dispatch_keys import included


@dataclass(frozen=True)
class Autocast:
    """Whether operations on the devices and on the host are cast, and to what.

    Attributes:
        xla, cpu: whether it is in force, and the dtype.
    """

    xla: tuple[bool, torch.dtype]
    cpu: tuple[bool, torch.dtype]

    @classmethod
    def here(cls) -> Autocast:
        """As it is now."""
        return cls(
            *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("xla", "cpu"))
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block in which it is as it was: also in a backward pass, which may come outside of the
        user's block, and in the kernel of an operation, where torch leaves casts out."""
        with (
            included(DispatchKey.AutocastPrivateUse1),
            torch.autocast("xla", self.xla[1], self.xla[0]),
            torch.autocast("cpu", self.cpu[1], self.cpu[0]),
        ):
            yield
