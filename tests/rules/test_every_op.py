"""Rules meet torch's own sample inputs: each call they speak for, they speak of sensibly."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from xla_dtensor.rules import TensorInfo, infer

with warnings.catch_warnings():
    # Torch's test helpers look for hypothesis, which nothing here needs.
    warnings.simplefilter("ignore", ImportWarning)
    from torch.testing._internal.common_methods_invocations import op_db

MESH = (2, 2)
SAMPLES = 2

OPS = [
    op
    for op in op_db
    if torch.float32 in op.dtypes
    # Sparse tensors are none of DTensor's business.
    and "sparse" not in op.name
    and "_segment_reduce" not in op.name
    and "jiterator" not in op.name
]


class _InferEveryCall(TorchDispatchMode):
    """Ask for the layouts of every op that runs, its arguments laid out at random."""

    def __init__(self, seed: str) -> None:
        super().__init__()
        self.rng = random.Random(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info_args, info_kwargs = tree_map_only(torch.Tensor, self._laid_out, (args, kwargs))
        result = func(*args, **kwargs)
        leaves = tree_leaves(result, is_leaf=lambda leaf: leaf is None)
        shapes = [
            None if leaf is None else tuple(leaf.shape)
            for leaf in leaves
            if leaf is None or isinstance(leaf, torch.Tensor)
        ]
        asked = any(isinstance(leaf, TensorInfo) for leaf in tree_leaves((info_args, info_kwargs)))
        if asked and all(leaf.layout == torch.strided for leaf in _tensors(args, kwargs, result)):
            merged = infer(func, info_args, info_kwargs, shapes, MESH)
            if merged is not None:
                assert len(merged.outputs) == len(shapes)
        return result

    def _laid_out(self, tensor: torch.Tensor) -> TensorInfo:
        shards = [Shard(d) for d in range(tensor.ndim)]
        choices: list[Placement] = [Replicate(), *shards, *shards, Partial()]
        placements = tuple(self.rng.choice(choices) for _ in MESH)
        return TensorInfo(tuple(tensor.shape), placements, tensor.dtype)


def _tensors(*tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("op", OPS[::11], ids=lambda op: op.formatted_name)
def test_no_rule_fails(op: Any) -> None:
    with warnings.catch_warnings():
        # The ops and their samples warn of their own deprecations.
        warnings.simplefilter("ignore")
        samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
        for _, sample in zip(range(SAMPLES), samples, strict=False):
            with _InferEveryCall(op.formatted_name):
                result = op(sample.input, *sample.args, **sample.kwargs)
                wanted = [t for t in _tensors(result) if t.requires_grad]
                inputs = _tensors(sample.input, sample.args, sample.kwargs)
                leaves = [t for t in inputs if t.requires_grad]
                if wanted and leaves:
                    grads = [torch.ones_like(t) for t in wanted]
                    torch.autograd.grad(wanted, leaves, grads, allow_unused=True)
