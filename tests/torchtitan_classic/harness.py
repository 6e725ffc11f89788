"""torchtitan 0.2.2's Llama 3, trained by its own parts on one mesh or another and on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.llama3 import Transformer, llama3_args, parallelize_llama

import xla_dtensor as xd

BATCH, SEQUENCE, LAYERS = 8, 64, 2


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model is parallelized, in torchtitan's words.

    Attributes:
        dp_replicate, dp_shard, tp: degrees.
        loss_parallel: whether the loss is computed on sharded classes, where "tp" is.
        checkpointing: of activations: "none", "full" or "selective".
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    loss_parallel: bool = True
    checkpointing: str = "none"

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def averaged_over(self) -> int:
        """What gradients are divided by: ``apply_fsdp`` turns FSDP's division off, since losses are
        divided by the tokens of all ranks, and ``apply_ddp`` leaves DDP's mean as it is."""
        return self.dp_replicate if self.dp_shard == self.tp == 1 else 1


PLANS: dict[str, dict[str, Any]] = {
    "dp4": {"dp_shard": 4},
    "tp4": {"tp": 4},
    "tp4, whole loss": {"tp": 4, "loss_parallel": False},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "ddp4": {"dp_replicate": 4},
    "dp2 x tp2": {"dp_shard": 2, "tp": 2},
    "dp2 x tp2, whole loss": {"dp_shard": 2, "tp": 2, "loss_parallel": False},
    "dp2 x tp2, full checkpointing": {"dp_shard": 2, "tp": 2, "checkpointing": "full"},
    "dp2 x tp2, selective checkpointing": {"dp_shard": 2, "tp": 2, "checkpointing": "selective"},
    "2x2x2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
}


@dataclasses.dataclass
class Run:
    """What a training run gave: per step its loss and gradient norm."""

    losses: list[float]
    norms: list[float]
    step: Any = None


def config_of(plan: Plan) -> JobConfig:
    """torchtitan's config."""
    config = JobConfig()
    config.training.seq_len = SEQUENCE
    config.training.mixed_precision_param = config.training.mixed_precision_reduce = "float32"
    config.parallelism.disable_loss_parallel = not plan.loss_parallel
    config.activation_checkpoint.mode = plan.checkpointing  # type: ignore[assignment]
    config.activation_checkpoint.selective_ac_option = "op"
    config.optimizer.lr, config.optimizer.implementation = 1e-3, "foreach"
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio = 2, 0.8
    return config


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels, the same for every plan; some labels are ignored. They come again, so
    that the loss shows what was learned."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(3):
        shape = (BATCH, SEQUENCE + 1)
        tokens = torch.randint(llama3_args["debugmodel"].vocab_size, shape, generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.1] = IGNORE_INDEX
        found.append((tokens[:, :-1], labels))
    return [found[i % 3] for i in range(count)]


def _model() -> Transformer:
    args = dataclasses.replace(llama3_args["debugmodel"], n_layers=LAYERS, max_seq_len=SEQUENCE)
    with torch.device("meta"):
        return Transformer(args)


def initial_state() -> dict[str, torch.Tensor]:
    """Weights, by torchtitan's own initialisation on the CPU."""
    model = _model()
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return {name: value.clone() for name, value in model.state_dict().items()}


class _Training:
    """A model with its optimizer and schedule, and its step on one batch."""

    def __init__(self, config: JobConfig, model: Any, dims: ParallelDims, steps: int) -> None:
        self.model = model
        self.optimizers = build_optimizers([model], config.optimizer, dims)
        self.schedulers = build_lr_schedulers(self.optimizers, config.lr_scheduler, steps)
        parallel = dims.tp_enabled and not config.parallelism.disable_loss_parallel
        self.context = dist_utils.get_train_context(parallel)

    def step(self, tokens: Any, labels: Any, valid: Any) -> Any:
        """As ``Trainer.train_step``."""
        self.optimizers.zero_grad()
        with self.context():
            loss = cross_entropy_loss(self.model(tokens), labels) / valid
            loss.backward()
        norm = dist_utils.clip_grad_norm_(list(self.model.parameters()), 1.0, foreach=True)
        self.optimizers.step()
        self.schedulers.step()
        return loss.detach(), norm


def _dims(plan: Plan) -> ParallelDims:
    return ParallelDims(
        dp_replicate=plan.dp_replicate,
        dp_shard=plan.dp_shard,
        cp=1,
        tp=plan.tp,
        pp=1,
        ep=1,
        etp=1,
        world_size=plan.devices,
    )


def on_cpu(
    state: Any, steps: int, dtype: torch.dtype = torch.float32, averaged_over: int = 1
) -> Run:
    """The run in one process on the CPU, without a mesh; its gradients divided by a number."""
    model = _model()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    model.load_state_dict(state)
    for parameter in model.parameters():  # Module.to would cast RoPE's complex numbers, too
        parameter.data = parameter.data.to(dtype)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / averaged_over)
    training = _Training(config_of(Plan()), model, _dims(Plan()), steps)
    run = Run([], [])
    for tokens, labels in batches(steps):
        loss, norm = training.step(tokens, labels, (labels != IGNORE_INDEX).sum())
        run.losses.append(loss.item())
        run.norms.append(norm.item())
    return run


def on_mesh(plan: Plan, state: Any, steps: int, *, compiled: bool) -> Run:
    """The run on an xla mesh, every part torchtitan's."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    config, dims = config_of(plan), _dims(plan)
    dims.build_mesh()
    model: Any = parallelize_llama(_model(), dims, config)
    model.to_empty(device="xla")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))
    training = _Training(config, model, dims, steps)
    step = xd.compile(training.step) if compiled else training.step
    run = Run([], [], step)
    ranks = plan.dp_replicate * plan.dp_shard
    for tokens, labels in batches(steps):
        valid = (labels != IGNORE_INDEX).sum().to("xla")
        place = lambda t: t.to("xla")
        if ranks > 1:
            mesh = dims.get_mesh("batch")
            place = lambda t, mesh=mesh: xd.from_device_values(list(t.chunk(ranks)), mesh)
        loss, norm = step(place(tokens), place(labels), valid)
        with contextlib.suppress(AttributeError):
            loss = loss.full_tensor()  # of sharded classes
        mesh = dims.get_optional_mesh("loss")
        run.losses.append(loss.item() if mesh is None else dist_utils.dist_sum(loss, mesh))
        run.norms.append(norm.item())
    return run
