"""Optimizers on the walk: what a step's code, their own and their hooks read of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from xla_dtensor.compilation.objects.places import Elements, Entries, Items, Slots
from xla_dtensor.compilation.trace.hyperparameters import is_input
from xla_dtensor.compilation.trace.stepped import SteppedOptimizer, of_one
from xla_dtensor.compilation.watch.walk_told import WalkTold


class WalkOptimizers(WalkTold):
    """What is found in optimizers; see `Watch`."""

    def _optimizer(self, optimizer: Optimizer, path: str) -> None:
        """What the step's own code reads of it, and that of its class and its hooks; what else its
        ``step`` reads has guards of its own."""
        self._note(path, "optimizer", optimizer)
        self._note(f"{path}'s class", "class", type(optimizer))
        self._typed.append(optimizer)
        self._class(type(optimizer))
        own = vars(optimizer)
        wanted = [n for n in own if self._is_read(n) and n not in ("param_groups", "state")]
        self._assigned(optimizer, path, [*wanted, "param_groups", "state"])
        self._entries(own, wanted, path, optimizer)
        self._optimizer_hooks(optimizer, path)
        self.optimizers[id(optimizer)] = optimizer
        if not self._of_library(type(optimizer)):
            # Numbers and lists that its step counts up and replaces. The tensors are looked at when
            # it is known that it steps.
            whole = optimizer.state
            places = [(f"{path}.state[{i}]", s) for i, s in enumerate(whole.values()) if of_one(s)]
            for where, state in ((f"{path}.state", whole), *places):
                names = [key for key in state if type(key) is str]
                names = [key for key in names if not isinstance(state[key], torch.Tensor | dict)]
                self._entries(state, names, where, optimizer)
                self.settings |= {(id(state), key) for key in names}
        if "param_groups" not in self._names.attributes:
            return
        self._place(Slots(optimizer, ("param_groups",), path))
        groups = optimizer.param_groups
        self._place(Elements(groups, f"{path}.param_groups"))
        for i, group in enumerate(groups):
            where = f"{path}.param_groups[{i}]"
            # Numbers that the step finds as inputs needn't be the same in each call.
            read = [k for k, v in group.items() if self._is_read(k) and not self._is_fed(k, v)]
            compared = ["params", *(key for key in read if key != "params")]
            self._entries(group, compared, where, optimizer)
            # Those that the code names and aren't there it may put there.
            others = [key for key in {*group, *self._names.attributes} if key not in compared]
            self._place(Entries(group, others, where, guarded=False))
            self.settings |= {(id(group), key) for key in (*compared, *others)}

    def _is_fed(self, key: str, value: Any) -> bool:
        return not (self._fixed or self.asks_types) and is_input(key, value)

    def _optimizer_hooks(self, optimizer: Optimizer, path: str) -> None:
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if (hooks := getattr(optimizer, name, None)) is None:
                continue  # a wrapper that is an optimizer in name only
            self._place(Items(hooks, f"{path}.{name}", with_keys=False))
            for number, hook in enumerate(hooks.values()):
                self._walk(hook, f"{path}.{name}[{number}]")

    def _stepped(self, stepped: SteppedOptimizer, path: str) -> None:
        """What an optimizer's ``step`` reads: all of its param groups but the numbers that are
        inputs, and its state."""
        optimizer, groups = stepped.optimizer, stepped.optimizer.param_groups
        self._note(path, "stepped optimizer", (id(optimizer), len(groups)))
        self._place(Slots(optimizer, ("param_groups", "state"), path))
        self._place(Elements(groups, f"{path}.param_groups"))
        carried = {one.where() for one in self.carried}
        for i, group in enumerate(groups):
            # What the step's code assigns or takes along is looked at where that is found.
            inputs = {key for key in group if (id(group), key) in carried}
            if i < len(stepped.numbers):
                inputs |= stepped.numbers[i] | stepped.assigned[i]
            where = f"{path}.param_groups[{i}]"
            names = [key for key in group if key not in inputs]
            self._place(Entries(group, names, where))
            for name in names:
                self._walk(group[name], f"{where}[{name!r}]")
        self._state(optimizer.state, f"{path}.state", carried)
        for number, state in enumerate(optimizer.state.values()):
            if of_one(state):
                self._state(state, f"{path}.state[{number}]", carried)
        if id(optimizer) not in self.optimizers:
            self._class(type(optimizer))
            self._optimizer_hooks(optimizer, path)

    def _state(self, state: dict[Any, Any], path: str, carried: set[tuple[int, Any]]) -> None:
        place = Items(state, path, with_keys=False)
        self._place(place)
        place.carried = frozenset(key for key in state if (id(state), key) in carried)
        for key, value in state.items():
            if key not in place.carried and not of_one(value):
                self._walk(value, f"{path}[{key!r}]")

    def _global_hooks(self) -> None:
        names = [
            (torch_module, f"_global_{kind}_hooks")
            for kind in ("forward", "forward_pre", "backward", "backward_pre")
        ]
        names += [(torch_optimizer, f"_global_optimizer_{kind}_hooks") for kind in ("pre", "post")]
        for where, name in names:
            hooks = getattr(where, name)
            self._place(Items(hooks, f"{where.__name__}.{name}", with_keys=False))
            for number, hook in enumerate(hooks.values()):
                self._walk(hook, f"{name}[{number}]")
