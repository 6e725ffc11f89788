"""``scan``: calls a function on each slice along tensors' first dim, carrying a state along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xla_dtensor.base.torch_private import pytree
from xla_dtensor.compat.torch_xla.errors import SpmdError


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Any = None,
    is_fn_pure: bool = False,
) -> tuple[Any, Any]:
    """``carry, y = fn(carry, x)`` for each ``x`` along the first dim of ``xs``; differentiable.

    The calls come one after another, in a compiled step as well: its program has ``fn`` as many
    times as ``xs`` is long.

    Args:
        fn: of two trees of tensors, gives two.
        init: the first carry.
        xs: a tree of tensors with a first dim of one size.
        partition_fn, is_fn_pure: torch_xla's; no effect.

    Returns:
        the last carry, and the trees of ``y`` with their tensors stacked.

    Raises:
        SpmdError: ``xs`` has no tensors, or first dims of several sizes, or of 0.

    Example::

        import torch
        from xla_dtensor.compat.torch_xla.experimental.scan import scan

        def add(total, x):
            return total + x, total + x

        last, sums = scan(add, torch.zeros(1, device="xla"), torch.ones(3, 1, device="xla"))
        assert last.tolist() == [3] and sums.tolist() == [[1], [2], [3]]
    """
    leaves, structure = pytree.tree_flatten(xs)
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if len(sizes) != 1 or sizes == {0}:
        raise SpmdError(
            f"scan over tensors of shapes {[list(getattr(x, 'shape', ())) for x in leaves]}: they "
            "need a first dim of one size, 1 or more"
        )
    carry, results = init, []
    for i in range(sizes.pop()):
        carry, result = fn(carry, pytree.tree_unflatten([leaf[i] for leaf in leaves], structure))
        results.append(result)
    flat = [pytree.tree_flatten(result) for result in results]
    stacked = [torch.stack(values) for values in zip(*(leaves for leaves, _ in flat), strict=True)]
    return carry, pytree.tree_unflatten(stacked, flat[0][1])
