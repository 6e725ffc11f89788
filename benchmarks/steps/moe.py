"""A Llama whose feed-forward is a mixture of experts, which live on devices of their own.

Each token goes to the two experts that its router likes best; an expert takes so many tokens of a
sequence and no more (GShard, Lepikhin et al. 2020: dispatch and combine as products with a mask).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from jax import Array
from jax.sharding import PartitionSpec as P
from model import Llama, ModelConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from steps import jax_llama
from steps.case import Case
from steps.jax_training import AdamW, Params
from steps.llama import batches_of_text, loss

CONFIG = ModelConfig(dim=256, layers=2, heads=8, kv_heads=4, max_seq=128)
EXPERTS, TAKEN, HIDDEN = 8, 2, 256
CAPACITY = math.ceil(1.25 * TAKEN * CONFIG.max_seq / EXPERTS)
BATCH = 16
LR = 3e-3


def _as_it_is(x: Tensor) -> Tensor:
    return x


class Experts(nn.Module):
    """Dims: B batch, S sequence, D model, E experts, C capacity, F hidden, K experts of a token."""

    def __init__(self) -> None:
        super().__init__()
        D, E, F = CONFIG.dim, EXPERTS, HIDDEN
        self.router = nn.Linear(D, E, bias=False)
        self.w1 = nn.Parameter(torch.randn(E, D, F) / D**0.5)
        self.w2 = nn.Parameter(torch.randn(E, F, D) / F**0.5)
        # What the sharded model does with what experts get and give.
        self.to_experts: Callable[[Tensor], Tensor] = _as_it_is
        self.to_tokens: Callable[[Tensor], Tensor] = _as_it_is

    def forward(self, x_BSD: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        weight_BSK, expert_BSK = F.softmax(self.router(x_BSD), -1).topk(TAKEN)
        # The first choices of all tokens stand in the queues of experts before the second ones.
        chosen_BKSE = F.one_hot(expert_BSK, EXPERTS).transpose(1, 2)
        place_BKSE = chosen_BKSE.reshape(B, TAKEN * S, EXPERTS).cumsum(1).view_as(chosen_BKSE) - 1
        place_BKS = (place_BKSE * chosen_BKSE).sum(-1)
        kept_BKS = (place_BKS < CAPACITY).to(x_BSD.dtype)
        slot_BKSC = F.one_hot(place_BKS.clamp(max=CAPACITY - 1), CAPACITY).to(x_BSD.dtype)
        gate_BKS = weight_BSK.transpose(1, 2) * kept_BKS
        chosen = chosen_BKSE.to(x_BSD.dtype)
        dispatch = torch.einsum("bkse,bksc->bsec", chosen * kept_BKS[..., None], slot_BKSC)
        combine = torch.einsum("bkse,bksc->bsec", chosen * gate_BKS[..., None], slot_BKSC)
        taken_EBCD = self.to_experts(torch.einsum("bsec,bsd->ebcd", dispatch, x_BSD))
        hidden = F.silu(torch.einsum("ebcd,edf->ebcf", taken_EBCD, self.w1))
        given_EBCD = self.to_tokens(torch.einsum("ebcf,efd->ebcd", hidden, self.w2))
        return torch.einsum("bsec,ebcd->bsd", combine, given_EBCD)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = Llama(CONFIG)
    for layer in model.layers:
        layer.feed_forward = Experts()
    return model


def shard_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Experts over "ep"; everything else over both dims, as FSDP has it."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if isinstance(module, Experts):
                where = [Replicate(), Shard(0)]
            elif param.ndim > 1:
                where = [Shard(0), Shard(0)]
            else:
                where = [Replicate(), Replicate()]
            sharded = distribute_tensor(param.data, mesh, where)
            module.register_parameter(name, nn.Parameter(sharded))
        for name, buffer in list(module.named_buffers(recurse=False)):
            whole = distribute_tensor(buffer, mesh, [Replicate(), Replicate()])
            setattr(module, name, whole)
        if isinstance(module, Experts):
            module.to_experts = lambda x_EBCD: x_EBCD.redistribute(placements=[Shard(1), Shard(0)])
            module.to_tokens = lambda x_EBCD: x_EBCD.redistribute(placements=[Shard(1), Shard(1)])
    return model


# --- the same in JAX --------------------------------------------------------------------------


def _to_experts(x_EBCD: Array) -> Array:
    return jax.lax.with_sharding_constraint(x_EBCD, P("ep", "dp"))


def _to_tokens(x_EBCD: Array) -> Array:
    # Said twice, because the gradient turns the other way round and is asked for the same.
    return jax.lax.with_sharding_constraint(_to_experts(x_EBCD), P(None, ("dp", "ep")))


def jax_experts(
    params: Params,
    name: str,
    x_BSD: Array,
    to_experts: Callable[[Array], Array] = _to_experts,
    to_tokens: Callable[[Array], Array] = _to_tokens,
) -> Array:
    B, S, _ = x_BSD.shape
    probs_BSE = jax.nn.softmax(x_BSD @ params[f"{name}.router.weight"].T)
    weight_BSK, expert_BSK = jax.lax.top_k(probs_BSE, TAKEN)
    chosen_BKSE = jax.nn.one_hot(expert_BSK, EXPERTS, dtype=jnp.int32).swapaxes(1, 2)
    queued = jnp.cumsum(chosen_BKSE.reshape(B, TAKEN * S, EXPERTS), 1)
    place_BKS = jnp.sum((queued.reshape(chosen_BKSE.shape) - 1) * chosen_BKSE, -1)
    kept_BKS = place_BKS < CAPACITY
    slot_BKSC = jax.nn.one_hot(place_BKS, CAPACITY)  # none where there is no place
    chosen = chosen_BKSE.astype(x_BSD.dtype)
    gate_BKS = weight_BSK.swapaxes(1, 2) * kept_BKS
    dispatch = jnp.einsum("bkse,bksc->bsec", chosen * kept_BKS[..., None], slot_BKSC)
    combine = jnp.einsum("bkse,bksc->bsec", chosen * gate_BKS[..., None], slot_BKSC)
    taken_EBCD = to_experts(jnp.einsum("bsec,bsd->ebcd", dispatch, x_BSD))
    hidden = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", taken_EBCD, params[f"{name}.w1"]))
    given_EBCD = to_tokens(jnp.einsum("ebcf,efd->ebcd", hidden, params[f"{name}.w2"]))
    return jnp.einsum("bsec,ebcd->bsd", combine, given_EBCD)


def jax_loss(
    params: Params, buffers: Params, tokens_BS: Array, targets_BS: Array
) -> tuple[Array, Params]:
    logits_BSV = jax_llama.logits(params, tokens_BS, CONFIG, jax_experts)
    return jax_llama.next_token_loss(logits_BSV, targets_BS), {}


def param_spec(name: str) -> P:
    if name.endswith((".w1", ".w2")):
        return P("ep")
    return P() if "norm" in name else P(("dp", "ep"))


CASE = Case(
    mesh_shape=(2, 4),
    mesh_names=("dp", "ep"),
    make_model=make_model,
    make_batches=lambda count: batches_of_text(count, BATCH, CONFIG),
    loss=loss,
    shard_model=shard_model,
    shard_batch=lambda tensor, mesh: distribute_tensor(tensor, mesh, [Shard(0), Shard(0)]),
    make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=LR),
    jax_loss=jax_loss,
    jax_optimizer=AdamW(LR),
    param_spec=param_spec,
    batch_spec=P(("dp", "ep")),
    max_norm=1.0,
)
