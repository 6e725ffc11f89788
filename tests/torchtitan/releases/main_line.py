"""The main line: streams of tokens, documents packed in a row, and the backends ``spmd_types``,
the default, and ``partial_dtensor``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import spmd_types
import torch
from torch.nn.attention.flex_attention import AuxOutput, create_mask
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from tests.torchtitan.plan import Plan
from tests.torchtitan.releases.after_0_2 import Release

FLEX = {"attention": "flex"}
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
    "pp2 x dp2": {"pp": 2, "dp_shard": 2, "micro_batches": 2},
    "pp2 x dp2 x tp2": {"pp": 2, "dp_shard": 2, "tp": 2, "micro_batches": 2},
}
for _name in ("dp2 x tp2, chunked loss", "dp2 x cp2"):
    DENSE[f"{_name}, checked"] = {**DENSE[_name], "checked": True}
DENSE = {name: {**about, **FLEX} for name, about in DENSE.items()}
SOME = {name: DENSE[name] for name in ("dp4", "tp4", "dp2 x tp2", "dp2 x cp2")}

# Mixture-of-experts models. With "ep" each device has some of the experts.
SHORT = {"sequence": 16, **FLEX}
EXPERTS: dict[str, dict[str, Any]] = {
    "dp4": {"dp_shard": 4, **SHORT},
    "dp2 x tp2": {"dp_shard": 2, "tp": 2, **SHORT},
    "dp4, ep2": {"dp_shard": 4, "ep": 2, **SHORT},
    "dp2 x tp2, ep2": {"dp_shard": 2, "tp": 2, "ep": 2, **SHORT},
    "dp2 x tp2, ep4": {"dp_shard": 2, "tp": 2, "ep": 4, **SHORT},
    "dp2 x tp2, ep4, checked": {"dp_shard": 2, "tp": 2, "ep": 4, "checked": True, **SHORT},
}
# With what else torchtitan's own integration tests run these models: each has some of it.
CP = {"cp": 2, "sequence": 256, **FLEX}
PP = {"pp": 2, "micro_batches": 2}
BY_MODEL: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {"dp2 x tp2 x cp2": {"dp_shard": 2, "tp": 2, **CP}},
    "qwen3 MoE": {"pp2 x dp2, ep2": {**PP, "dp_shard": 2, "ep": 2, **SHORT}},
    "deepseek_v3": {
        "hsdp 2x2, ep2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2, **SHORT},
        "pp2 x dp2 x tp2, ep4": {**PP, "dp_shard": 2, "tp": 2, "ep": 4, **SHORT},
    },
    "gpt_oss": {
        "dp4 x tp2, ep4": {"dp_shard": 4, "tp": 2, "ep": 4, **SHORT},
        "dp2 x cp2, ep4": {"dp_shard": 2, "ep": 4, **CP},
        "pp2 x dp2 x cp2, ep4": {**PP, "dp_shard": 2, "ep": 4, **CP},
    },
}

_experts = GptOssGroupedExperts.forward


def _in_dtype_of_input(self: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return _experts(self, rows, counts).type_as(rows)


@contextlib.contextmanager
def _float32_gpt_oss() -> Iterator[None]:
    """gpt_oss's experts give bfloat16 whatever the model's dtype, and its sum of float32 refuses
    that; the other models' experts give what they got."""
    with mock.patch.object(GptOssGroupedExperts, "forward", _in_dtype_of_input):
        yield


class _Release(Release):
    suffix = ", main"
    models = {
        "llama3": ("llama3", {}, DENSE, 1e-5),
        "qwen3": ("qwen3", {}, SOME, 1e-5),
        "qwen3 MoE": ("qwen3", {"flavor": "debugmodel_moe"}, EXPERTS, 5e-3),
        "deepseek_v3": ("deepseek_v3", {}, EXPERTS, 5e-3),
        "gpt_oss": ("gpt_oss", {"attn_backend": "flex"}, EXPERTS, 5e-3),
    }
    models = {
        name: (module, about, plans | BY_MODEL.get(name, {}), limit)
        for name, (module, about, plans, limit) in models.items()
    }
    # Those that together reach everything; all of them are slow, or rows of the table.
    fast = {
        ("llama3", "dp2 x tp2, chunked loss", "eager"),
        ("llama3", "dp2 x tp2", "compiled"),
        ("llama3", "dp2 x cp2", "eager"),
        ("llama3", "dp2 x tp2, chunked loss, checked", "eager"),
        ("deepseek_v3", "dp4, ep2", "compiled"),
        ("gpt_oss", "dp2 x tp2, ep4", "eager"),
    }
    backend = "spmd_types"
    backward = staticmethod(spmd_types.no_typecheck)

    def configure(self, config: Any, plan: Plan) -> None:
        for layer in config.layers:  # as the trainer, of its longest document
            if layer.attention is not None:
                rope = layer.attention.rope
                layer.attention.rope = dataclasses.replace(rope, max_context_length=plan.sequence)

    def plain_loss(self, spec: Any) -> Any:
        return CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)

    def context(self, plan: Plan, dims: ParallelDims) -> Any:
        if plan.devices == 1:
            return contextlib.nullcontext
        return dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=plan.checked)

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten()

    def inputs(self, tokens: Any, labels: Any, others: Any, plan: Plan, dims: ParallelDims) -> Any:
        given = super().inputs(tokens, labels, others, plan, dims)
        if dims.spmd_backend == "spmd_types":
            return annotate_input_spmd_types(dims, *given)
        return given

    def attend(
        self, q: Any, k: Any, v: Any, *, score_mod: Any, block_mask: Any, scale: Any, **about: Any
    ) -> Any:
        assert score_mod is None
        shape = q.shape[0], None, q.shape[2], k.shape[2]
        mask = create_mask(block_mask.mask_mod, *shape, device="cpu")
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v, AuxOutput(lse=scores.logsumexp(-1))

    @contextlib.contextmanager
    def on_cpu(self) -> Iterator[None]:
        with super().on_cpu(), _float32_gpt_oss():
            yield

    @contextlib.contextmanager
    def on_mesh(self, plan: Plan) -> Iterator[None]:
        with super().on_mesh(plan), _float32_gpt_oss():
            yield


RELEASE = _Release()
