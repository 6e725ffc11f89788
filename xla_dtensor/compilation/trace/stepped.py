"""An optimizer's param groups and state before its ``step()`` was traced, and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from xla_dtensor.compilation.trace.hyperparameters import as_input, is_input, same_number
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.errors import DataDependentError

# Called for each number put into a param group for the trace: ((id of the group, key), the number).
Planted = Callable[[tuple[int, str], Any], None]


class ReadState:
    """An optimizer whose ``state`` the step's own code reads, though it doesn't step it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


class SteppedOptimizer:
    """An optimizer that a step is known to reach, while it is traced; one whose ``step`` runs in it
    also later on.

    Attributes:
        optimizer: the optimizer.
        name: its name in messages; two of one class are told apart.
        numbers: per param group the keys whose numbers are inputs of the program.
        assigned: per param group the keys that the step has assigned before it steps.
        state: its state before the trace.
        shared: step counts in it that are on the devices from now on: (a state's ``id``, the key).
        groups: the param groups' values before the trace.
    """

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        self.optimizer = optimizer
        self.name = name
        self.state = {p: (s, dict(s) if of_one(s) else {}) for p, s in optimizer.state.items()}
        self._before = self._entries()
        self.groups = [dict(group) for group in optimizer.param_groups]
        self._dicts = list(optimizer.param_groups)
        self._members = [list(group["params"]) for group in self._dicts]
        # The symbolic numbers put into the groups for the trace.
        self._given: list[dict[str, Any]] = [{} for _ in self._dicts]
        self.numbers: list[set[str]] = [set() for _ in self._dicts]
        self.assigned: list[set[str]] = [set() for _ in self._dicts]
        self.shared: set[tuple[int, str]] = set()

    def give_numbers(self, trace: StepTrace, given_to: Planted) -> None:
        """Let Python find numbers of the trace in the groups, where the step has left what was
        there."""
        for index, (group, before) in enumerate(zip(self._dicts, self.groups, strict=True)):
            given = self._given[index]
            for key, value in group.items():
                if key in given or key == "params":
                    continue
                if key not in before:
                    continue  # new in this call: the next one may behave differently
                if value is not before[key]:
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
            if of_one(state):
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
        return any(True for _ in self.made())

    def made(self) -> Iterator[Any]:
        """What it has put into its state under keys that weren't there."""
        return (value for key, (_, value) in self._entries().items() if key not in self._before)

    def replaced_state(self, settable: set[tuple[int, str]]) -> bool:
        """Whether it has put something else in place of state that was there, or removed it.

        Args:
            settable: as in `check`, of entries in the state (a count, say): each call puts there
                what it comes to.
        """
        now = self._entries()
        known = self.shared | settable
        return any(
            now.get(key, (None, None))[1] is not value and (id(state), key[1]) not in known
            for key, (state, value) in self._before.items()
        )

    def _entries(self) -> dict[tuple[Any, Any], tuple[dict[Any, Any], Any]]:
        """What is in the state, and the dict that it is in, by its parameter (None for what isn't
        one parameter's) and its key."""
        whole = self.optimizer.state
        found = {(None, key): (whole, v) for key, v in whole.items() if not of_one(v)}
        for p, state in whole.items():
            if of_one(state):
                found |= {(p, key): (state, value) for key, value in state.items()}
        return found

    def is_steady(self) -> bool:
        """Whether a step that finds the state of the first one computes the same.

        True of torch's own, which fill their state and go on as ever; but the fused SGD is told
        which step is the first one, and what one makes on the CPU is a constant. Of others nobody
        knows, until the step is traced again. (What the trace has computed, a gradient taken as
        momentum, has it traced again in any case.)
        """
        cls = users_class(self.optimizer)
        if cls is torch.optim.SGD and any(g["fused"] for g in self.optimizer.param_groups):
            return False
        return self.is_torchs() and not any(v.__class__ is torch.Tensor for v in self.made())

    def is_torchs(self) -> bool:
        """Whether torch defines it."""
        return f"{users_class(self.optimizer).__module__}.".startswith("torch.optim.")

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
                if was is now or key in _APART or (id(group), key) in settable:
                    continue
                if isinstance(now, torch.SymFloat | torch.SymInt) or not same_number(was, now):
                    raise DataDependentError(
                        f"the step changes {where}[{key!r}] from {was!r} to {now!r}, {once}"
                    )

    def check_state(self, settable: set[tuple[int, str]]) -> None:
        """Refuse numbers in the state that the step's Python counts, where each call can't.

        Args:
            settable: as in `check`, of entries in the state.

        Raises:
            DataDependentError: there is one.
        """
        for (p, key), (state, value) in self._entries().items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            # A key that is new is no change: the next call finds it, and traces again.
            before = self._before.get((p, key), (None, value))[1]
            if before is not value and (id(state), key) not in settable:
                raise DataDependentError(
                    f"{self.name} counts a Python number, {key!r} = {value!r}, in its state, which "
                    "would count the traces, not the calls: keep it as a tensor (torch.tensor(0.0, "
                    "device=parameter.device)), or call its step() outside of the compiled step"
                )


def of_one(state: Any) -> bool:
    """Whether an entry of an optimizer's ``state`` is that of a parameter, as torch has it, and not
    a value of the optimizer's own (SPAM's ``state["total_step"]``)."""
    return isinstance(state, dict)


# Entries of a param group compared apart: params one by one; capturable, which a trace sets.
_APART = ("params", "capturable")


def users_class(optimizer: Optimizer) -> type[Optimizer]:
    """The optimizer's class; of one that the package has wrapped (Horovod's), the one wrapped."""
    classes: Any = type(optimizer).__mro__
    return next(cls for cls in classes if not cls.__module__.startswith("xla_dtensor."))
