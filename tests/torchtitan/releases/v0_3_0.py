"""0.3.0: batches of rows, and the backends ``partial_dtensor`` and ``full_dtensor``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_mask
from torchtitan.distributed import ParallelDims, full_dtensor
from torchtitan.models.common.attention import ScaledDotProductAttention

from tests.torchtitan.plan import Plan
from tests.torchtitan.releases.after_0_2 import Release

FULL = {"backend": "full_dtensor"}
CHUNKED = {"loss": "chunked"}
FLEX = {"attention": "flex"}

# By name, as the table in docs/torchtitan.md has them; losses are vocab-parallel wherever tp is.
DENSE: dict[str, dict[str, Any]] = {
    "dp4": {"dp_shard": 4},
    "dp4, full_dtensor": {"dp_shard": 4, **FULL},
    "tp4": {"tp": 4},
    "tp4, full_dtensor": {"tp": 4, **FULL},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "hsdp 2x2, full_dtensor": {"dp_replicate": 2, "dp_shard": 2, **FULL},
    "dp2 x tp2": {"dp_shard": 2, "tp": 2},
    "dp2 x tp2, full_dtensor": {"dp_shard": 2, "tp": 2, **FULL},
    "dp2 x tp2, no sequence parallelism": {"dp_shard": 2, "tp": 2, "sequence_parallel": False},
    "dp2 x tp2, no sequence parallelism, full_dtensor": {
        "dp_shard": 2,
        "tp": 2,
        "sequence_parallel": False,
        **FULL,
    },
    "2x2x2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "2x2x2, full_dtensor": {"dp_replicate": 2, "dp_shard": 2, "tp": 2, **FULL},
    "dp2 x cp2": {"dp_shard": 2, "cp": 2},
    "dp2 x cp2, flex": {"dp_shard": 2, "cp": 2, **FLEX, "sequence": 256},
    "dp2 x cp2, flex, full_dtensor": {"dp_shard": 2, "cp": 2, **FLEX, "sequence": 256, **FULL},
    "dp2 x cp2, flex, head and tail": {
        "dp_shard": 2,
        "cp": 2,
        "sequence": 256,
        "balancer": "headtail",
        **FLEX,
    },
    "dp2 x tp2, flex": {"dp_shard": 2, "tp": 2, **FLEX},
    "dp2 x tp2, chunked loss": {"dp_shard": 2, "tp": 2, **CHUNKED},
    "dp2 x tp2, chunked loss, full_dtensor": {"dp_shard": 2, "tp": 2, **CHUNKED, **FULL},
    "dp2 x tp2, full checkpointing": {"dp_shard": 2, "tp": 2, "checkpointing": "full"},
    "dp2 x tp2, selective checkpointing": {"dp_shard": 2, "tp": 2, "checkpointing": "selective"},
    "dp2 x tp2, selective checkpointing, full_dtensor": {
        "dp_shard": 2,
        "tp": 2,
        "checkpointing": "selective",
        **FULL,
    },
    "dp2 x tp2, 2 micro-batches": {"dp_shard": 2, "tp": 2, "micro_batches": 2},
    "dp2 x tp2, 2 micro-batches, full_dtensor": {
        "dp_shard": 2,
        "tp": 2,
        "micro_batches": 2,
        **FULL,
    },
}

# Mixture-of-experts models. With "ep" each device has some of the experts.
SHORT = {"sequence": 16}
EXPERTS: dict[str, dict[str, Any]] = {
    "dp4": {"dp_shard": 4, **SHORT},
    "dp4, full_dtensor": {"dp_shard": 4, **FULL, **SHORT},
    "dp4, ep2": {"dp_shard": 4, "ep": 2, **SHORT},
    "dp4, ep4": {"dp_shard": 4, "ep": 4, **SHORT},
    "dp2 x tp2, ep2": {"dp_shard": 2, "tp": 2, "ep": 2, **SHORT},
    "dp2 x tp2, ep4": {"dp_shard": 2, "tp": 2, "ep": 4, **SHORT},
    "dp2 x tp2, ep4, full_dtensor": {"dp_shard": 2, "tp": 2, "ep": 4, **FULL, **SHORT},
}


class _Release(Release):
    suffix = ""
    models = {
        "llama3": ("llama3", {}, DENSE, 1e-5),
        "qwen3 MoE": ("qwen3", {"flavor": "debugmodel_moe"}, EXPERTS, 5e-3),
        "deepseek_v3": ("deepseek_v3", {}, EXPERTS, 5e-3),
    }
    # Those that together reach everything; all of them are slow, or rows of the table.
    fast = {
        *(
            ("llama3", plan, how)
            for plan in ("dp2 x tp2, chunked loss", "2x2x2, full_dtensor", "dp2 x cp2, flex")
            for how in ("eager", "compiled")
        ),
        ("deepseek_v3", "dp2 x tp2, ep4", "compiled"),
    }
    backend = "partial_dtensor"

    def configure(self, config: Any, plan: Plan) -> None:
        for layer in config.layers:
            own = layer.attention
            if plan.attention == "sdpa":
                own.inner_attention = ScaledDotProductAttention.Config()
            own.rope = dataclasses.replace(own.rope, max_seq_len=plan.sequence)

    def inputs(self, tokens: Any, labels: Any, others: Any, plan: Plan, dims: ParallelDims) -> Any:
        given = super().inputs(tokens, labels, others, plan, dims)
        if plan.backend == "full_dtensor":
            return full_dtensor.parallelize_inputs(dims, *given)
        return given

    def total(self, loss: Any, dims: ParallelDims) -> float:
        if dims.spmd_backend == "full_dtensor":
            return float(loss.full_tensor().item())
        return super().total(loss, dims)

    def attend(
        self, q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: Any, **about: Any
    ) -> Any:
        shape = q.shape[0], None, q.shape[2], k.shape[2]
        mask = create_mask(block_mask.mask_mod, *shape, device="cpu")
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


RELEASE = _Release()
