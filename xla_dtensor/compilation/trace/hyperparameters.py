"""Optimizers' hyperparameters as symbolic numbers while a step is traced."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from torch.optim.optimizer import Optimizer

from xla_dtensor.base.jax_private import convert_element_type
from xla_dtensor.base.numbers.python_numbers import is_pythons, like_a_number
from xla_dtensor.base.numbers.valueless_number import valueless_number
from xla_dtensor.base.torch_private import disable_current_modes, unseen
from xla_dtensor.compilation.trace.doubles import plain
from xla_dtensor.compilation.trace.numbers import NumberChanged
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.tensors.of_form import is_ours

# Numbers of param groups that torch's formulas only compute with, whatever their Python type:
# `weight_decay=0` may become 0.1 later. Other ints decide something and are part of the program.
_COMPUTED_WITH = frozenset(
    {
        *("lr", "weight_decay", "momentum", "dampening", "eps", "alpha", "rho", "lambd", "t0"),
        *("lr_decay", "initial_accumulator_value", "momentum_decay", "beta2_decay", "d"),
    }
)


def is_a_number(key: str | None, value: Any) -> bool:
    if isinstance(value, bool | np.bool_ | torch.SymFloat | torch.SymInt):
        return False
    if isinstance(value, float | np.floating):
        return True
    return key in _COMPUTED_WITH and isinstance(value, int | np.integer)


def is_input(key: str, value: Any) -> bool:
    """Whether an entry of a param group is an input of the program: a number, a tuple of them."""
    if type(value) is tuple:
        return bool(value) and all(is_a_number(None, v) for v in value)
    return is_a_number(key, value)


def as_input(trace: Any, optimizer: Optimizer, index: int, key: str, value: Any, name: str) -> Any:
    """An entry of a param group (`is_input`) as Python code finds it while a step is traced.

    Args:
        trace: the `StepTrace`.
        name: its name in messages.
    """

    def one(number: Any, place: tuple[int, int] | None, name: str) -> Any:
        read = partial(hyperparameter, optimizer, index, key, place)
        return like_a_number(trace.numbers.as_input(read, float(number), name))

    if type(value) is not tuple:
        return one(value, None, name)
    return tuple(one(v, (i, len(value)), f"{name}[{i}]") for i, v in enumerate(value))


def hyperparameter(
    optimizer: Optimizer, index: int, key: str, place: tuple[int, int] | None, arguments: Any
) -> float:
    """The present value of a number in a param group.

    Args:
        place: in an entry that is a tuple, the position and the length.

    Raises:
        NumberChanged: there is no number any more.
    """
    name: str | None = key
    try:
        entry = value = optimizer.param_groups[index][key]
        if place is not None:
            position, length = place
            same = type(entry) is tuple and len(entry) == length
            name, value = None, entry[position] if same else None
    except LookupError:
        raise NumberChanged(f"{type(optimizer).__name__}.param_groups[{index}][{key!r}]") from None
    cls = type(value)
    if cls is float or (cls is int and name in _COMPUTED_WITH):
        return float(value)
    if not is_a_number(name, value):
        raise NumberChanged(
            f"{type(optimizer).__name__}.param_groups[{index}][{key!r}]: now {entry!r}"
        )
    return float(value)


def holds_number(value: Any) -> bool:
    """Whether it is a CPU tensor with one float."""
    return (
        isinstance(value, torch.Tensor)
        and not is_ours(value)
        and value.device.type == "cpu"
        and value.numel() == 1
        and value.is_floating_point()
    )


def for_formula(trace: Any, value: Any) -> Any:
    """An argument of one of the functions that torch's optimizers hand their lists to, such that
    what they compute with it is computed on the devices."""
    if is_pythons(value):
        return plain(value)
    # lr=torch.tensor(0.1), which a scheduler fills: the number that it holds.
    return _held(trace, value) if holds_number(value) else value


def _held(trace: Any, tensor: torch.Tensor) -> Any:
    """The number in a CPU tensor, at this moment of the step."""
    if not trace.host.computes(tensor):
        name = f"the item of a CPU tensor {list(tensor.shape)}"
        read = partial(_held_now, trace.host.use(tensor))
        return trace.numbers.as_input(read, item_of(tensor), name)
    # A CPU tensor that the step has made or written: the host's program gives it in each call.
    with jax.enable_x64(True):
        array = jax.numpy.asarray(trace.host_tensor(tensor)).reshape(()).astype("float64")
        weak = convert_element_type(array, weak_type=True)
    return valueless_number(weak, "a tensor's item", partial(trace.refuse, "a CPU tensor's item"))


def _held_now(source: Any, arguments: Any) -> float:
    return item_of(source.read(arguments))


def item_of(tensor: torch.Tensor) -> float:
    """The value of a CPU tensor, unseen by the trace, which would take it for the user's look."""
    with unseen(), disable_current_modes():
        return float(to_numpy(tensor).item())


def same_number(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a)))
