"""Two processes of four devices save together, and load into another layout.

python -m tests.compat.torch_xla.programs_checkpoint FOLDER
"""

from __future__ import annotations

import sys

import torch
import torch.distributed.checkpoint as dcp

import xla_dtensor as xd
import xla_dtensor.compat.torch_xla.distributed.spmd as xs
from tests.compat.torch_xla.models import TwoLayers, mesh_of
from xla_dtensor.compat.torch_xla.experimental.distributed_checkpoint import (
    SPMDLoadPlanner,
    SPMDSavePlanner,
)


def model_of(shape: tuple[int, int], seed: int) -> TwoLayers:
    torch.manual_seed(seed)
    mesh = mesh_of(shape)
    model = TwoLayers().to("xla")
    xs.mark_sharding(model.fc1.weight, mesh, (0, 1))
    xs.mark_sharding(model.fc2.weight, mesh, (None, None))
    return model


def main(folder: str) -> None:
    assert xd.distributed.process_count() == 2
    one, other = model_of((1, 8), 42), model_of((8, 1), 43)
    dcp.save(one.state_dict(), checkpoint_id=folder, planner=SPMDSavePlanner())
    dcp.load(other.state_dict(), checkpoint_id=folder, planner=SPMDLoadPlanner())
    torch.manual_seed(42)
    expected = TwoLayers().state_dict()  # what the first one began with, on the CPU
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter.detach().cpu(), expected[name]), name
    print("all of it", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
