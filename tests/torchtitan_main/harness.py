"""Models of torchtitan's main line, trained by its own parts on a mesh and on the CPU.

Main's models take a stream of tokens, documents packed in a row, and its backends are
``spmd_types``, the default, and ``partial_dtensor``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.attention.flex_attention import AuxOutput, create_block_mask, create_mask
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common import attention
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

import xla_dtensor as xd

ROWS = 8
"""Of the whole batch, whatever the mesh; each begins a document."""


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
        sequence: tokens in a row.
        balancer: how context parallelism deals them out, ``context_parallel_load_balancer``.
        checked: ``spmd_typechecking``.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    backend: str = "spmd_types"
    sequence_parallel: bool = True
    loss: str = "plain"
    checkpointing: str = "none"
    micro_batches: int = 1
    sequence: int = 64
    balancer: str | None = None
    checked: bool = False

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def on_one_device(self) -> Plan:
        """The same training without parallelism."""
        one = dataclasses.replace(self, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1)
        return dataclasses.replace(one, backend="spmd_types", balancer=None, checked=False)

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


def batches(count: int, vocabulary: int, plan: Plan) -> list[tuple[torch.Tensor, ...]]:
    """Tokens, labels and positions, rows of documents, the same for every plan; some labels are
    ignored. They come again, so that the loss shows what was learned."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(3):
        tokens = torch.randint(vocabulary, (ROWS, plan.sequence + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.1] = -100
        starts = torch.randint(1, plan.sequence, (ROWS, 1), generator=generator)
        at = torch.arange(plan.sequence)
        found.append((tokens[:, :-1], labels, torch.where(at < starts, at, at - starts)))
    return [found[i % 3] for i in range(count)]


def build(spec: Any, plan: Plan) -> Any:
    """The model on the meta device, as the trainer builds it."""
    config = copy.deepcopy(spec.model)
    config.update_from_config(config=_Config(plan.parallelism()))
    for layer in config.layers:  # as the trainer, of its longest document
        if layer.attention is not None:
            rope = layer.attention.rope
            layer.attention.rope = dataclasses.replace(rope, max_context_length=plan.sequence)
    with torch.device("meta"):
        return config.build()


def initial_state(spec: Any) -> dict[str, torch.Tensor]:
    """Weights, by torchtitan's own initialisation on the CPU."""
    model = _on_cpu(spec, Plan())
    return {name: value.clone() for name, value in model.state_dict().items()}


def _on_cpu(spec: Any, plan: Plan) -> Any:
    model = build(spec, plan)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def loss_of(plan: Plan, model: Any, spec: Any) -> Any:
    """torchtitan's loss."""
    plain = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    if plan.loss == "plain":
        return plain.build(compile_config=None)
    chunked = ChunkedLossWrapper.Config(loss_fn=plain, num_chunks=4).build(compile_config=None)
    chunked.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return chunked


class Training:
    """A model with its optimizer and schedule, and its step on one batch."""

    def __init__(self, plan: Plan, model: Any, spec: Any, steps: int, dims: Any) -> None:
        self.plan, self.model = plan, model
        self.loss = loss_of(plan, model, spec)
        self.context = contextlib.nullcontext
        if plan.devices > 1:
            self.context = dist_utils.get_spmd_context(
                parallel_dims=dims, spmd_typechecking=plan.checked
            )
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
            with self.context():
                loss, _ = self.loss(self.model(tokens, **others), labels, valid)
                with _unchecked():
                    loss.backward()
            losses.append(loss.detach())
        norm = dist_utils.clip_grad_norm_(
            list(self.model.parameters()), 1.0, foreach=True, ep_enabled=self.plan.ep > 1
        )
        self.optimizers.step()
        self.schedulers.step()
        return losses, norm


def _unchecked() -> Any:
    import spmd_types

    return spmd_types.no_typecheck()


def _pieces(batch: tuple[torch.Tensor, ...], plan: Plan) -> Iterator[tuple[torch.Tensor, ...]]:
    yield from zip(*(tensor.chunk(plan.micro_batches) for tensor in batch), strict=True)


def _others(model: Any, positions: torch.Tensor) -> dict[str, Any]:
    masks = model.get_attention_masks(positions=positions)
    return {"positions": positions, "attention_masks": masks}


_experts = GptOssGroupedExperts.forward


def _in_dtype_of_input(self: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return _experts(self, rows, counts).type_as(rows)


@contextlib.contextmanager
def float32_gpt_oss() -> Iterator[None]:
    """gpt_oss's experts give bfloat16 whatever the model's dtype, and its sum of float32 refuses
    that; the other models' experts give what they got."""
    with mock.patch.object(GptOssGroupedExperts, "forward", _in_dtype_of_input):
        yield


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
    q: Any, k: Any, v: Any, *, score_mod: Any, block_mask: Any, scale: Any, **about: Any
) -> Any:
    """What flex_attention gives, of which torch has no gradient on the CPU."""
    assert score_mod is None
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v, AuxOutput(lse=scores.logsumexp(-1))


@contextlib.contextmanager
def dense_attention() -> Iterator[None]:
    """torchtitan's flex attention on the CPU, without Inductor (which wants a C++ compiler)."""
    mask = mock.patch.object(attention, "_compiled_create_block_mask", create_block_mask)
    with mask, mock.patch.object(FlexAttention, "_compiled_flex_attn", _attend):
        yield


def on_cpu(spec: Any, plan: Plan, state: Any, steps: int, dtype: Any = torch.float32) -> Run:
    """The run in one process on the CPU, without a mesh."""
    plan = plan.on_one_device
    model = _on_cpu(spec, plan)
    model.load_state_dict(state)
    for parameter in model.parameters():  # Module.to would cast RoPE's complex numbers, too
        parameter.data = parameter.data.to(dtype)
    dims = ParallelDims.from_config(plan.parallelism(), 1)
    training = Training(plan, model, spec, steps, dims)
    run = Run([], [])
    with dense_attention(), float32_gpt_oss():
        for batch in batches(steps, spec.model.vocab_size, plan):
            valid = (batch[1] != -100).sum()
            micro = []
            for piece in _pieces(batch, plan):
                tokens, labels, positions = (x.flatten() for x in piece)
                micro.append((tokens, labels, _others(model, positions)))
            losses, norm = training.step(micro, valid)
            run.losses.append(sum(loss.item() for loss in losses))
            run.norms.append(norm.item())
    return run


def on_mesh(spec: Any, plan: Plan, state: Any, steps: int, *, compiled: bool) -> Run:
    """The run on an xla mesh, every part torchtitan's."""
    with backend(plan.backend), float32_gpt_oss():
        return _on_mesh(spec, plan, state, steps, compiled)


def parallelized(spec: Any, plan: Plan) -> tuple[Any, ParallelDims]:
    """The model on a mesh by torchtitan's ``parallelize_fn``, and the mesh's dimensions."""
    parallelism = plan.parallelism()
    dims = ParallelDims.from_config(parallelism, plan.devices)
    dims.build_mesh()
    checkpointing = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    model = spec.parallelize_fn(
        build(spec, plan),
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=checkpointing[plan.checkpointing],
        dump_folder="",
    )
    model.to_empty(device="xla")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    return model, dims


def _on_mesh(spec: Any, plan: Plan, state: Any, steps: int, compiled: bool) -> Run:
    model, dims = parallelized(spec, plan)
    put(model, state)
    training = Training(plan, model, spec, steps, dims)
    step = xd.compile(training.step) if compiled else training.step
    run = Run([], [], step, model)
    for batch in batches(steps, spec.model.vocab_size, plan):
        valid = (batch[1] != -100).sum().to("xla")
        micro = [_placed(piece, plan, dims, model) for piece in _pieces(batch, plan)]
        losses, norm = step(micro, valid)
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
    others = _others(model, positions)
    if plan.cp > 1:
        tokens, labels, others = prepare_context_parallel_input(
            tokens, labels, others, dims.get_mesh("cp"), torch.device("xla"), plan.balancer
        )
    if plan.backend == "spmd_types":
        return annotate_input_spmd_types(dims, tokens, labels, others)
    return tokens, labels, others


def _to_ranks(tensor: torch.Tensor, plan: Plan, dims: ParallelDims) -> torch.Tensor:
    ranks = plan.dp_replicate * plan.dp_shard
    if ranks == 1:
        return tensor.flatten().to("xla")
    own = [rows.flatten() for rows in tensor.chunk(ranks)]
    return xd.from_device_values(own, dims.get_mesh("batch"))


def _total(loss: Any, dims: ParallelDims) -> float:
    """The loss of the whole batch."""
    return dist_utils.dist_sum(loss, dims.get_optional_mesh("loss"))


def debug_model(name: str, layers: int | None = None, **about: Any) -> Any:
    """torchtitan's published model of a name; its first ``layers``."""
    module = importlib.import_module(f"torchtitan.models.{name}")
    spec = module.model_registry(about.pop("flavor", "debugmodel"), **about)
    spec.model.layers = spec.model.layers[:layers]
    return spec
