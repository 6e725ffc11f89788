"""All stages in one checkpoint, onto other meshes and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.pipelining import Schedule1F1B

import xla_dtensor as xd
from tests.pipeline.harness import DIM, mesh_of, parameters, parts, stages_of, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(
    stages: list[xd.pipeline.PipelineStage], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Under the names of the model that isn't cut."""
    model = nn.Sequential(*[stage.submod for stage in stages])
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


@pytest.mark.slow
def test_a_run_goes_on_with_other_meshes(tmp_path: Path) -> None:
    x, y = torch.randn(8, DIM), torch.randn(8, DIM)

    def made(*shape: int) -> tuple[list[xd.pipeline.PipelineStage], Any, torch.optim.Optimizer]:
        stages = stages_of(parts(2), xd.pipeline.stage_meshes(mesh_of(*shape)))
        pipeline = xd.pipeline.PipelineSchedule(Schedule1F1B, stages, 2, nn.functional.mse_loss)
        return stages, pipeline, torch.optim.AdamW(parameters(stages), lr=0.1)

    def train(pipeline: Any, optimizer: torch.optim.Optimizer) -> None:
        pipeline.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()

    stages, pipeline, optimizer = made(2, 2)
    train(pipeline, optimizer)
    dcp.save(state(stages, optimizer), checkpoint_id=tmp_path, no_dist=True)
    train(pipeline, optimizer)

    others, again, restored = made(2, 4)
    train(again, restored)  # so that there is state to load into
    loaded = state(others, restored)
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    model = nn.Sequential(*[stage.submod for stage in others])
    model.load_state_dict(loaded["model"])
    set_optimizer_state_dict(model, restored, loaded["optimizer"])
    train(again, restored)
    for found, wanted in zip(parameters(others), parameters(stages), strict=True):
        torch.testing.assert_close(whole(found), whole(wanted))
