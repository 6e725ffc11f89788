"""Converts Lightning's checkpoints to plain CPU tensors, to be read without xla devices."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch


def on_host(value: Any) -> Any:
    """What a checkpoint has, with whole CPU tensors in the place of xla tensors.

    Args:
        value: of dicts, lists and tuples; what else has tensors keeps them.

    Returns:
        a copy, with whatever is no xla tensor as it is.
    """
    if isinstance(value, torch.Tensor) and value.device.type == "xla":
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole.detach().cpu()
    if type(value) in (dict, OrderedDict):
        copied = type(value)((name, on_host(each)) for name, each in value.items())
        if vars_of := getattr(value, "__dict__", None):  # a state dict's versions
            copied.__dict__.update(vars_of)
        return copied
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    return value
