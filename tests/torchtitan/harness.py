"""torchtitan's models, trained by its own parts on one mesh or another and on the CPU."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, full_dtensor
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

import xla_dtensor as xd

BATCH = 8
"""Rows of the whole batch, whatever the mesh."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model is parallelized and trained, in torchtitan's words.

    Attributes:
        dp_replicate, dp_shard, cp, tp, ep: degrees.
        backend: ``spmd_backend``.
        sequence_parallel: ``enable_sequence_parallel``.
        loss: "plain" or "chunked"; both are vocab-parallel with ``tp``.
        checkpointing: of activations: "none", "full" or "selective".
        micro_batches: gradient accumulation steps.
        attention: "sdpa" or "flex"; this one sees documents packed in a row.
        sequence: tokens in a row.
        balancer: how context parallelism deals them out, ``context_parallel_load_balancer``.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    backend: str = "partial_dtensor"
    sequence_parallel: bool = True
    loss: str = "plain"
    checkpointing: str = "none"
    micro_batches: int = 1
    attention: str = "sdpa"
    sequence: int = 64
    balancer: str | None = None

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def on_one_device(self) -> Plan:
        """The same training without parallelism."""
        return dataclasses.replace(self, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1)

    def parallelism(self) -> ParallelismConfig:
        """torchtitan's config."""
        return ParallelismConfig(
            data_parallel_replicate_degree=self.dp_replicate,
            data_parallel_shard_degree=self.dp_shard,
            context_parallel_degree=self.cp,
            tensor_parallel_degree=self.tp,
            expert_parallel_degree=self.ep,
            spmd_backend=self.backend,
            enable_sequence_parallel=self.sequence_parallel,
            context_parallel_load_balancer=self.balancer,
        )


@dataclasses.dataclass
class _Config:
    """What a model's config reads of a trainer's."""

    parallelism: ParallelismConfig


@dataclasses.dataclass
class Run:
    """What a training run gave: per step its loss and gradient norm; and on a mesh what made it."""

    losses: list[float]
    norms: list[float]
    step: Any = None
    model: Any = None


def batches(count: int, vocabulary: int, plan: Plan) -> list[dict[str, torch.Tensor]]:
    """Tokens, labels and positions, the same for every plan; some labels are ignored. They come
    again, so that the loss shows what was learned."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(3):
        tokens = torch.randint(vocabulary, (BATCH, plan.sequence + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.1] = -100
        starts = torch.randint(1, plan.sequence, (BATCH, 1), generator=generator)
        at = torch.arange(plan.sequence)
        positions = torch.where(at < starts, at, at - starts)
        if plan.attention != "flex":  # no masks
            positions = at.repeat(BATCH, 1)
        found.append({"tokens": tokens[:, :-1], "labels": labels, "positions": positions})
    return [found[i % 3] for i in range(count)]


def build(spec: Any, plan: Plan) -> Any:
    """The model on the meta device, as the trainer builds it."""
    config = copy.deepcopy(spec.model)
    if plan.attention == "sdpa":
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    for layer in config.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=plan.sequence)
    config.update_from_config(config=_Config(plan.parallelism()))
    with torch.device("meta"):
        return config.build()


def initial_state(spec: Any) -> dict[str, torch.Tensor]:
    """Weights, by torchtitan's own initialisation on the CPU."""
    model = build(spec, Plan())
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return {name: value.clone() for name, value in model.state_dict().items()}


def loss_of(plan: Plan, model: Any, spec: Any) -> Any:
    """torchtitan's loss."""
    plain = CrossEntropyLoss.Config()
    if plan.loss == "plain":
        return plain.build(compile_config=None)
    chunked = ChunkedLossWrapper.Config(loss_fn=plain, num_chunks=4).build(compile_config=None)
    chunked.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return chunked


def _checkpointing(plan: Plan) -> Any:
    return {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[
        plan.checkpointing
    ]


class Training:
    """A model with its optimizer and schedule, and its step on one batch."""

    def __init__(self, plan: Plan, model: Any, spec: Any, steps: int, dims: Any) -> None:
        self.plan, self.model = plan, model
        self.loss = loss_of(plan, model, spec)
        self.optimizers = default_adamw(lr=1e-3).build(model_parts=[model])
        config = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8)
        self.schedulers = config.build(optimizers=self.optimizers, training_steps=steps)
        if spec.post_optimizer_build_fn is not None:  # experts' load is balanced
            spec.post_optimizer_build_fn(self.optimizers, [model], dims)

    def step(self, micro_batches: Any, valid: Any) -> Any:
        """One step of the optimizer; the losses and the norm of the gradients."""
        self.optimizers.zero_grad()
        losses = []
        for tokens, labels, others in micro_batches:
            loss, _ = self.loss(self.model(tokens, **others), labels, valid)
            loss.backward()
            losses.append(loss.detach())
        norm = dist_utils.clip_grad_norm_(
            list(self.model.parameters()), 1.0, foreach=True, ep_enabled=self.plan.ep > 1
        )
        self.optimizers.step()
        self.schedulers.step()
        return losses, norm


def _pieces(batch: dict[str, torch.Tensor], plan: Plan) -> Iterator[tuple[torch.Tensor, ...]]:
    yield from zip(*(tensor.chunk(plan.micro_batches) for tensor in batch.values()), strict=True)


def _others(model: Any, plan: Plan, positions: torch.Tensor) -> dict[str, Any]:
    others: dict[str, Any] = {"positions": positions}
    if plan.attention == "flex":
        others["attention_masks"] = model.get_attention_masks(positions=positions)
    return others


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """torchtitan's ``spmd_backend``, which is the process's."""
    before = dist_utils.get_spmd_backend()
    dist_utils.set_spmd_backend(name)
    try:
        yield
    finally:
        dist_utils.set_spmd_backend(before)


def _attend(
    q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: Any, **_: Any
) -> Any:
    """What flex_attention gives, of which torch has no gradient on the CPU."""
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


@contextlib.contextmanager
def dense_attention() -> Iterator[None]:
    """torchtitan's flex attention on the CPU, without Inductor (which wants a C++ compiler)."""
    mask = mock.patch.object(attention, "_compiled_create_block_mask", create_block_mask)
    with mask, mock.patch.object(FlexAttention, "_compiled_flex_attn", _attend):
        yield


def on_cpu(spec: Any, plan: Plan, state: Any, steps: int, dtype: Any = torch.float32) -> Run:
    """The run in one process on the CPU, without a mesh."""
    plan = plan.on_one_device
    model = build(spec, plan)
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=torch.device("cpu"))
    model.load_state_dict(state)
    for parameter in model.parameters():  # Module.to would cast RoPE's complex numbers, too
        parameter.data = parameter.data.to(dtype)
    dims = ParallelDims.from_config(plan.parallelism(), 1)
    training = Training(plan, model, spec, steps, dims)
    run = Run([], [])
    with dense_attention(), backend("partial_dtensor"):
        for batch in batches(steps, spec.model.vocab_size, plan):
            valid = (batch["labels"] != -100).sum()
            micro = [
                (tokens, labels, _others(model, plan, positions))
                for tokens, labels, positions in _pieces(batch, plan)
            ]
            losses, norm = training.step(micro, valid)
            run.losses.append(sum(loss.item() for loss in losses))
            run.norms.append(norm.item())
    return run


def on_mesh(spec: Any, plan: Plan, state: Any, steps: int, *, compiled: bool) -> Run:
    """The run on an xla mesh, every part torchtitan's."""
    with backend(plan.backend):
        return _on_mesh(spec, plan, state, steps, compiled)


def parallelized(spec: Any, plan: Plan, *, initialise: bool = True) -> tuple[Any, ParallelDims]:
    """The model on a mesh by torchtitan's ``parallelize_fn``, and the mesh's dimensions."""
    parallelism = plan.parallelism()
    dims = ParallelDims.from_config(parallelism, plan.devices)
    dims.build_mesh()
    model = spec.parallelize_fn(
        build(spec, plan),
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=_checkpointing(plan),
        dump_folder="",
    )
    model.to_empty(device="xla")
    if initialise:  # which reads values: not in xd.abstract
        with torch.no_grad():
            model.init_weights(buffer_device=None)
    model.train()
    return model, dims


def on_mesh_inputs(
    batch: dict[str, torch.Tensor], plan: Plan, dims: ParallelDims, model: Any
) -> tuple[Any, torch.Tensor]:
    """What a step takes of a batch: its micro-batches, and how many tokens count."""
    valid = (batch["labels"] != -100).sum().to("xla")
    return [_placed(piece, plan, dims, model) for piece in _pieces(batch, plan)], valid


def _on_mesh(spec: Any, plan: Plan, state: Any, steps: int, compiled: bool) -> Run:
    model, dims = parallelized(spec, plan)
    put(model, state)
    training = Training(plan, model, spec, steps, dims)
    step = xd.compile(training.step) if compiled else training.step
    run = Run([], [], step, model)
    for batch in batches(steps, spec.model.vocab_size, plan):
        losses, norm = step(*on_mesh_inputs(batch, plan, dims, model))
        run.losses.append(sum(_total(loss, dims) for loss in losses))
        run.norms.append(norm.item())
    return run


def put(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Write ``state`` to the parameters and buffers."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))


def _placed(piece: Any, plan: Plan, dims: ParallelDims, model: Any) -> Any:
    """A batch as the trainer hands it to the model, each data-parallel rank's own rows."""
    tokens, labels, positions = (_to_ranks(tensor, plan, dims) for tensor in piece)
    others = _others(model, plan, positions)
    if plan.cp > 1:
        tokens, labels, others = prepare_context_parallel_input(
            tokens, labels, others, dims.get_mesh("cp"), torch.device("xla"), plan.balancer
        )
    if plan.backend == "full_dtensor":
        return full_dtensor.parallelize_inputs(dims, tokens, labels, others)
    return tokens, labels, others


def _to_ranks(tensor: torch.Tensor, plan: Plan, dims: ParallelDims) -> torch.Tensor:
    ranks = plan.dp_replicate * plan.dp_shard
    if ranks == 1:
        return tensor.to("xla")
    return xd.from_device_values(list(tensor.chunk(ranks)), dims.get_mesh("batch"))


def _total(loss: Any, dims: ParallelDims) -> float:
    """The loss of the whole batch."""
    if dims.spmd_backend == "full_dtensor":
        return float(loss.full_tensor().item())
    return dist_utils.dist_sum(loss, dims.get_optional_mesh("loss"))


def debug_model(name: str, layers: int | None = None, flavor: str = "debugmodel") -> Any:
    """torchtitan's published model of a name; its first ``layers``."""
    module = importlib.import_module(f"torchtitan.models.{name}")
    spec = module.model_registry(flavor)
    spec.model.layers = spec.model.layers[:layers]
    return spec


# What of a config is a size, and not a number of heads, positions or experts.
_SIZES = ("dim", "vocab_size", "in_features", "out_features", "head_dim", "normalized_shape")
_SIZES += ("num_embeddings", "embedding_dim")


def narrower(config: Any, factor: int) -> None:
    """Divide every width of Llama 3's config: it has as many heads, and each is narrower."""
    if isinstance(config, list):
        for element in config:
            narrower(element, factor)
    elif dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name, None)
            if field.name in _SIZES and value is not None:
                assert value % factor == 0, (field.name, value)
                setattr(config, field.name, value // factor)
            else:
                narrower(value, factor)
            if field.name == "wqkv":  # its own way to initialise it knows the heads' width
                value.param_init = {"weight": functools.partial(torch.nn.init.normal_, std=0.02)}
