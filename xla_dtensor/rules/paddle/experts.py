"""Rules of mixtures of experts, as Paddle has them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from xla_dtensor.rules.alternatives import Alternative, Merged
from xla_dtensor.rules.call import Call
from xla_dtensor.rules.paddle.composed import R, composed
from xla_dtensor.rules.registry import replicate_rule


def _data_parallel(call: Call) -> Merged:
    """the first dim of every tensor"""
    outputs = tuple(Shard(0) if shape else R for shape in call.out_shapes)
    return call.merge(
        [Alternative(outputs, tuple(Shard(0) if t.ndim else R for t in call.tensors))]
    )


def _copies(inputs: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in inputs]


for _name, _rule in {
    "default_data_parallel": _data_parallel,
    "default_": replicate_rule,
    "replicated": replicate_rule,
}.items():
    composed(f"{_name}(Tensor[] inputs) -> Tensor[]", _rule)(_copies)


def _gate_dispatch(call: Call) -> Merged:
    """s! h, s! e! -> e! c! h, s! k!, k! s!, e!, s! k!"""
    # Which slot of an expert a token gets depends on the tokens before it.
    return call.merge([Alternative((Shard(2), R, R, R, R), (Shard(1), R))])


@composed(
    "moe_gate_dispatch(Tensor x, Tensor gate_logits, int k, int capacity)"
    " -> (Tensor y, Tensor weights, Tensor scatter_index, Tensor offset, Tensor expert_id)",
    _gate_dispatch,
)
def moe_gate_dispatch(x: Tensor, gate_logits: Tensor, k: int, capacity: int) -> tuple[Tensor, ...]:
    (tokens, hidden), experts = x.shape, gate_logits.shape[-1]

    def index(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.int32)

    slots = x.new_empty(experts, capacity, hidden)
    return slots, x.new_empty(tokens, k), index(k, tokens), index(experts), index(tokens, k)


@composed(
    "moe_combine(Tensor x, Tensor combine_weights, Tensor scatter_index) -> Tensor",
    "slot! h, s k!, k! s -> s h",
)
def moe_combine(x: Tensor, combine_weights: Tensor, scatter_index: Tensor) -> Tensor:
    return (x[scatter_index.mT] * combine_weights.unsqueeze(-1)).sum(1)
