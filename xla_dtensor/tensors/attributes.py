"""Which attributes in a tensor's ``__dict__`` are the package's, and which the user's."""

from __future__ import annotations

from typing import Any

import torch

from xla_dtensor.base import thread_state

# What the classes and DTensor keep on a tensor; other attributes are the user's. The names are such
# as nobody else gives: `weight._grad_hook = weight.register_hook(...)` is a line that people write.
OWN_ATTRIBUTES = frozenset(
    {
        "_storage_",
        "_steps",
        "_own_form",
        "_xla_cache",
        "_spec",
        "_xla_grad_hook",
        "_xla_local",
        "_xla_alive",
        "_xla_kept",
    }
    | {"_summed"}
)

dict_of_tensor: Any = vars(torch.Tensor)["__dict__"]
"""What gives and sets a tensor's ``__dict__``, past ours."""


def users_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """What of a tensor's attributes isn't ours."""
    return {name: value for name, value in attributes.items() if name not in OWN_ATTRIBUTES}


def set_attributes(tensor: Any, given: dict[str, Any]) -> None:
    """Libraries (fastai) assign all that is kept on one tensor to another: not what we keep."""
    if not thread_state.swaps_tensors():
        before = dict_of_tensor.__get__(tensor)
        own = {name: value for name, value in before.items() if name in OWN_ATTRIBUTES}
        given = {**users_of(given), **own}
    dict_of_tensor.__set__(tensor, given)
