"""`DistributedOptimizer` with Adasum, which combines the ranks' steps, not their gradients."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from xla_dtensor.horovod.api.calls import synchronize
from xla_dtensor.horovod.api.collectives import allreduce_async_
from xla_dtensor.horovod.api.optimizer_hooks import GradientHooks
from xla_dtensor.horovod.collectives.reductions import Adasum
from xla_dtensor.horovod.world.write_into import write


class AdasumOptimizer(GradientHooks):
    """The methods that `DistributedOptimizer` gives an optimizer for ``op=Adasum``."""

    def begin(self, names: dict[torch.Tensor, str], compression: Any, passes: int) -> None:
        """In place of a constructor; the arguments are those of `DistributedOptimizer`."""
        self._compression = compression
        self._counted = False
        self.watch(names, passes)

    def gradient_is_there(self, parameter: torch.Tensor) -> None:
        """Nothing: what is reduced is there after the step."""
        self._counted = True

    def synchronize(self) -> None:
        """Nothing: gradients stay each rank's own."""

    def skip_synchronize(self) -> NoReturn:
        """Not supported.

        Raises:
            AssertionError: always.
        """
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )

    def step(self, closure: Any = None) -> Any:
        """Step by the rank's own gradients, and combine what changed."""
        parameters = [p for p in self.reduced if p.grad is not None]
        with torch.no_grad():
            before = [p.detach().clone() for p in parameters]
        loss = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            waiting = []
            for parameter, start in zip(parameters, before, strict=True):
                change = parameter.detach() - start
                small, context = self._compression.compress(change)
                name = f"adasum.{self.names[parameter]}"
                waiting.append((allreduce_async_(small, name=name, op=Adasum), context))
            for parameter, start, (handle, context) in zip(
                parameters, before, waiting, strict=True
            ):
                change = self._compression.decompress(synchronize(handle), context)
                write(parameter.detach(), start + change)
                self.left[parameter] = self.backward_passes_per_step
        self._counted = False
        return loss

    # torch's mark of a step that has hooks around it: the wrapped optimizer's has them.
    step.hooked = True  # type: ignore[attr-defined]

    def is_between_backward_and_step(self) -> bool:
        """Whether gradients are there that no step has taken."""
        return self._counted
