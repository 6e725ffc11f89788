"""Hyperparameters as numbers of a trace."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import torch
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from xla_dtensor.compilation.numbers import Changed
from xla_dtensor.forms.form import device_form
from xla_dtensor.forms.host_values import to_numpy
from xla_dtensor.forms.storage import Storage
from xla_dtensor.tensors.base import TensorMethods
from xla_dtensor.tensors.device_tensor import XLATensor

# Numbers of param groups that torch's formulas only compute with, whatever their Python type:
# `weight_decay=0` may become 0.1 later. Other ints decide something and are part of the program.
_COMPUTED_WITH = frozenset(
    {
        *("lr", "weight_decay", "momentum", "dampening", "eps", "alpha", "rho", "lambd", "t0"),
        *("lr_decay", "initial_accumulator_value", "momentum_decay", "beta2_decay", "d"),
    }
)


def is_a_number(key: str | None, value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return False
    if isinstance(value, float | np.floating):
        return True
    return key in _COMPUTED_WITH and isinstance(value, int | np.integer)


def hyperparameter(
    optimizer: Optimizer, index: int, key: str, element: int | None, arguments: Any
) -> float:
    """The present value of a number in a param group.

    Raises:
        Changed: there is no number any more.
    """
    try:
        value = optimizer.param_groups[index][key]
        if element is not None:
            value = value[element]
    except (LookupError, TypeError):
        raise Changed(f"{type(optimizer).__name__}.param_groups[{index}][{key!r}]") from None
    if type(value) is float:
        return value
    if not is_a_number(None if element is not None else key, value):
        raise Changed(f"{type(optimizer).__name__}.param_groups[{index}][{key!r}]: now {value!r}")
    return float(value)


def tensor_hyperparameter(
    optimizer: Optimizer, index: int, key: str, element: int | None, arguments: Any
) -> float:
    """The same of a number in a CPU tensor."""
    try:
        value = optimizer.param_groups[index][key]
        if element is not None:
            value = value[element]
    except (LookupError, TypeError):
        value = None
    if not holds_number(value):
        raise Changed(f"{type(optimizer).__name__}.param_groups[{index}][{key!r}]: now {value!r}")
    return _item(value)


def holds_number(value: Any) -> bool:
    """Whether it is a CPU tensor with one float."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, TensorMethods)
        and value.device.type == "cpu"
        and value.numel() == 1
        and value.is_floating_point()
    )


def _item(tensor: torch.Tensor) -> float:
    """The value of a CPU tensor, unseen by the trace, which would take it for the user's look."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return float(to_numpy(tensor).item())


def same_number(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a)))


def as_tensor(number: Any, like: torch.Tensor | None = None) -> XLATensor:
    """A traced number as a tensor (fused optimizers take the learning rate so), of the shape and
    dtype of another one."""
    shape = () if like is None else tuple(like.shape)
    form = device_form(None, shape, dtype=torch.float64 if like is None else like.dtype)
    with jax.enable_x64(True):
        array = jax.numpy.full(shape, number.node.traced, dtype=form.jax_dtype)
    return XLATensor(Storage(array, form), form)
