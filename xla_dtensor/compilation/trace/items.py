"""Items of tensors that a step computes (``loss.item()``): numbers that are known when the program
has run."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_dtensor.base.jax_private import convert_element_type
from xla_dtensor.base.numbers.pending_number import PendingNode, Refuse
from xla_dtensor.base.numbers.traced_number import NumberNode
from xla_dtensor.forms.form import Form
from xla_dtensor.forms.read import logical_value


class TracedItems:
    """The items of one trace.

    Args:
        refuse: raises; is told what needs the value of one before it is known.

    Attributes:
        arrays: by number the value of the tensor when its item was asked for, and its form.
    """

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse
        self.arrays: list[tuple[Any, Form]] = []

    @staticmethod
    def is_number(tensor: Any) -> bool:
        """Whether the item of a tensor is a float or an int, one for all devices. (A bool decides
        something.)"""
        dtype = tensor.dtype
        return not (dtype is torch.bool or dtype.is_complex or tensor._form.varying)

    def of(self, tensor: Any) -> Any:
        """The item of a tensor of one element, as a symbolic number."""
        array, form = logical_value(tensor), tensor._form.reduced()
        index = len(self.arrays)
        self.arrays.append((array, form))
        floating = tensor.dtype.is_floating_point

        def on_devices(node: NumberNode) -> Any:
            wide = array.reshape(()).astype(jnp.float64 if floating else jnp.int64)
            with jax.enable_x64(True):
                return convert_element_type(wide, weak_type=True)

        node = PendingNode(
            float if floating else int,
            operator.itemgetter(-1 - index),
            f".item() ({index + 1})" if index else ".item()",
            self._refuse,
            frozenset({index}),
            on_devices,
        )
        return torch.SymFloat(node) if floating else torch.SymInt(node)
