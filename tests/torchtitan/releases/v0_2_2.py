"""0.2.2: Llama 3 by ``parallelize_module``, ``loss_parallel`` and ``fully_shard``."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.llama3 import Transformer, llama3_args, parallelize_llama

from tests.torchtitan.plan import Plan

PLANS: dict[str, dict[str, Any]] = {
    "dp4": {"dp_shard": 4},
    "tp4": {"tp": 4},
    "tp4, whole loss": {"tp": 4, "loss": "whole"},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "ddp4": {"dp_replicate": 4},
    "dp2 x tp2": {"dp_shard": 2, "tp": 2},
    "dp2 x tp2, whole loss": {"dp_shard": 2, "tp": 2, "loss": "whole"},
    "dp2 x tp2, full checkpointing": {"dp_shard": 2, "tp": 2, "checkpointing": "full"},
    "dp2 x tp2, selective checkpointing": {"dp_shard": 2, "tp": 2, "checkpointing": "selective"},
    "2x2x2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
}


class _Release:
    """As `after_0_2.Release`, whose methods say what these do."""

    suffix = ", 0.2.2"
    models = {"llama3": ("llama3", {}, PLANS, 1e-5)}
    fast = {("llama3", "2x2x2", how) for how in ("eager", "compiled")}
    backward = contextlib.nullcontext

    def debug_model(self, name: str, layers: int) -> Any:
        assert name == "llama3"
        return dataclasses.replace(llama3_args["debugmodel"], n_layers=layers)

    def vocabulary(self, spec: Any) -> int:
        return spec.vocab_size

    def build(self, spec: Any, plan: Plan) -> Transformer:
        with torch.device("meta"):
            return Transformer(dataclasses.replace(spec, max_seq_len=plan.sequence))

    def dims(self, plan: Plan) -> ParallelDims:
        degrees = {"dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard, "tp": plan.tp}
        return ParallelDims(**degrees, cp=1, pp=1, ep=1, etp=1, world_size=plan.devices)

    def _config(self, plan: Plan) -> JobConfig:
        config = JobConfig()
        config.training.seq_len = plan.sequence
        config.training.mixed_precision_param = "float32"
        config.training.mixed_precision_reduce = "float32"
        config.parallelism.disable_loss_parallel = plan.loss == "whole"
        config.activation_checkpoint.mode = plan.checkpointing  # type: ignore[assignment]
        config.activation_checkpoint.selective_ac_option = "op"
        config.optimizer.lr, config.optimizer.implementation = 1e-3, "foreach"
        config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 2, 0.8
        return config

    def parallelize(self, model: Any, spec: Any, plan: Plan, dims: ParallelDims) -> Any:
        return parallelize_llama(model, dims, self._config(plan))

    def loss(self, plan: Plan, model: Any, spec: Any) -> Any:
        return lambda predictions, labels, valid: cross_entropy_loss(predictions, labels) / valid

    def optimizers(self, models: list[Any], spec: Any, steps: int, dims: Any) -> tuple[Any, Any]:
        config = self._config(Plan())
        optimizers = build_optimizers(models, config.optimizer, dims)
        return optimizers, build_lr_schedulers(optimizers, config.lr_scheduler, steps)

    def context(self, plan: Plan, dims: ParallelDims) -> Any:
        return dist_utils.get_train_context(dims.tp_enabled and plan.loss != "whole")

    def averaged_over(self, plan: Plan) -> int:
        """``apply_fsdp`` turns FSDP's division off, since losses are divided by the tokens of all
        ranks, and ``apply_ddp`` leaves DDP's mean as it is."""
        return plan.dp_replicate if plan.dp_shard == plan.tp == 1 else 1

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def others(self, model: Any, plan: Plan, positions: torch.Tensor) -> dict[str, Any]:
        return {}

    def inputs(self, tokens: Any, labels: Any, others: Any, plan: Plan, dims: Any) -> Any:
        return tokens, labels, others

    def total(self, loss: Any, dims: ParallelDims) -> float:
        with contextlib.suppress(AttributeError):
            loss = loss.full_tensor()  # of sharded classes
        mesh = dims.get_optional_mesh("loss")
        return loss.item() if mesh is None else dist_utils.dist_sum(loss, mesh)

    def on_cpu(self) -> Any:
        return contextlib.nullcontext()

    def on_mesh(self, plan: Plan) -> Any:
        return contextlib.nullcontext()


RELEASE = _Release()
