"""Where attention's backward computes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from xla_dtensor.rules import TensorInfo, infer

# Of [batch, heads, sequence, head].
LAYOUTS = {
    "heads": (Shard(0), Shard(1)),
    "queries": (Shard(0), Shard(2)),
    "batch": (Shard(0), Replicate()),
}
GRADS = {
    "whole": (Replicate(), Replicate()),
    "a sum": (Partial(), Shard(2)),
    "sums": (Partial(), Partial()),
    "of another layout": (Shard(1), Shard(0)),
}
SHAPE = (32, 8, 1024, 128)
MESH = (8, 8)


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["flash_attention_backward", "attention_backward"])
def test_backward_is_where_forward_was(op: str, layout: str, grad: str) -> None:
    """What forward has kept stays where it is, whatever the gradient's layout says."""
    where = LAYOUTS[layout]
    keys = tuple(Replicate() if p == Shard(2) else p for p in where)
    info = lambda placements: TensorInfo(SHAPE, placements, torch.bfloat16)
    given = [info(GRADS[grad]), info(where), info(keys), info(keys)]
    if op == "flash_attention_backward":
        log_sums = TensorInfo(SHAPE[:3], where, torch.float32)
        arguments = (*given, None, info(where), log_sums, None, 0.0, True, 1.0, False)
        expected = [where, where, keys, keys, where, where]
    else:
        arguments = (*given, None, True, None, False)
        expected = [where, where, keys, keys]
    func = getattr(torch.ops.xla_dtensor, op).default
    names = [argument.name for argument in func._schema.arguments]
    assert names[:4] == ["grad_out", "query", "key", "value"]
    shapes = [SHAPE, SHAPE, SHAPE, ()][: len(func._schema.returns)]
    assert len(arguments) == len(names)
    merged = infer(func, arguments, {}, shapes, MESH)
    assert merged is not None
    assert list(merged.inputs) == expected
    of_keys = [Partial() if p == Shard(2) else p for p in where]
    assert [list(p) for p in merged.outputs[:3]] == [list(where), of_keys, of_keys]
