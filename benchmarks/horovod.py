"""Data parallelism on 8 ranks: `hvd.DistributedOptimizer` in a compiled step, in one process with 8
simulated devices, against torch's DistributedDataParallel in 8 gloo processes and `xd.replicate`.

The model of examples/train_llama, from the same weights, each rank with its own batch. All sides
are alive at once and take turns on the same cores: who has no turn sleeps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# With fewer threads, XLA's simulated CPU devices can deadlock waiting for one another.
os.environ.setdefault("NPROC", "64")

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "train_llama"))

import torch.nn.functional as F
from history import record
from model import Llama
from torch import Tensor, nn
from vs_torch_dtensor import (
    CHECKED_STEPS,
    DEVICES,
    InThisProcess,
    Size,
    gloo,
    in_turns,
    take_turns,
)

LR = 1e-3
TOLERANCE = 1e-4


def make_step(model: nn.Module, optimizer: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def network(size: Size) -> nn.Module:
    torch.manual_seed(0)
    return Llama(size.config)


def serve(port: int, size: Size) -> None:
    """What each of `torchrun`'s processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(network(size))
    step = make_step(model, torch.optim.AdamW(model.parameters(), lr=LR))
    own = dist.get_rank()
    take_turns(port, step, (parts[own] for parts in size.batches(DEVICES)))


def xla(size: Size, name: str) -> InThisProcess:
    """One of xla_dtensor's ways, in this process."""
    import xla_dtensor as xd
    import xla_dtensor.horovod as hvd

    def step(mesh: Any) -> Any:
        if name == "horovod":
            xd.set_mesh(mesh)
            hvd.init()
            model = network(size).to("xla")
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer: Any = hvd.DistributedOptimizer(
                torch.optim.AdamW(model.parameters(), lr=LR), model.named_parameters()
            )
        else:
            model = xd.replicate(network(size), mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        return xd.compile(make_step(model, optimizer))

    return InThisProcess((DEVICES,), ("rank",), step, size.batches(DEVICES), "rank")


def measure(size: Size, rounds: int, steps: int) -> dict[str, Any]:
    with gloo(size, __file__) as processes:
        sides: dict[str, Any] = {
            "gloo": processes,
            "horovod": xla(size, "horovod"),
            "replicate": xla(size, "replicate"),
        }
        first = [in_turns(sides, n) for n in (1, 1, CHECKED_STEPS - 2)]
        losses = {
            name: torch.tensor([step for turns in first for step in turns[name].losses])
            for name in sides
        }
        timed = [in_turns(sides, steps, reverse=i % 2 == 1) for i in range(rounds)]
    result: dict[str, Any] = {}
    for name in sides:
        worst = (losses[name] - losses["gloo"]).abs().max().item()
        if not worst <= TOLERANCE:
            raise SystemExit(f"{name}: losses differ from gloo's by {worst}")
        times = [turns[name].seconds / steps for turns in timed]
        # Of each round, so that a slow moment of the machine weighs on all sides.
        ratios = [turns["gloo"].seconds / turns[name].seconds for turns in timed]
        to_replicate = [turns[name].seconds / turns["replicate"].seconds for turns in timed]
        result[name] = {
            "step_ms": 1000 * statistics.median(times),
            "fastest_ms": 1000 * min(times),
            "gloo_over_this": statistics.median(ratios),
            "this_over_replicate": statistics.median(to_replicate),
            "fastest_over_replicate": min(times)
            / min(turns["replicate"].seconds / steps for turns in timed),
            "loss_difference": worst,
        }
        if name != "gloo":
            result[name]["collectives"] = sides[name].collectives()
    return result


COLUMNS = {
    "gloo": "DistributedDataParallel, 8 processes",
    "horovod": "hvd.DistributedOptimizer",
    "replicate": "xd.replicate",
}
ROWS: list[tuple[str, Callable[[Any], str]]] = [
    ("step, median of the rounds", lambda f: f"{f['step_ms']:.0f} ms"),
    ("step, fastest round", lambda f: f"{f['fastest_ms']:.0f} ms"),
    ("DistributedDataParallel's time over this", lambda f: f"{f['gloo_over_this']:.2f}"),
    ("this over xd.replicate's", lambda f: f"{f['this_over_replicate']:.3f}"),
    ("the same of the fastest rounds", lambda f: f"{f['fastest_over_replicate']:.3f}"),
    ("largest difference of a loss", lambda f: f"{f['loss_difference']:.1e}"),
]


def markdown(result: dict[str, Any]) -> str:
    lines = [f"| | {' | '.join(COLUMNS[n] for n in result)} |", f"|---{'|---:' * len(result)}|"]
    lines += [f"| {row} | {' | '.join(show(f) for f in result.values())} |" for row, show in ROWS]
    told = [f"{n}'s collectives: {f['collectives']}" for n, f in result.items() if n != "gloo"]
    return "\n".join([*lines, "", *told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each side")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--dim", type=int, default=256, help="width of the model, in 8 heads")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences, of all ranks together")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--record", action="store_true", help="keep the figures in history/")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dim % 16 or options.batch % DEVICES:
        parser.error(f"--dim must be a multiple of 16, --batch of {DEVICES}")
    size = Size(options.dim, options.layers, options.batch, options.seq)
    if options.serve:
        serve(options.serve, size)
        return
    result = measure(size, options.rounds, options.steps)
    if options.record:
        record(Path(__file__).stem, {"size": vars(size), **result})
    print(json.dumps(result, indent=2) if options.json else markdown(result))


if __name__ == "__main__":
    main()
