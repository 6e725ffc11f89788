"""Learning rate schedulers whose ``step()`` is called inside a compiled step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree

from xla_dtensor.base import executor
from xla_dtensor.base.source_line import user_line
from xla_dtensor.errors import DataDependentError

# What a scheduler's step changes.
SCHEDULE = frozenset({"get_last_lr", "_last_lr", "last_epoch", "_step_count"})


class DeferredSchedulers:
    """While it is entered, ``scheduler.step()`` of torch's learning rate schedulers is put off.

    It changes hyperparameters, which are read before each call of the step: after the step's
    program has run, the calls that were put off are made, in every call.

    Attributes:
        calls: (scheduler, the class's own step, arguments), in order.
        put_off: told of each scheduler.
    """

    def __init__(self) -> None:
        self.put_off: Callable[[Any], None] | None = None
        self.calls: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = []
        self._patched: list[tuple[type, Any]] = []
        self._trace: Any = None

    def __enter__(self) -> DeferredSchedulers:
        self._trace = executor.trace()
        for cls in {lr_scheduler.LRScheduler, *_subclasses(lr_scheduler.LRScheduler)}:
            step = cls.__dict__.get("step")
            if step is not None:
                self._patched.append((cls, step))
                cls.step = self._deferring(cls, step)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for cls, step in self._patched:
            cls.step = step  # type: ignore[attr-defined]

    def _deferring(self, cls: type, step: Any) -> Any:
        def deferred(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            if executor.trace() is not self._trace or self._trace is None:
                return step(scheduler, *args, **kwargs)
            if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves((args, kwargs))):
                self._trace.refuse(f"{type(scheduler).__name__}.step() with a tensor's value")
            self.calls.append((scheduler, step, args, kwargs))
            if self.put_off is not None:
                self.put_off(scheduler)
            return None

        deferred.__wrapped__ = step  # type: ignore[attr-defined]
        return deferred

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuse an optimizer's step behind the step of its scheduler."""
        for scheduler, _, _, _ in self.calls:
            if getattr(scheduler, "optimizer", optimizer) is optimizer:
                raise DataDependentError(
                    f"the compiled step calls {type(scheduler).__name__}.step() before the "
                    "optimizer's step(): in a compiled step a scheduler's step comes last"
                    f"{user_line()}"
                )


def set_by(scheduler: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """The entries of param groups that a scheduler's step sets."""
    optimizer = getattr(scheduler, "optimizer", None)
    keys = ["lr"] + ["momentum", "betas"] * bool(getattr(scheduler, "cycle_momentum", False))
    for group in getattr(optimizer, "param_groups", ()):
        yield from ((group, key) for key in keys if key in group)


def _subclasses(cls: type) -> set[type]:
    found: set[type] = set(cls.__subclasses__())
    for sub in list(found):
        found |= _subclasses(sub)
    return found
