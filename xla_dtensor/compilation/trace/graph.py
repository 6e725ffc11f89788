"""Iterates over the autograd nodes behind tensors, each once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from xla_dtensor.base.torch_private.attributes import sequence_number_of


def nodes_of(tensors: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """The nodes of the tensors' history: (number, node), each once."""
    seen: set[int] = set()
    stack = [t.grad_fn if isinstance(t, torch.Tensor) else t.node for t in tensors]
    while stack:
        node = stack.pop()
        if node is None:
            continue
        number = sequence_number_of(node)
        # AccumulateGrad nodes, of leaves, all have the number 2**64 - 1.
        if number in seen or number >= 2**63:
            continue
        seen.add(number)
        yield number, node
        stack += [n for n, _ in node.next_functions]
