"""What 0.3.0 and the main line have in common."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention

from tests.torchtitan.plan import Plan

CHECKPOINTING = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}


@dataclasses.dataclass
class _Config:
    """What a model's config reads of a trainer's."""

    parallelism: ParallelismConfig


class Release:
    """How a release's parts are called.

    Attributes:
        suffix: of models' names in the table.
        models: by their names in the table the registry's module, what ``model_registry`` is told,
            plans, and how far a loss may be: 1e-5 for dense models, 5e-3 for experts, which
            torchtitan computes in bfloat16.
        fast: of these, with "eager" or "compiled", what isn't slow.
        backend: ``spmd_backend``, where a plan names none.
    """

    suffix: str
    models: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]], float]]
    fast: set[tuple[str, str, str]]
    backend: str
    backward: Any = contextlib.nullcontext

    def debug_model(self, name: str, layers: int | None = None, **about: Any) -> Any:
        """torchtitan's published model of a name; its first ``layers``."""
        module = importlib.import_module(f"torchtitan.models.{name}")
        spec = module.model_registry(about.pop("flavor", "debugmodel"), **about)
        spec.model.layers = spec.model.layers[:layers]
        return spec

    def vocabulary(self, spec: Any) -> int:
        """How many tokens there are."""
        return spec.model.vocab_size

    def parallelism(self, plan: Plan) -> ParallelismConfig:
        """torchtitan's config."""
        return ParallelismConfig(
            data_parallel_replicate_degree=plan.dp_replicate,
            data_parallel_shard_degree=plan.dp_shard,
            context_parallel_degree=plan.cp,
            tensor_parallel_degree=plan.tp,
            expert_parallel_degree=plan.ep,
            spmd_backend=plan.backend or self.backend,
            enable_sequence_parallel=plan.sequence_parallel,
            context_parallel_load_balancer=plan.balancer,
        )

    def dims(self, plan: Plan) -> ParallelDims:
        """The mesh's dimensions, without a mesh as yet."""
        return ParallelDims.from_config(self.parallelism(plan), plan.devices)

    def configure(self, config: Any, plan: Plan) -> None:
        """What the trainer, or the user, changes in a model's config."""
        raise NotImplementedError

    def build(self, spec: Any, plan: Plan) -> Any:
        """The model on the meta device, as the trainer builds it."""
        config = copy.deepcopy(spec.model)
        self.configure(config, plan)
        config.update_from_config(config=_Config(self.parallelism(plan)))
        with torch.device("meta"):
            return config.build()

    def parallelize(self, model: Any, spec: Any, plan: Plan, dims: ParallelDims) -> Any:
        """By torchtitan's ``parallelize_fn``."""
        dtypes = {"mixed_precision_param": "float32", "mixed_precision_reduce": "float32"}
        return spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=TrainingConfig(**dtypes),
            parallelism=self.parallelism(plan),
            compile_config=CompileConfig(),
            ac_config=CHECKPOINTING[plan.checkpointing],
            dump_folder="",
        )

    def plain_loss(self, spec: Any) -> Any:
        """The config of the loss."""
        return CrossEntropyLoss.Config()

    def loss(self, plan: Plan, model: Any, spec: Any) -> Any:
        """Of predictions, labels and the number of tokens that count."""
        config = self.plain_loss(spec)
        if plan.loss == "chunked":
            config = ChunkedLossWrapper.Config(loss_fn=config, num_chunks=4)
        loss = config.build(compile_config=None)
        if plan.loss == "chunked":
            loss.set_lm_head(model.lm_head)
            model._skip_lm_head = True
        return lambda predictions, labels, valid: loss(predictions, labels, valid)[0]

    def optimizers(self, models: list[Any], spec: Any, steps: int, dims: Any) -> tuple[Any, Any]:
        """Them and their schedules."""
        optimizers = default_adamw(lr=1e-3).build(model_parts=models)
        config = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8)
        schedulers = config.build(optimizers=optimizers, training_steps=steps)
        if spec.post_optimizer_build_fn is not None:  # experts' load is balanced
            spec.post_optimizer_build_fn(optimizers, models, dims)
        return optimizers, schedulers

    def context(self, plan: Plan, dims: ParallelDims) -> Any:
        """What forward and backward run in."""
        return contextlib.nullcontext

    def averaged_over(self, plan: Plan) -> int:
        """What gradients are divided by."""
        return 1

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """A batch's rows, as a model takes them."""
        return tensor

    def others(self, model: Any, plan: Plan, positions: torch.Tensor) -> dict[str, Any]:
        """What a model takes beside tokens."""
        others: dict[str, Any] = {"positions": positions}
        if plan.attention == "flex":
            others["attention_masks"] = model.get_attention_masks(positions=positions)
        return others

    def inputs(self, tokens: Any, labels: Any, others: Any, plan: Plan, dims: ParallelDims) -> Any:
        """A batch as the trainer hands it to the model."""
        if plan.cp == 1:
            return tokens, labels, others
        mesh, device = dims.get_mesh("cp"), torch.device("xla")
        return prepare_context_parallel_input(tokens, labels, others, mesh, device, plan.balancer)

    def total(self, loss: Any, dims: ParallelDims) -> float:
        """The loss of the whole batch."""
        return dist_utils.dist_sum(loss, dims.get_optional_mesh("loss"))

    def attend(self, q: Any, k: Any, v: Any, **about: Any) -> Any:
        """What flex_attention gives, of which torch has no gradient on the CPU."""
        raise NotImplementedError

    @contextlib.contextmanager
    def dense_attention(self) -> Iterator[None]:
        """torchtitan's flex attention on the CPU, without Inductor (it wants a C++ compiler)."""
        mask = mock.patch.object(attention, "_compiled_create_block_mask", create_block_mask)
        with mask, mock.patch.object(FlexAttention, "_compiled_flex_attn", self.attend):
            yield

    @contextlib.contextmanager
    def with_backend(self, name: str) -> Iterator[None]:
        """torchtitan's ``spmd_backend``, which is the process's."""
        before = dist_utils.get_spmd_backend()
        dist_utils.set_spmd_backend(name or self.backend)
        try:
            yield
        finally:
            dist_utils.set_spmd_backend(before)

    @contextlib.contextmanager
    def on_cpu(self) -> Iterator[None]:
        """A run in one process."""
        with self.dense_attention(), self.with_backend(self.backend):
            yield

    @contextlib.contextmanager
    def on_mesh(self, plan: Plan) -> Iterator[None]:
        """A run on a mesh."""
        with self.with_backend(plan.backend):
            yield
