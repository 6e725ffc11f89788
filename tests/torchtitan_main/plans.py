"""The plans of torchtitan's main line that are compared with one process on the CPU."""

from __future__ import annotations

from typing import Any

PARTIAL = {"backend": "partial_dtensor"}

# By name, as the table in docs/torchtitan.md has them; losses are vocab-parallel wherever tp is.
DENSE: dict[str, dict[str, Any]] = {
    "dp4": {"dp_shard": 4},
    "tp4": {"tp": 4},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "dp2 x tp2": {"dp_shard": 2, "tp": 2},
    "dp2 x tp2, partial_dtensor": {"dp_shard": 2, "tp": 2, **PARTIAL},
    "dp2 x tp2, no sequence parallelism": {"dp_shard": 2, "tp": 2, "sequence_parallel": False},
    "2x2x2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "dp2 x cp2": {"dp_shard": 2, "cp": 2, "sequence": 256},
    "dp2 x cp2, head and tail": {"dp_shard": 2, "cp": 2, "sequence": 256, "balancer": "headtail"},
    "dp2 x tp2, chunked loss": {"dp_shard": 2, "tp": 2, "loss": "chunked"},
    "dp2 x tp2, full checkpointing": {"dp_shard": 2, "tp": 2, "checkpointing": "full"},
    "dp2 x tp2, selective checkpointing": {"dp_shard": 2, "tp": 2, "checkpointing": "selective"},
    "dp2 x tp2, 2 micro-batches": {"dp_shard": 2, "tp": 2, "micro_batches": 2},
}
SOME = {name: DENSE[name] for name in ("dp4", "tp4", "dp2 x tp2", "dp2 x cp2")}

# Mixture-of-experts models. With "ep" each device has some of the experts.
SHORT = {"sequence": 16}
EXPERTS: dict[str, dict[str, Any]] = {
    "dp4": {"dp_shard": 4, **SHORT},
    "dp2 x tp2": {"dp_shard": 2, "tp": 2, **SHORT},
    "dp4, ep2": {"dp_shard": 4, "ep": 2, **SHORT},
    "dp2 x tp2, ep2": {"dp_shard": 2, "tp": 2, "ep": 2, **SHORT},
    "dp2 x tp2, ep4": {"dp_shard": 2, "tp": 2, "ep": 4, **SHORT},
}
