"""Training in which one process is killed once: what torchrun or Ray starts again goes on from the
last commit, and ends with what a run without a failure has.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import xla_dtensor.horovod as hvd

STEPS, KILLED_IN = 6, 5


def main(folder: Path, victim: int) -> int:
    """The number of commits that it has found."""
    hvd.init()
    torch.manual_seed(hvd.rank())  # each has its own, until rank 0's is given to all
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    done = state.keep_in(folder / "checkpoints", asynchronous=False)
    if done:
        print(f"went on after {state.step}", flush=True)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            state.step += 1
            marker = folder / "killed"
            if state.step == KILLED_IN and hvd.rank() == victim and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            x = torch.full((2, 3), float(state.step + hvd.rank()))
            model(x).mean().backward()
            optimizer.step()
            if state.step % 2 == 0:
                state.commit()

    train(state)
    expected, moment = 1.0, 0.0
    for step in range(1, STEPS + 1):
        moment = 0.9 * moment + sum(step + r for r in range(hvd.size())) / hvd.size()
        expected -= 0.1 * moment
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 3), expected))
    print("all of it", flush=True)
    return done


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
