"""The dense plans that are compared with one process on the CPU."""

from __future__ import annotations

from typing import Any

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
