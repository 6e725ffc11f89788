"""Learning rate schedulers whose ``step()`` is called inside a compiled step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler

from xla_dtensor.base import executor
from xla_dtensor.base.source_line import user_line
from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compilation.code.names import names_of
from xla_dtensor.compilation.code.reflection import code_of
from xla_dtensor.errors import DataDependentError


class DeferredSchedulers:
    """While it is entered, ``scheduler.step()`` of torch's learning rate schedulers is put off.

    It changes hyperparameters, which are read before each call of the step: after the step's
    program has run, the calls that were put off are made, in every call. What the step reads of
    such a scheduler afterwards would be the value from before: it is refused.

    Attributes:
        calls: (scheduler, what steps it, arguments), in order.
        put_off: told of each scheduler.
    """

    def __init__(self) -> None:
        self.put_off: Callable[[Any], None] | None = None
        self.calls: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = []
        self._patched: list[tuple[type, str, Any]] = []
        self._read: set[int] = set()  # of which the whole state was asked for
        self._trace: Any = None

    def __enter__(self) -> DeferredSchedulers:
        self._trace = executor.trace()
        for cls in {lr_scheduler.LRScheduler, *_subclasses(lr_scheduler.LRScheduler)}:
            for name, patched in (("step", self._deferring), ("state_dict", self._reading)):
                own = cls.__dict__.get(name)
                if own is not None:
                    self._patched.append((cls, name, own))
                    setattr(cls, name, patched(own))
        lr_scheduler.LRScheduler.__getattribute__ = self._get
        return self

    def __exit__(self, *exc_info: object) -> None:
        for cls, name, own in self._patched:
            setattr(cls, name, own)
        del lr_scheduler.LRScheduler.__getattribute__

    @property
    def _get(self) -> Any:
        """How schedulers' attributes are read: what is in the object may be what its step changes,
        which has been put off."""

        def get(scheduler: Any, name: str) -> Any:
            cls: Any = type(scheduler)
            changes = self.calls and (
                name == "__dict__" or (name in _changed(cls) and name in _own(scheduler))
            )
            if changes:
                self._check(scheduler, name)
            return object.__getattribute__(scheduler, name)

        return get

    def _reading(self, state_dict: Any) -> Any:
        def checked(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            self._check(scheduler, "state_dict()")
            if executor.trace() is self._trace:
                self._read.add(id(scheduler))
            return state_dict(scheduler, *args, **kwargs)

        checked.__wrapped__ = state_dict  # type: ignore[attr-defined]
        return checked

    def _check(self, scheduler: Any, name: str) -> None:
        """Refuse that ``name`` is read of a scheduler whose step has been put off, or that of
        another one of its optimizer (which may step this one, as a `ChainedScheduler` does)."""
        if executor.trace() is not self._trace:
            return
        own = getattr(scheduler, "optimizer", None)
        if any(s is scheduler or getattr(s, "optimizer", s) is own for s, *_ in self.calls):
            error = DataDependentError(
                f"the step calls {type(scheduler).__name__}.step(), which a compiled step puts off "
                f"until its program has run, and then reads {name}, which would be the value from "
                f"before: read it outside of the step{user_line()}"
            )
            self._trace.refuse_with(error)

    def _deferring(self, step: Any) -> Any:
        def deferred(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            if executor.trace() is not self._trace or self._trace is None:
                return step(scheduler, *args, **kwargs)
            if id(scheduler) in self._read:
                error = DataDependentError(
                    f"the step asks for the state_dict() of a {type(scheduler).__name__}, and then "
                    "steps it: it would be that of the call that is traced in every call; ask for "
                    f"it outside of the step{user_line()}"
                )
                self._trace.refuse_with(error)
            of_class = getattr(type(scheduler).step, "__wrapped__", None) is step
            self.calls.append((scheduler, _step_as_now if of_class else step, args, kwargs))
            if self.put_off is not None:
                self.put_off(scheduler)
            return None

        deferred.__wrapped__ = step  # type: ignore[attr-defined]
        return deferred

    def convert(self, result: Callable[[Any], Any]) -> None:
        """Keep in place of their arguments how each call makes these: ``scheduler.step(loss)``.

        Args:
            result: how each call makes the value of a tensor, or a number, of the trace.
        """
        own = torch.Tensor | torch.SymFloat | torch.SymInt
        made = lambda value: result(value) if isinstance(value, own) else value
        self.calls = [
            (scheduler, step, *pytree.tree_map(made, (args, kwargs)))
            for scheduler, step, args, kwargs in self.calls
        ]

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuse an optimizer's step behind the step of its scheduler."""
        for scheduler, _, _, _ in self.calls:
            if getattr(scheduler, "optimizer", optimizer) is optimizer:
                raise DataDependentError(
                    f"the compiled step calls {type(scheduler).__name__}.step() before the "
                    "optimizer's step(): in a compiled step a scheduler's step comes last"
                    f"{user_line()}"
                )


def _step_as_now(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """The step that its class has when it is called: somebody may put another there."""
    return type(scheduler).step(scheduler, *args, **kwargs)


def _own(scheduler: Any) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(scheduler, "__dict__")
    return found


@functools.lru_cache(256)
def _changed(cls: Any) -> frozenset[str]:
    """The attributes that a scheduler's methods assign, but for those that make it."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        for name, member in vars(base).items():
            code = code_of(member)
            if code is not None and name not in ("__init__", "__setstate__", "load_state_dict"):
                names |= names_of(code).assigned
    return frozenset(names)


def set_by(scheduler: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """The entries of param groups that a scheduler's step sets."""
    optimizer = _own(scheduler).get("optimizer")
    keys = ["lr"] + ["momentum", "betas"] * bool(_own(scheduler).get("cycle_momentum"))
    for group in getattr(optimizer, "param_groups", ()):
        yield from ((group, key) for key in keys if key in group)


def _subclasses(cls: type) -> set[type]:
    found: set[type] = set(cls.__subclasses__())
    for sub in list(found):
        found |= _subclasses(sub)
    return found
