"""The main line's models in stages, each on devices of its own: torchtitan cuts them and
parallelizes each, and `xd.pipeline` runs torch's schedule over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part as modules_of_stages,
)
from torchtitan.distributed.pipeline_parallel import _split_module as split_module

import xla_dtensor as xd
from tests.torchtitan import harness
from tests.torchtitan.plan import Plan, Run, batches
from tests.torchtitan.releases import release


class _Part(nn.Module):
    """A stage's modules with what they want of a mesh: its types, masks of attention, and each
    device's part of a sequence."""

    def __init__(self, model: Any, plan: Plan, dims: Any, takes_tokens: bool) -> None:
        super().__init__()
        self.model, self.plan, self.dims = model, plan, dims
        self.takes_tokens = takes_tokens
        self.context = release.context(plan, dims)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with self.context():
            others = release.others(self.model, self.plan, positions)
            if self.plan.cp > 1:
                # What comes from another stage is a part already.
                tokens = x if self.takes_tokens else positions
                tokens, _, others = release.inputs(tokens, tokens, others, self.plan, self.dims)
                x = tokens if self.takes_tokens else x
            return self.model(x, **others)

    def own_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Each device's part of them."""
        if self.plan.cp == 1:
            return labels
        own: torch.Tensor = release.inputs(
            labels, labels, {"positions": labels}, self.plan, self.dims
        )[1]
        return own


def _stages(spec: Any, plan: Plan, state: Any, compiled: bool) -> tuple[list[Any], list[Any]]:
    """The stages, and the dimensions of their meshes."""
    names, whole = ("pp", "world"), (plan.pp, plan.devices)
    meshes = xd.pipeline.stage_meshes(xd.init_device_mesh("xla", whole, mesh_dim_names=names))
    stages, found = [], []
    model = release.build(spec, plan)
    for i, own in enumerate(modules_of_stages(plan.pp, len(spec.model.layers))):
        dims = release.dims(plan)
        with mock.patch.object(
            parallel_dims, "init_device_mesh", lambda *_, at=i, **__: meshes[at]
        ):
            dims.build_mesh()
        part = release.parallelize(split_module(model, own), spec, plan, dims)
        harness.on_devices(part)
        harness.put(part, {name: state[name] for name in part.state_dict()})
        part = _Part(part, plan, dims, takes_tokens=i == 0)
        stages.append(xd.pipeline.PipelineStage(part, i, plan.pp, meshes[i], compile=compiled))
        found.append(dims)
    return stages, found


def on_mesh(spec: Any, plan: Plan, state: Any, steps: int, *, compiled: bool) -> Run:
    """The run on the stages' meshes: their forwards and backwards are programs, the rest eager."""
    with release.on_mesh(plan):
        stages, dims = _stages(spec, plan, state, compiled)
        models = [stage.submod.model for stage in stages]
        pipeline = xd.pipeline.PipelineSchedule(
            Schedule1F1B, stages, plan.micro_batches, _loss(spec, plan, stages), scale_grads=False
        )
        # As each rank has, of its stage: experts are balanced by the counts of all its layers.
        own = [
            release.optimizers([model], spec, steps, of_stage)
            for model, of_stage in zip(models, dims, strict=True)
        ]
        run = Run([], [])
        for batch in batches(steps, release.vocabulary(spec), plan):
            placed = (harness.to_ranks(t, plan, dims[0]) for t in batch.tensors)
            tokens, labels, positions = placed
            losses: list[Any] = []
            for optimizers, _ in own:
                optimizers.zero_grad()
            pipeline.step(
                tokens,
                positions=positions,
                target=labels,
                losses=losses,
                loss_kwargs={"valid": batch.valid.to("xla")},
                return_outputs=False,
            )
            parameters = [p for model in models for p in model.parameters()]
            norm = dist_utils.clip_grad_norm_(parameters, 1.0, foreach=True, **plan.about_experts)
            for optimizers, schedulers in own:
                optimizers.step()
                schedulers.step()
            run.losses.append(sum(release.total(loss.detach(), dims[-1]) for loss in losses))
            run.norms.append(norm.item())
        run.recompilations = [r for s in stages if compiled for r in s.compiled.recompilations]
        return run


def _loss(spec: Any, plan: Plan, stages: list[Any]) -> Callable[..., torch.Tensor]:
    last = stages[-1].submod
    loss = release.loss(plan, last.model, spec)

    def of_last(output: torch.Tensor, target: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        with last.context():
            return loss(output, last.own_labels(target), valid)

    return of_last
