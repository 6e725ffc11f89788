"""The settings of one call of `fully_shard` or `replicate` that its parameters read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from xla_dtensor.base import executor
from xla_dtensor.base.torch_private import ComposableState


class _Compared(NamedTuple):
    """What a compiled step has decided by."""

    reduces_gradients: bool
    gradient_divide_factor: float | None
    reshard_after_forward: bool | int | None
    unsharded: bool


class Settings(ComposableState):
    """The settings of one call, which its parameters look up.

    Attributes:
        modules: those that were passed.
        policy: the `MixedPrecisionPolicy`.
        offloads: whether sharded parameters and gradients rest in the host's memory.
        reshard_after_forward: as passed; None is decided by the first forward.
        local_gradients: whether a gradient that isn't reduced is the parameter's ``.grad``, as in
            DDP, in place of being kept until one is.
        reduces: whether backward reduces gradients over the devices.
        divide_factor: what the sum of the devices' gradients is divided by; None for their number.
        unsharded: whether `unshard` has made the parameters whole.
        asked_in_forward: whether to reduce, asked by forward, as of DDP, for the backward pass that
            belongs to it; None: as it is set when backward comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: tuple[nn.Module, ...] = ()
        self.policy: Any = None
        self.offloads = False
        self.reshard_after_forward: bool | int | None = None
        self.local_gradients = False
        self.requires_sync = True
        self.requires_all_reduce = True
        self.divide_factor: float | None = None
        self.unsharded = False
        self.asked_in_forward: Callable[[], bool] | None = None

    @property
    def reduces(self) -> bool:
        asked = self.asked_in_forward
        wanted = asked is None or asked()
        return wanted and self.requires_sync and self.requires_all_reduce

    def consult(self) -> None:
        """Tell a traced step that it depends on these settings.

        Called before they are read or changed: what the step found when it began is compared with
        what later calls find.
        """
        names = ", ".join(type(module).__name__ for module in self.modules)
        text = f"the data-parallel settings of {names}"
        executor.current().depends_on(self._compared, text, self._settle)

    def _compared(self) -> _Compared:
        return _Compared(
            self.reduces, self.divide_factor, self.reshard_after_forward, self.unsharded
        )

    def _settle(self, found: _Compared, left: _Compared) -> bool:
        """Reshard from the first step on as after it, which only takes other memory."""
        changed = found.reshard_after_forward != left.reshard_after_forward
        if changed:
            self.reshard_after_forward = left.reshard_after_forward
        return changed

    def after_backward(self, managed: Any) -> None:
        """The gradient of ``managed`` has been taken in."""
        raise NotImplementedError
