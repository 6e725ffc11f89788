"""A compiled step in processes of one device each: one program, in all of them."""

from __future__ import annotations

from typing import Any

import torch

import xla_dtensor as xd
import xla_dtensor.horovod as hvd
from tests.horovod.test_compiled import compare, data, network, trained_on_the_host


def main() -> None:
    hvd.init()
    model = network().to("xla")
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = xd.compile(step)
    for seed in range(3):
        x = hvd.per_rank(lambda rank, s=seed: data(rank, [4, 6], seed=s), device="xla")
        loss = (compiled if seed else step)(x)  # an eager one among them
        assert torch.isfinite(hvd.allreduce(loss.detach(), name="loss").cpu())
    compare(model, trained_on_the_host(3))
    assert "all-reduce" in compiled.compiled_programs()[-1].as_text()
    print("all of it", flush=True)


if __name__ == "__main__":
    main()
