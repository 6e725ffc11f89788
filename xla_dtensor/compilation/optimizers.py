"""Optimizers inside a compiled step: hyperparameters as inputs, state on the devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from xla_dtensor.base import thread_state
from xla_dtensor.base.modes import unseen
from xla_dtensor.compilation.doubles import plain
from xla_dtensor.compilation.hyperparameters import (
    _item,
    as_tensor,
    holds_number,
    hyperparameter,
    is_a_number,
    same_number,
    tensor_hyperparameter,
)
from xla_dtensor.compilation.schedulers import DeferredSchedulers
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
    """An optimizer whose ``step`` runs in the compiled step.

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
        self.numbers: list[set[str]] = []
        self.assigned: list[set[str]] = []
        self.state = {p: (s, dict(s)) for p, s in optimizer.state.items()}
        self.groups = [dict(group) for group in optimizer.param_groups]

    def undo(self) -> None:
        """Give the optimizer the state that it had before the trace."""
        self.optimizer.state.clear()
        for parameter, (state, content) in self.state.items():
            state.clear()
            state.update(content)
            self.optimizer.state[parameter] = state

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
        """Refuse what the step's Python has done to the optimizer, which would happen once.

        Args:
            settable: entries of param groups (their ``id``, the key) of which each call repeats
                what has been done to them.

        Raises:
            DataDependentError: a hyperparameter has been changed, or a number in the state.
        """
        for index, (before, group) in enumerate(
            zip(self.groups, self.optimizer.param_groups, strict=False)
        ):
            for key in group:
                was, now = before.get(key), group.get(key)
                if key != "params" and (id(group), key) in settable:
                    continue
                if key != "params" and was is not now and not same_number(was, now):
                    raise DataDependentError(
                        f"the step changes {self.name}.param_groups[{index}][{key!r}] from {was!r} "
                        f"to {now!r}, which would happen when the step is "
                        "traced, not in every call: do it outside of the compiled step"
                    )
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


class OptimizerHooks:
    """While it is entered, every ``optimizer.step()`` reads its hyperparameters as traced numbers.

    A number in ``param_groups`` (``lr``, ``weight_decay``, ``betas``...) is replaced during the
    call by one that is an input of the program; afterwards the group is as it was.

    Args:
        known: the param groups before the step, of the optimizers that it is known to reach.
        settable: entries of param groups that the step may assign (`SteppedOptimizer.check`).
        schedulers: the schedulers' steps that the step puts off.

    Attributes:
        stepped: the optimizers seen, by id.
    """

    def __init__(
        self,
        trace: StepTrace,
        known: dict[int, list[dict[str, Any]]],
        settable: set[tuple[int, str]],
        schedulers: DeferredSchedulers,
    ) -> None:
        self._trace = trace
        self._settable = settable
        # Entries that each call takes from there: what is there now, the step has assigned.
        self.carried: set[tuple[int, Any]] = set()
        self._known = known
        self._schedulers = schedulers
        self._saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.stepped: dict[int, SteppedOptimizer] = {}

    def __enter__(self) -> OptimizerHooks:
        self._trace.optimizer_hooks = self
        self._zero_grads = [(cls, cls.zero_grad) for cls in (Optimizer, nn.Module)]
        for cls, zero_grad in self._zero_grads:
            cls.zero_grad = self._seeing(zero_grad)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._trace.optimizer_hooks = None
        for cls, zero_grad in self._zero_grads:
            cls.zero_grad = zero_grad
        while self._saved:
            group, original = self._saved.pop()
            group.update(original)

    def check(self) -> None:
        """Refuse what the step has done to the optimizers, and each call can't."""
        for stepped in self.stepped.values():
            stepped.check(self._settable)

    def undo(self) -> None:
        """Give the optimizers the state that they had before the trace."""
        for stepped in self.stepped.values():
            stepped.undo()

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

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """The optimizer's ``step`` begins: what it is to be given in place of its arguments."""
        stepped = self.stepped.get(id(optimizer))
        if stepped is None:
            name = type(optimizer).__name__
            same = sum(type(s.optimizer) is type(optimizer) for s in self.stepped.values())
            name = name if not same else f"{name} ({same + 1})"
            stepped = SteppedOptimizer(optimizer, name)
            stepped.groups = self._known.get(id(optimizer), stepped.groups)
            self.stepped[id(optimizer)] = stepped
            self._share_counters(optimizer)
        self._schedulers.check_optimizer(optimizer)
        stepped.check(self._settable)
        stepped.assigned = [set() for _ in optimizer.param_groups]
        stepped.numbers = [
            self._trace_numbers(stepped, index, group)
            for index, group in enumerate(optimizer.param_groups)
        ]
        self._trace.in_optimizer += 1
        # ``step(closure)``: what the closure computes is the user's, not the optimizer's.
        return (
            tuple(x if x is optimizer else self._apart(x) for x in args),
            {name: self._apart(x) for name, x in kwargs.items()},
        )

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

    def after(self, optimizer: Optimizer) -> None:
        """It is done."""
        self._trace.in_optimizer -= 1
        for _ in optimizer.param_groups:
            group, original = self._saved.pop()
            group.update(original)

    def _trace_numbers(
        self, stepped: SteppedOptimizer, index: int, group: dict[str, Any]
    ) -> set[str]:
        """Put traced numbers into a param group; the keys that got one."""
        changed: dict[str, Any] = {}
        # They take numbers wherever they take tensors.
        torchs_own = users_class(stepped.optimizer).step.__module__.startswith("torch.optim.")
        for key, value in group.items():
            if key == "params":
                continue
            where = f"{stepped.name}.param_groups[{index}][{key!r}]"
            read = partial(hyperparameter, stepped.optimizer, index, key)
            held = partial(tensor_hyperparameter, stepped.optimizer, index, key)
            if self._is_assigned(stepped, index, key, value):
                stepped.assigned[index].add(key)
                if isinstance(value, torch.SymFloat | torch.SymInt):
                    number = plain(value)
                    fused = key == "lr" and group.get("fused")
                    changed[key] = as_tensor(number) if fused else number
            elif is_a_number(key, value):
                number = self._trace.number(partial(read, None), float(value), where)
                fused = key == "lr" and group.get("fused")
                changed[key] = as_tensor(number) if fused else number
            elif type(value) is tuple and value and all(is_a_number(None, v) for v in value):
                changed[key] = tuple(
                    self._trace.number(partial(read, i), float(v), f"{where}[{i}]")
                    for i, v in enumerate(value)
                )
            elif holds_number(value):
                # lr=torch.tensor(0.1), which a scheduler fills: the number that it holds.
                number = self._trace.number(partial(held, None), _item(value), where)
                as_number = torchs_own and not (key == "lr" and group.get("fused"))
                changed[key] = number if as_number else as_tensor(number, value)
            elif type(value) is tuple and value and all(map(holds_number, value)):
                numbers = [
                    self._trace.number(partial(held, i), _item(v), f"{where}[{i}]")
                    for i, v in enumerate(value)
                ]
                changed[key] = tuple(
                    n if torchs_own else as_tensor(n, v)
                    for n, v in zip(numbers, value, strict=True)
                )
        keys = set(changed) - stepped.assigned[index]
        if "capturable" in group:
            changed["capturable"] = True  # the step count is a tensor on the devices
        self._saved.append((group, {key: group[key] for key in changed}))
        group.update(changed)
        return keys

    def _is_assigned(self, stepped: SteppedOptimizer, index: int, key: str, value: Any) -> bool:
        """Whether the step has given an entry another value, or each call takes it from there."""
        where = id(stepped.optimizer.param_groups[index]), key
        if isinstance(value, torch.SymFloat | torch.SymInt) or where in self.carried:
            return True
        before = stepped.groups[index].get(key) if index < len(stepped.groups) else None
        settable = (id(stepped.optimizer.param_groups[index]), key) in self._settable
        return settable and value is not before and not same_number(value, before)

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


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    hooks = getattr(thread_state.current(), "optimizer_hooks", None)
    return None if hooks is None else hooks.before(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    hooks = getattr(thread_state.current(), "optimizer_hooks", None)
    if hooks is not None:
        hooks.after(optimizer)


# There from the start, and not only in a trace: another thread's steps look at which there are.
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
