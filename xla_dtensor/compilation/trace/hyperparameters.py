"""Hyperparameters as numbers of a trace."""

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
from xla_dtensor.forms.form import device_form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.storage import Storage
from xla_dtensor.tensors.device_tensor import XLATensor
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
    if type(value) is not tuple:
        read = partial(hyperparameter, optimizer, index, key)
        return like_a_number(trace.numbers.as_input(read, float(value), name))
    reads = [partial(element, optimizer, index, key, i, len(value)) for i in range(len(value))]
    return tuple(
        like_a_number(trace.numbers.as_input(read, float(v), f"{name}[{i}]"))
        for i, (read, v) in enumerate(zip(reads, value, strict=True))
    )


def hyperparameter(optimizer: Optimizer, index: int, key: str, arguments: Any) -> float:
    """The present value of a number in a param group.

    Raises:
        NumberChanged: there is no number any more.
    """
    try:
        value = optimizer.param_groups[index][key]
    except LookupError:
        raise NumberChanged(f"{type(optimizer).__name__}.param_groups[{index}][{key!r}]") from None
    cls = type(value)
    if cls is float or (cls is int and key in _COMPUTED_WITH):
        return float(value)
    if not is_a_number(key, value):
        raise NumberChanged(
            f"{type(optimizer).__name__}.param_groups[{index}][{key!r}]: now {value!r}"
        )
    return float(value)


def element(
    optimizer: Optimizer, index: int, key: str, position: int, length: int, arguments: Any
) -> float:
    """The same of a number in a tuple."""
    try:
        value = optimizer.param_groups[index][key]
    except LookupError:
        value = None
    if type(value) is not tuple or len(value) != length or not is_a_number(None, value[position]):
        raise NumberChanged(
            f"{type(optimizer).__name__}.param_groups[{index}][{key!r}]: now {value!r}"
        )
    return float(value[position])


def holds_number(value: Any) -> bool:
    """Whether it is a CPU tensor with one float."""
    return (
        isinstance(value, torch.Tensor)
        and not is_ours(value)
        and value.device.type == "cpu"
        and value.numel() == 1
        and value.is_floating_point()
    )


def for_formula(trace: Any, function: str, name: str, value: Any) -> Any:
    """An argument of one of the functions that torch's optimizers hand their lists to, such that
    what they compute with it is computed on the devices.

    Args:
        trace: the `StepTrace`.
        function, name: the function's and the argument's.
    """
    if is_pythons(value):
        value = plain(value)
    elif holds_number(value):
        # lr=torch.tensor(0.1), which a scheduler fills: the number that it holds.
        value = _held(trace, value)
    if name == "lr" and function in ("_fused_sgd", "_fused_adagrad") and _is_symbolic(value):
        return _as_tensor(value)  # a float would be a constant
    return value


def _held(trace: Any, tensor: torch.Tensor) -> Any:
    """The number in a CPU tensor, at this moment of the step."""
    if not trace.host.computes(tensor):
        name = f"the item of a CPU tensor {list(tensor.shape)}"
        read = partial(_held_now, trace.host.use(tensor))
        return trace.numbers.as_input(read, item_of(tensor), name)
    # The step has made it, or written to it: the host computes it in each call.
    with jax.enable_x64(True):
        array = jax.numpy.asarray(trace.host_tensor(tensor)).reshape(()).astype("float64")
        weak = convert_element_type(array, weak_type=True)
    return valueless_number(weak, "a tensor's item", partial(trace.refuse, "a CPU tensor's item"))


def _held_now(source: Any, arguments: Any) -> float:
    return item_of(source.read(arguments))


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymFloat | torch.SymInt)


def item_of(tensor: torch.Tensor) -> float:
    """The value of a CPU tensor, unseen by the trace, which would take it for the user's look."""
    with unseen(), disable_current_modes():
        return float(to_numpy(tensor).item())


def same_number(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a)))


def _as_tensor(number: Any) -> XLATensor:
    """A traced number as a tensor (fused optimizers take the learning rate so)."""
    form = device_form(None, (), dtype=torch.float64)
    with jax.enable_x64(True):
        array = jax.numpy.full((), number.node.traced, dtype=form.jax_dtype)
    return XLATensor(Storage(array, form), form)
