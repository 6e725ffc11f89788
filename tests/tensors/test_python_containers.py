"""Tensors in Python's and NumPy's hands: lists of them, sums, numbers; as of tensors on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import xla_dtensor as xd


class Tagged(torch.Tensor):
    """A subclass that does nothing."""


OF_A_VECTOR: dict[str, Callable[[Any], Any]] = {
    "torch.tensor of elements": lambda x: torch.tensor([x[0], 2.0, x[3]]),
    "of all elements": lambda x: torch.tensor(list(x)),
    "of their integers": lambda x: torch.tensor([x[1].long(), 7]),
    "nested": lambda x: torch.tensor([[x[0], x[1]], [x[2], x[3]]]),
    "torch.as_tensor": lambda x: torch.as_tensor([x[0], x[1]]),
    "torch.FloatTensor": lambda x: torch.FloatTensor([x[0], x[1]]),
    "of a parameter's": lambda x: torch.tensor([nn.Parameter(x, requires_grad=False)[1], 2]),
    "of a subclass's": lambda x: torch.tensor([x.as_subclass(Tagged)[1], 1.0]),
    "more than an element": lambda x: torch.tensor([x[:2], x[2:]]),
    "np.array": lambda x: np.array([x[0], x[1]]),
    "np.array of vectors": lambda x: np.array([x, x]),
    "sum": lambda x: float(sum(x)),
    "max": lambda x: float(max(x)),
    "sorted": lambda x: [float(one) for one in sorted(x, reverse=True)],
    "reversed": lambda x: [float(one) for one in reversed(x)],
    "in": lambda x: (2.0 in x, 9.0 in x),
    "zip": lambda x: [(float(a), b) for a, b in zip(x, range(2), strict=False)],
    "unpacked": lambda x: (lambda first, *rest: (float(first), len(rest)))(*x),
    "random.choice": lambda x: float(random.Random(1).choice(x)),
    "an index of a list": lambda x: [10, 20, 30][x[1].long()],
    "range": lambda x: list(range(x[2].long())),
    "len of an element": lambda x: len(x[0]),
    "element of an element": lambda x: x[0][0],
}


def answer(ask: Callable[[Any], Any], x: Any) -> Any:
    try:
        found = ask(x)
    except (TypeError, ValueError, IndexError) as error:
        return type(error), str(error)
    if isinstance(found, torch.Tensor | np.ndarray):
        return type(found), str(found.dtype), found.tolist()
    return found


@pytest.mark.parametrize("where", ["device", "mesh"])
@pytest.mark.parametrize("name", OF_A_VECTOR)
def test_as_on_the_cpu(name: str, where: str, mesh_2x4: Any) -> None:
    x = torch.arange(4.0)
    ours = x.to("xla") if where == "device" else distribute_tensor(x, mesh_2x4, [Shard(0)] * 2)
    assert answer(OF_A_VECTOR[name], ours) == answer(OF_A_VECTOR[name], x)


def test_a_new_tensor_on_the_device() -> None:
    x = torch.arange(4.0).to("xla")
    made = torch.tensor([x[3], 2.0], device="xla")
    assert made.device.type == "xla" and made.tolist() == [3.0, 2.0]


def test_in_a_compiled_step() -> None:
    """What depends on no input is known there; the rest has no value yet."""
    x = torch.arange(4.0).to("xla")
    known = xd.compile(lambda x: x + torch.tensor([torch.ones(2, device=x.device)[0], 2.0]).sum())
    assert known(x).tolist() == [3.0, 4.0, 5.0, 6.0]
    with pytest.raises(xd.DataDependentError, match="item"):
        xd.compile(lambda x: torch.tensor([x[0], 2.0]))(x)
