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

from xla_dtensor.base import executor
from xla_dtensor.base.numbers.valueless_number import absent_number
from xla_dtensor.base.source_line import user_line
from xla_dtensor.base.torch_private import pytree, unseen
from xla_dtensor.compilation.trace.hyperparameters import for_formula, item_of
from xla_dtensor.compilation.trace.schedulers import DeferredSchedulers, set_by
from xla_dtensor.compilation.trace.step_trace import StepTrace
from xla_dtensor.compilation.trace.stepped import Planted, SteppedOptimizer, of_one
from xla_dtensor.errors import DataDependentError
from xla_dtensor.forms.form import device_form
from xla_dtensor.forms.storage import Storage
from xla_dtensor.runtime import abstract
from xla_dtensor.tensors.base import grad_of
from xla_dtensor.tensors.device_tensor import XLATensor
from xla_dtensor.tensors.of_form import is_ours


class OptimizerHooks:
    """While it is entered, Python finds numbers of the trace in optimizers' ``param_groups``.

    A hyperparameter (``lr``, ``weight_decay``, ``betas``...) is an input of the program wherever
    the step reads it: in its own code, in hooks, in an optimizer's ``step``. What stands there when
    the step ends and isn't what it has found is an effect like any other (`Effect`).

    Args:
        known: the optimizers that the step is known to reach.
        settable: entries of param groups and of states of which each call repeats what the step
            assigns: (the dict's ``id``, the key).
        schedulers: the schedulers' steps that the step puts off.
        feeds: whether the user's code may find numbers of the trace, and not only torch's.
        everywhere: whether the step's own code may, too, and not only an optimizer's ``step``.
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
        feeds: bool,
        everywhere: bool,
        planted: Planted,
    ) -> None:
        self._planted = planted
        self._trace = trace
        self.settable = settable
        self._schedulers = schedulers
        self._feeds, self._everywhere = feeds, everywhere
        self._seen: dict[int, SteppedOptimizer] = {}
        self.stepped: dict[int, SteppedOptimizer] = {}
        # Param group entries that a scheduler sets after the program has run: (group, key, the
        # value before, the stand-in that is there meanwhile).
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
            stepped.check(self.settable)
            stepped.check_state(self.settable)

    def take_numbers(self) -> None:
        """When all that the step has changed is known: no number of the trace is left."""
        for seen in self._seen.values():
            seen.take_numbers()
        self._seen = dict(self.stepped)

    def memory_made(self) -> set[int]:
        """The memory, by id, of the tensors that they have put into their state."""
        made = (value for stepped in self.stepped.values() for value in stepped.made())
        return {id(value._storage_) for value in made if is_ours(value)}

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
        self._trace.refuse_with(
            DataDependentError(
                f"the compiled step reads {key!r} of a param group behind {scheduler}.step(), "
                "which is put off until the program has run: read it before, or outside of the step"
            )
        )

    def _seeing(self, zero_grad: Any) -> Any:
        """``zero_grad`` that tells the trace what it sets to None."""

        def seen(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if executor.trace() is not self._trace:
                return zero_grad(owner, *args, **kwargs)
            # All of them, before: else the inputs' order would depend on which have a gradient.
            if args[0] if args else kwargs.get("set_to_none", True):
                if isinstance(owner, Optimizer):
                    tensors = [p for group in owner.param_groups for p in group["params"]]
                else:
                    tensors = list(owner.parameters())
                for tensor in tensors:
                    if is_ours(tensor):
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
            self._share_counters(stepped)
        self._schedulers.check_optimizer(optimizer)
        stepped.check(self.settable)
        if self._feeds or stepped.is_torchs():
            stepped.give_numbers(self._trace, self._planted)
        groups = [group for group in optimizer.param_groups if "capturable" in group]
        for tensor in (p for group in groups for p in group["params"]):
            on_host = not is_ours(tensor) and tensor.device.type == "cpu"
            if on_host and grad_of(tensor) is not None:
                raise DataDependentError(
                    f"CPU parameters of {type(optimizer).__name__}, which counts its steps on the "
                    'devices in a compiled step: move the module to them, .to("xla"), or call '
                    f"its step() outside{user_line()}"
                )
        before = [group["capturable"] for group in groups]
        for group in groups:
            group["capturable"] = True  # the step count is a tensor on the devices
        # ``step(closure)``: operations of the closure don't count as the optimizer's.
        named = {name: self._apart(x) for name, x in kwargs.items()}
        try:
            with self._trace.making_state():
                return function(optimizer, *map(self._apart, args), **named)
        finally:
            for group, capturable in zip(groups, before, strict=True):
                group["capturable"] = capturable

    def formula(self, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one of the functions that torch's optimizers hand their lists to."""
        args, kwargs = self._with_counters((args, kwargs))
        take = partial(for_formula, self._trace)
        return list(map(take, args)), {key: take(value) for key, value in kwargs.items()}

    def _with_counters(self, arguments: Any) -> Any:
        """The arguments with step counts on the devices in place of those that the step has made on
        the CPU, as Adagrad does for a parameter without state, next to others that have one."""
        lists = [x for x in (*arguments[0], *arguments[1].values()) if isinstance(x, list)]
        made = [t for some in lists for t in some if t.__class__ is torch.Tensor and not t.ndim]
        with unseen():
            moved = {id(t): self._counter(t) for t in made if self._trace.host.is_constant(t)}
        if not moved:
            return arguments
        for stepped in self.stepped.values():
            for state in filter(of_one, stepped.optimizer.state.values()):
                state.update({k: moved[id(v)] for k, v in state.items() if id(v) in moved})
        return pytree.tree_map(lambda x: moved.get(id(x), x), arguments)

    def _counter(self, tensor: torch.Tensor) -> XLATensor:
        form = device_form(None, (), dtype=tensor.dtype)
        storage = self._trace.constant(form, item_of(tensor))
        assert storage is not None  # constant() gives one in an optimizer's step
        return XLATensor(storage, form)

    def _apart(self, closure: Any) -> Any:
        if not callable(closure):
            return closure

        def apart() -> Any:
            inside, self._trace.optimizer_depth = self._trace.optimizer_depth, 0
            try:
                return closure()
            finally:
                self._trace.optimizer_depth = inside

        return apart

    def _share_counters(self, stepped: SteppedOptimizer) -> None:
        """Step counts live on the devices from now on, and equal ones are one array. Those that a
        user's own optimizer has on the CPU stay there: it may look at them (``step.item()``)."""
        trace, optimizer = self._trace, stepped.optimizer
        moves = stepped.is_torchs() or any("capturable" in g for g in optimizer.param_groups)
        dims = lambda p: p.ndim if isinstance(p, torch.Tensor) else 0
        states = [(dims(p), state) for p, state in optimizer.state.items() if of_one(state)]
        with unseen():
            entries = [(n, state, *entry) for n, state in states for entry in state.items()]
            # What has dims for a parameter that has some is a moment, also where it has none.
            moments = {
                key for n, _, key, v in entries if n and isinstance(v, torch.Tensor) and v.ndim
            }
            found = [
                (state, key, value)
                for _, state, key, value in entries
                if key not in moments and self._is_counter(value, moves)
            ]
        with executor.running_at_once(), jax.ensure_compile_time_eval(), jax.enable_x64(True):
            ours = [v._storage_.array for _, _, v in found if is_ours(v)]
            if abstract.current() is not None:  # step counts have no values here
                values = iter([np.zeros(())] * len(ours))
            else:
                # After a step all step counts are one array: read it once.
                known = {id(array): array for array in ours}
                read = dict(zip(known, jax.device_get([*known.values()]), strict=True))
                values = iter([read[id(array)] for array in ours])
            for state, key, tensor in found:
                if is_ours(tensor):
                    storage = tensor._storage_
                    value = np.asarray(next(values)).item()
                    storage.array = trace.numbers.counter(storage.form, value, key)
                else:
                    form = device_form(None, (), dtype=tensor.dtype)
                    array = trace.numbers.counter(form, item_of(tensor), key)
                    state[key] = XLATensor(Storage(array, form), form)
                    stepped.shared.add((id(state), key))

    def _is_counter(self, value: Any, moves: bool) -> bool:
        """Whether an entry of a state is a step count that isn't shared yet.

        Args:
            moves: whether one on the CPU is.
        """
        if not isinstance(value, torch.Tensor) or value.ndim or value.requires_grad:
            return False
        if not is_ours(value):
            return moves and value.device.type == "cpu"
        storage, form = value._storage_, value._storage_.form
        # Arguments' memory, and what the step replaces (it is carried as one), is another in each
        # call.
        others = id(storage) in self._trace.not_fetched
        uses = value._steps or self._trace.uses(storage)
        return not (others or uses or form.varying or form.is_sharded)
