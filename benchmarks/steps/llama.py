"""The model of examples/train_llama, FSDP x TP on a 2x4 mesh."""

from __future__ import annotations

import data
import sharding
import torch
from jax import Array
from jax.sharding import PartitionSpec as P
from model import Llama, ModelConfig, next_token_loss
from torch import Tensor, nn

from steps import jax_llama
from steps.case import Batch, Case
from steps.jax_training import AdamW, Params

CONFIG = ModelConfig(dim=256, layers=4, heads=8, kv_heads=4, max_seq=128)
BATCH = 8
MESH_NAMES = ("dp", "tp")
LR = 3e-3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Llama(CONFIG)


def batches_of_text(count: int, batch: int, config: ModelConfig) -> list[Batch]:
    text, _ = data.load()
    stream = data.Batches(text, batch, config.max_seq, seed=0)
    return [next(stream) for _ in range(count)]


def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return next_token_loss(model(tokens), targets)


def jax_loss(
    params: Params, buffers: Params, tokens_BS: Array, targets_BS: Array
) -> tuple[Array, Params]:
    logits_BSV = jax_llama.logits(params, tokens_BS, CONFIG)
    return jax_llama.next_token_loss(logits_BSV, targets_BS), {}


def param_spec(name: str) -> P:
    """As examples/train_llama/sharding.py has it."""
    dims = sharding.weight_dims(name)
    if dims is None:
        return P()
    entries: list[tuple[str, ...]] = [(), ()]
    for mesh_dim, dim in zip(MESH_NAMES, dims, strict=True):
        entries[dim] += (mesh_dim,)
    return P(*(entry or None for entry in entries))


CASE = Case(
    mesh_shape=(2, 4),
    mesh_names=MESH_NAMES,
    make_model=make_model,
    make_batches=lambda count: batches_of_text(count, BATCH, CONFIG),
    loss=loss,
    shard_model=sharding.shard_model,
    shard_batch=sharding.shard_batch,
    make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
    jax_loss=jax_loss,
    jax_optimizer=AdamW(LR),
    param_spec=param_spec,
    batch_spec=P("dp"),
    max_norm=1.0,
)
