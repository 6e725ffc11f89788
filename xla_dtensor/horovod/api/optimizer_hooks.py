"""What both `DistributedOptimizer`s share: parameter names, and hooks that count gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from xla_dtensor.horovod.world.current_world import current
from xla_dtensor.horovod.world.in_trace import TraceScope
from xla_dtensor.horovod.world.process_sets import global_process_set


def check_names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """The names of an optimizer's parameters.

    Args:
        optimizer: the optimizer.
        named: pairs; None to number them.

    Raises:
        ValueError: they aren't pairs, a name is there twice, or a parameter has none.
    """
    if named is None:
        return {
            p: f"allreduce.noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
        }
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            + ", ".join(twice)
        )
    known = {id(p) for _, p in pairs}
    unnamed = [
        (i, list(p.shape))
        for group in optimizer.param_groups
        for i, p in enumerate(group["params"])
        if id(p) not in known
    ]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            + ", ".join(f"number {i} of shape {shape}" for i, shape in unnamed)
        )
    return {p: name for name, p in sorted(pairs, key=lambda pair: pair[0])}


class GradientHooks:
    """Parameters with names, whose gradients are counted in backward.

    Attributes:
        names: by parameter.
        left: by parameter, how many more times backward is to add to its gradient.
        reduced: the parameters that have a hook.
        where: in which trace, if in one, backward has run last.
    """

    param_groups: list[dict[str, Any]]
    process_set: Any = global_process_set

    def watch(self, names: dict[torch.Tensor, str], passes: int) -> None:
        """Have the parameters' gradients counted."""
        self.names, self.backward_passes_per_step = names, passes
        self.left = dict.fromkeys(names, passes)
        self.where = TraceScope()
        self.reduced: list[torch.Tensor] = []
        if current().size == 1 or not self.process_set.included():
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self.reduced.append(parameter)
                    parameter.register_post_accumulate_grad_hook(self._count)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Let backward add to the gradients so many times before each step."""
        self.backward_passes_per_step = passes
        self.left = dict.fromkeys(self.left, passes)

    def _count(self, parameter: torch.Tensor) -> None:
        if not self.where.is_here():
            if self.where.is_traced:  # of a step that couldn't be traced, or is traced again
                self.forget()
            self.where = TraceScope()
        if self.left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self.left[parameter] -= 1
        if self.left[parameter] == 0:
            self.gradient_is_there(parameter)

    def forget(self) -> None:
        """Begin counting anew."""
        self.left = dict.fromkeys(self.left, self.backward_passes_per_step)

    def gradient_is_there(self, parameter: torch.Tensor) -> None:
        """Backward has added to a gradient as often as it is to."""
        raise NotImplementedError

    def is_between_backward_and_step(self) -> bool:
        """Whether `zero_grad` would take away gradients that a step is to have."""
        raise NotImplementedError

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's.

        Raises:
            AssertionError: it is called between backward and the step.
        """
        if self.is_between_backward_and_step():
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause a "
                "race condition."
            )
        return super().zero_grad(*args, **kwargs)  # type: ignore[misc]
