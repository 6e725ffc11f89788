"""torchtitan's models, trained by its own parts on one mesh or another and on the CPU.

What differs between its releases is in `releases`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torchtitan.distributed import utils as dist_utils

import xla_dtensor as xd
from tests.torchtitan.plan import Batch, Plan, Run, batches
from tests.torchtitan.releases import release


def _on_cpu(spec: Any, plan: Plan) -> Any:
    model = release.build(spec, plan)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def initial_state(spec: Any) -> dict[str, torch.Tensor]:
    """Weights, by torchtitan's own initialisation on the CPU."""
    state = _on_cpu(spec, Plan()).state_dict()
    return {name: value.clone() for name, value in state.items()}


class Training:
    """A model with its optimizer and schedule, and its step on one batch."""

    def __init__(self, plan: Plan, model: Any, spec: Any, steps: int, dims: Any) -> None:
        self.model = model
        self.loss = release.loss(plan, model, spec)
        self.optimizers, self.schedulers = release.optimizers([model], spec, steps, dims)
        self.context = release.context(plan, dims)
        self.about_experts = plan.about_experts

    def step(self, micro_batches: Any, valid: Any) -> Any:
        """One step of the optimizer; the losses and the norm of the gradients."""
        self.optimizers.zero_grad()
        losses = []
        for tokens, labels, others in micro_batches:
            with self.context():
                loss = self.loss(self.model(tokens, **others), labels, valid)
                with release.backward():
                    loss.backward()
            losses.append(loss.detach())
        norm = dist_utils.clip_grad_norm_(
            list(self.model.parameters()), 1.0, foreach=True, **self.about_experts
        )
        self.optimizers.step()
        self.schedulers.step()
        return losses, norm


def on_cpu(spec: Any, plan: Plan, state: Any, steps: int, dtype: Any = torch.float32) -> Run:
    """The run in one process on the CPU, without a mesh."""
    averaged_over, plan = release.averaged_over(plan), plan.on_one_device
    model = _on_cpu(spec, plan)
    model.load_state_dict(state)
    for parameter in model.parameters():  # Module.to would cast RoPE's complex numbers, too
        parameter.data = parameter.data.to(dtype)
        parameter.register_hook(lambda grad: grad / averaged_over)
    training = Training(plan, model, spec, steps, release.dims(plan))
    run = Run([], [])
    with release.on_cpu():
        for batch in batches(steps, release.vocabulary(spec), plan):
            micro = []
            for piece in batch.pieces(plan.micro_batches):
                tokens, labels, positions = map(release.rows, piece)
                micro.append((tokens, labels, release.others(model, plan, positions)))
            losses, norm = training.step(micro, batch.valid)
            run.losses.append(sum(loss.item() for loss in losses))
            run.norms.append(norm.item())
    return run


def parallelized(spec: Any, plan: Plan, *, initialise: bool = True) -> tuple[Any, Any]:
    """The model on a mesh by torchtitan's ``parallelize_fn``, and the mesh's dimensions."""
    dims = release.dims(plan)
    dims.build_mesh()
    model = release.parallelize(release.build(spec, plan), spec, plan, dims)
    return on_devices(model, initialise=initialise), dims


def on_devices(model: Any, *, initialise: bool = True) -> Any:
    """A parallelized model's parameters and buffers, as the trainer makes them."""
    model.to_empty(device="xla")
    if initialise:  # which reads values: not in xd.abstract
        with torch.no_grad():
            model.init_weights(buffer_device=None)
    return model.train()


def on_mesh(spec: Any, plan: Plan, state: Any, steps: int, *, compiled: bool) -> Run:
    """The run on an xla mesh, every part torchtitan's."""
    with release.on_mesh(plan):
        model, dims = parallelized(spec, plan)
        put(model, state)
        training = Training(plan, model, spec, steps, dims)
        step = xd.compile(training.step) if compiled else training.step
        run = Run([], [], model=model)
        for batch in batches(steps, release.vocabulary(spec), plan):
            losses, norm = step(*on_mesh_inputs(batch, plan, dims, model))
            run.losses.append(sum(release.total(loss, dims) for loss in losses))
            run.norms.append(norm.item())
        run.recompilations = step.recompilations if compiled else []
        return run


def put(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Write ``state`` to the parameters and buffers."""
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, dict(state), options=options)


def on_mesh_inputs(
    batch: Batch, plan: Plan, dims: Any, model: Any
) -> tuple[list[Any], torch.Tensor]:
    """What a step takes of a batch: its micro-batches, and how many tokens count."""
    micro = []
    for piece in batch.pieces(plan.micro_batches):
        tokens, labels, positions = (to_ranks(tensor, plan, dims) for tensor in piece)
        others = release.others(model, plan, positions)
        micro.append(release.inputs(tokens, labels, others, plan, dims))
    return micro, batch.valid.to("xla")


def to_ranks(tensor: torch.Tensor, plan: Plan, dims: Any) -> torch.Tensor:
    """Each data-parallel rank's own rows."""
    if plan.ranks == 1:
        return release.rows(tensor).to("xla")
    own = [release.rows(rows) for rows in tensor.chunk(plan.ranks)]
    return xd.from_device_values(own, dims.get_mesh("batch"))
