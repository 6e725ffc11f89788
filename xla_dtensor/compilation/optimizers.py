"""Optimizers inside a compiled step: hyperparameters as inputs, state on the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from xla_dtensor.base import thread_state
from xla_dtensor.base.modes import unseen
from xla_dtensor.base.traced_number import absent_number
from xla_dtensor.compilation.hyperparameters import (
    _item,
    as_input,
    for_formula,
    is_input,
    same_number,
)
from xla_dtensor.compilation.schedulers import DeferredSchedulers, set_by
from xla_dtensor.compilation.trace import StepTrace
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.form import device_form
from xla_dtensor.forms.storage import Storage
from xla_dtensor.runtime import abstract
from xla_dtensor.tensors.base import TensorMethods
from xla_dtensor.tensors.device_tensor import XLATensor


class ReadState:
    """An optimizer whose ``state`` the step's own code reads, though it doesn't step it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


class SteppedOptimizer:
    """An optimizer that a step is known to reach, while it is traced; one whose ``step`` runs in it
    also later on.

    Attributes:
        optimizer: the optimizer.
        name: how to call it in messages; two of one class are told apart.
        numbers: per param group the keys whose numbers are inputs of the program.
        assigned: per param group the keys that the step has assigned before it steps.
        state: its state before the trace.
        groups: the param groups' values before the trace.
    """

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        self.optimizer = optimizer
        self.name = name
        self.state = {p: (s, dict(s)) for p, s in optimizer.state.items()}
        self.groups = [dict(group) for group in optimizer.param_groups]
        self._dicts = list(optimizer.param_groups)
        self._members = [list(group["params"]) for group in self._dicts]
        # What stands in the groups for the numbers.
        self._given: list[dict[str, Any]] = [{} for _ in self._dicts]
        self.numbers: list[set[str]] = [set() for _ in self._dicts]
        self.assigned: list[set[str]] = [set() for _ in self._dicts]

    def give_numbers(self, trace: StepTrace, given_to: Planted) -> None:
        """Let Python find numbers of the trace in the groups, where the step has left what was
        there."""
        for index, (group, before) in enumerate(zip(self._dicts, self.groups, strict=True)):
            given = self._given[index]
            for key, value in group.items():
                if key in given or key == "params":
                    continue
                if value is not before.get(key):
                    self.assigned[index].add(key)
                elif is_input(key, value):
                    name = f"{self.name}.param_groups[{index}][{key!r}]"
                    given[key] = as_input(trace, self.optimizer, index, key, value, name)
            for key in given.keys() - self.numbers[index]:
                group[key] = given[key]
                given_to((id(group), key), given[key])
            self.numbers[index] |= given.keys()

    def take_numbers(self) -> None:
        """Put the values of before in place of those numbers."""
        for group, given, before in zip(self._dicts, self._given, self.groups, strict=True):
            for key, number in given.items():
                if group.get(key) is number:
                    group[key] = before[key]
            given.clear()

    def undo(self) -> None:
        """Give the optimizer the state and the groups that it had before the trace."""
        self.optimizer.state.clear()
        for parameter, (state, content) in self.state.items():
            state.clear()
            state.update(content)
            self.optimizer.state[parameter] = state
        groups = self.optimizer.param_groups
        if list(map(id, groups)) != list(map(id, self._dicts)):
            groups[:] = self._dicts
        for group, before, members in zip(self._dicts, self.groups, self._members, strict=True):
            if list(map(id, group.values())) != list(map(id, before.values())):
                group.clear()
                group.update(before)
            if list(map(id, group["params"])) != list(map(id, members)):
                group["params"][:] = members

    def made_state(self) -> bool:
        """Whether the step has filled state that wasn't there."""
        return any(
            key not in self.state.get(p, ({}, {}))[1]
            for p, state in self.optimizer.state.items()
            for key in state
        )

    def is_steady(self) -> bool:
        """Whether a step that finds the state of the first one computes the same.

        True of torch's own, which fill their state and go on as ever; but the fused SGD is told
        which step is the first one, and Adafactor makes its step counts on the CPU. Of others
        nobody knows, until the step is traced again. (What the trace has computed, a gradient taken
        as momentum, has it traced again in any case.)
        """
        cls = users_class(self.optimizer)
        own = f"{cls.__module__}.".startswith("torch.optim.")
        if cls is torch.optim.SGD and any(g["fused"] for g in self.optimizer.param_groups):
            return False
        return own and cls is not torch.optim.Adafactor

    def check(self, settable: set[tuple[int, str]]) -> None:
        """Refuse what the step's Python has done to the groups, which would happen once.

        Args:
            settable: entries of param groups (their ``id``, the key) of which each call repeats
                what has been done to them.

        Raises:
            DataDependentError: there are other groups, members or hyperparameters.
        """
        once = "which would happen when the step is traced, not in every call: do it outside of it"
        if list(map(id, self.optimizer.param_groups)) != list(map(id, self._dicts)):
            raise DataDependentError(
                f"the step adds, removes or replaces param groups of {self.name}, {once}"
            )
        for index, (before, group) in enumerate(zip(self.groups, self._dicts, strict=True)):
            where, given = f"{self.name}.param_groups[{index}]", self._given[index]
            if list(map(id, group["params"])) != list(map(id, self._members[index])):
                raise DataDependentError(f"the step changes the members of {where}, {once}")
            for key in {**before, **group}:
                was, now = given.get(key, before.get(key)), group.get(key)
                if was is now or key == "params" or (id(group), key) in settable:
                    continue
                if isinstance(now, torch.SymFloat | torch.SymInt) or not same_number(was, now):
                    raise DataDependentError(
                        f"the step changes {where}[{key!r}] from {was!r} to {now!r}, {once}"
                    )

    def check_state(self) -> None:
        """Refuse numbers in the state, which the step's Python counts.

        Raises:
            DataDependentError: there is one.
        """
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    raise DataDependentError(
                        f"{self.name} keeps a Python number, {key!r} = {value!r}, in its state: it "
                        "would count the traces, not the steps; keep it as a tensor "
                        "(torch.tensor(0.0, device=parameter.device))"
                    )


def users_class(optimizer: Optimizer) -> type[Optimizer]:
    """The optimizer's class; of one that the package has wrapped (Horovod's), the one wrapped."""
    classes: Any = type(optimizer).__mro__
    return next(cls for cls in classes if not cls.__module__.startswith("xla_dtensor."))


# What is told of each number that Python finds in a param group: (the group's id, the key), and it.
Planted = Callable[[tuple[int, str], Any], None]


class OptimizerHooks:
    """While it is entered, Python finds numbers of the trace in optimizers' ``param_groups``.

    A hyperparameter (``lr``, ``weight_decay``, ``betas``...) is an input of the program wherever
    the step reads it: in its own code, in hooks, in an optimizer's ``step``. What stands there when
    the step ends and isn't what it has found is an effect like any other (`Effect`).

    Args:
        known: the optimizers that the step is known to reach.
        settable: entries of param groups of which each call repeats what the step assigns.
        schedulers: the schedulers' steps that the step puts off.
        everywhere: whether the step's own code finds numbers of the trace, too, and not only an
            optimizer's ``step``.
        planted: is told of each.

    Attributes:
        stepped: the optimizers whose ``step`` has run, by id.
    """

    def __init__(
        self,
        trace: StepTrace,
        known: Iterable[Optimizer],
        settable: set[tuple[int, str]],
        schedulers: DeferredSchedulers,
        everywhere: bool,
        planted: Planted,
    ) -> None:
        self._planted = planted
        self._trace = trace
        self._settable = settable
        self._schedulers = schedulers
        self._everywhere = everywhere
        self._seen: dict[int, SteppedOptimizer] = {}
        self.stepped: dict[int, SteppedOptimizer] = {}
        # Entries that a scheduler sets when the program has run: (group, key, what was there, what
        # stands there since).
        self._hidden: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._set_behind: str | None = None
        for optimizer in known:
            self._see(optimizer)

    def _see(self, optimizer: Optimizer) -> SteppedOptimizer:
        seen = self._seen.get(id(optimizer))
        if seen is None:
            name = type(optimizer).__name__
            same = sum(type(s.optimizer) is type(optimizer) for s in self._seen.values())
            name = name if not same else f"{name} ({same + 1})"
            seen = self._seen[id(optimizer)] = SteppedOptimizer(optimizer, name)
        return seen

    def __enter__(self) -> OptimizerHooks:
        self._trace.optimizer_hooks = self
        self._schedulers.put_off = self._hide
        self._zero_grads = [(cls, cls.zero_grad) for cls in (Optimizer, nn.Module)]
        for cls, zero_grad in self._zero_grads:
            cls.zero_grad = self._seeing(zero_grad)
        if self._everywhere:
            for seen in self._seen.values():
                seen.give_numbers(self._trace, self._planted)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._trace.optimizer_hooks = None
        self._schedulers.put_off = None
        for cls, zero_grad in self._zero_grads:
            cls.zero_grad = zero_grad
        for group, key, was, hidden in self._hidden:
            if group.get(key) is hidden:
                group[key] = was
            else:
                self._set_behind = key
        self._hidden.clear()

    def check(self) -> None:
        """Refuse what the step has done to the optimizers, and each call can't."""
        if self._set_behind is not None:
            raise DataDependentError(
                f"the compiled step sets {self._set_behind!r} of a param group behind a "
                "scheduler's step(), which is put off until the program has run: in a compiled "
                "step a scheduler's step comes last"
            )
        for stepped in self.stepped.values():
            stepped.check(self._settable)
            stepped.check_state()

    def take_numbers(self) -> None:
        """When all that the step has changed is known: no number of the trace is left."""
        for seen in self._seen.values():
            seen.take_numbers()
        self._seen = dict(self.stepped)

    def undo(self) -> None:
        """Give the optimizers the state that they had before the trace."""
        self.take_numbers()
        for stepped in self.stepped.values():
            stepped.undo()

    def _hide(self, scheduler: Any) -> None:
        """What a scheduler sets isn't there before the program has run."""
        name = type(scheduler).__name__
        for group, key in set_by(scheduler):
            was = group[key]
            if not any(was is hidden for _, _, _, hidden in self._hidden):
                group[key] = absent_number(partial(self._refuse_hidden, name, key))
                self._hidden.append((group, key, was, group[key]))

    def _refuse_hidden(self, scheduler: str, key: str) -> None:
        raise DataDependentError(
            f"the compiled step reads {key!r} of a param group behind {scheduler}.step(), which is "
            "put off until the program has run: read it before, or outside of the step"
        )

    def _seeing(self, zero_grad: Any) -> Any:
        """``zero_grad`` that tells the trace what it sets to None."""

        def seen(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if thread_state.current() is not self._trace:
                return zero_grad(owner, *args, **kwargs)
            # Before, and not as it comes to them: the order would depend on which have one.
            if args[0] if args else kwargs.get("set_to_none", True):
                if isinstance(owner, Optimizer):
                    tensors = [p for group in owner.param_groups for p in group["params"]]
                else:
                    tensors = list(owner.parameters())
                for tensor in tensors:
                    if isinstance(tensor, TensorMethods):
                        self._trace.sets_grad(tensor)
            return zero_grad(owner, *args, **kwargs)

        return seen

    def step(
        self, function: Callable[..., Any], optimizer: Optimizer, args: Any, kwargs: Any
    ) -> Any:
        """Run an optimizer's ``step``, between its hooks."""
        stepped = self._see(optimizer)
        if id(optimizer) not in self.stepped:
            self.stepped[id(optimizer)] = stepped
            self._share_counters(optimizer)
        self._schedulers.check_optimizer(optimizer)
        stepped.check(self._settable)
        stepped.give_numbers(self._trace, self._planted)
        groups = [group for group in optimizer.param_groups if "capturable" in group]
        before = [group["capturable"] for group in groups]
        for group in groups:
            group["capturable"] = True  # the step count is a tensor on the devices
        self._trace.in_optimizer += 1
        # ``step(closure)``: what the closure computes is the user's, not the optimizer's.
        named = {name: self._apart(x) for name, x in kwargs.items()}
        try:
            return function(optimizer, *map(self._apart, args), **named)
        finally:
            self._trace.in_optimizer -= 1
            for group, capturable in zip(groups, before, strict=True):
                group["capturable"] = capturable

    def formula(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one of the functions that torch's optimizers hand their lists to."""
        name = function.__name__
        return [for_formula(self._trace, name, "", x) for x in args], {
            key: for_formula(self._trace, name, key, x) for key, x in kwargs.items()
        }

    def _apart(self, closure: Any) -> Any:
        if not callable(closure):
            return closure

        def apart() -> Any:
            inside, self._trace.in_optimizer = self._trace.in_optimizer, 0
            try:
                return closure()
            finally:
                self._trace.in_optimizer = inside

        return apart

    def _share_counters(self, optimizer: Optimizer) -> None:
        """Step counts live on the devices from now on, and equal ones are one array."""
        trace = self._trace
        found: list[tuple[dict[str, Any], str, Any]] = []
        with unseen():
            for state in optimizer.state.values():
                for key, value in state.items():
                    if not isinstance(value, torch.Tensor) or value.ndim or value.requires_grad:
                        continue
                    if isinstance(value, TensorMethods):
                        storage = value._storage_
                        if value._steps or trace.uses(storage) or storage.form.varying:
                            continue
                        if storage.form.is_sharded:
                            continue
                    elif value.device.type != "cpu":
                        continue
                    found.append((state, key, value))
        with thread_state.active(None), jax.ensure_compile_time_eval(), jax.enable_x64(True):
            ours = [v._storage_.array for _, _, v in found if isinstance(v, TensorMethods)]
            if abstract.current() is not None:  # they count, but nobody knows how far
                values = iter([np.zeros(())] * len(ours))
            else:
                # After a step they are one array.
                known = {id(array): array for array in ours}
                read = dict(zip(known, jax.device_get([*known.values()]), strict=True))
                values = iter([read[id(array)] for array in ours])
            for state, key, tensor in found:
                if isinstance(tensor, TensorMethods):
                    storage = tensor._storage_
                    storage.array = trace.counter(storage.form, np.asarray(next(values)).item())
                else:
                    form = device_form(None, (), dtype=tensor.dtype)
                    array = trace.counter(form, _item(tensor))
                    state[key] = XLATensor(Storage(array, form), form)
