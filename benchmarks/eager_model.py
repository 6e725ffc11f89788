"""Eager code on a small Llama: how soon after Enter, how fast, how many programs.

Every figure is taken in a fresh process; those of this checkout and of another commit in turns.

    python benchmarks/eager_model.py --base 20d2924

- first: seconds of the first forward and backward, nothing compiled before; and with the programs
  that an earlier process has kept (``XLA_DTENSOR_CACHE``), where that is done by default
- steady: seconds of a training step (forward, backward, AdamW), eager over compiled, in turns
- loop: programs compiled for a cell over 64 time steps, without and with gradients
- generate: programs compiled for 64 tokens, one by one, into a buffer
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkouts import ROOT, checkout

PROGRAMS = [0]


def child(what: str) -> Any:
    """Take one figure, in this process."""
    os.environ["NPROC"] = "64"
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    sys.path.insert(0, str(ROOT / "examples" / "train_llama"))
    import jax
    import torch
    from model import Llama, ModelConfig, next_token_loss
    from sharding import shard_batch, shard_model

    import xla_dtensor as xd

    def count(name: str, seconds: float, **_: Any) -> None:
        PROGRAMS[0] += "backend_compile" in name

    jax.monitoring.register_event_duration_secs_listener(count)
    torch.manual_seed(0)
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    config = ModelConfig(dim=256)

    def make() -> tuple[Any, Any]:
        model = shard_model(Llama(config), mesh)
        # As a training script has it; making one imports a part of torch that takes a second.
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = make()
    tokens, targets = (
        shard_batch(torch.randint(0, config.vocab, (8, config.max_seq)), mesh) for _ in range(2)
    )

    def gradients(model: Any = model, optimizer: Any = optimizer) -> Any:
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        return loss

    def training() -> tuple[Any, Any]:
        """A step of a model of its own, and what waits until it is done."""
        model, optimizer = make()

        def step() -> Any:
            loss = gradients(model, optimizer)
            optimizer.step()
            return loss.detach()

        def wait() -> None:
            jax.block_until_ready([p._storage_.array for p in model.parameters()])

        return step, wait

    if what == "first":
        return seconds_of(lambda: gradients().item())
    if what == "steady":
        (eager, wait), (step, wait_compiled) = training(), training()
        compiled = xd.compile(step)
        sides = {
            "eager": lambda: (eager(), wait()),
            "compiled": lambda: (compiled(), wait_compiled()),
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(12):
            for name, side in sides.items():
                times[name].append(seconds_of(side))
        return [statistics.median(t[4:]) for t in times.values()]
    if what == "loop":
        x = torch.randn(8, 64, 32).to("xla")
        w = torch.randn(32, 32).div(6).to("xla").requires_grad_()

        def loop() -> Any:
            h = torch.zeros(8, 32, device="xla")
            for t in range(64):
                gate = torch.sigmoid(x[:, t] @ w + h)
                h = gate * torch.tanh(x[:, t] + h @ w) + (1 - gate) * h
            return h.sum()

        with torch.no_grad():
            without = programs_of(lambda: loop().item())
        return [without, programs_of(lambda: (loop().backward(), w.grad.sum().item()))]

    buffer = shard_batch(torch.zeros(8, config.max_seq, dtype=torch.long), mesh)
    positions = torch.arange(63).tolist()

    def generate() -> None:
        with torch.no_grad():
            for t in positions:
                buffer[:, t + 1] = model(buffer)[:, t].argmax(-1)
                buffer[:, t + 1].sum().item()

    return programs_of(generate)


def seconds_of(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def programs_of(function: Callable[[], Any]) -> int:
    before = PROGRAMS[0]
    function()
    return PROGRAMS[0] - before


def run(what: str, checkout: Path, cache: str) -> Any:
    """The figure of a checkout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_DTENSOR_"))}
    done = subprocess.run(
        [sys.executable, __file__, "--child", what],
        env=clean | {"PYTHONPATH": str(checkout), "XLA_DTENSOR_CACHE": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", help="a commit to compare with")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child)))
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        checkouts = {"here": ROOT}
        if options.base:
            checkouts["base"] = stack.enter_context(checkout(options.base))
        kept = str(Path(folder) / "programs")
        figures: dict[tuple[str, str], list[Any]] = {}
        for _ in range(options.repeat):
            for name, files in checkouts.items():
                for what in ("first", "steady"):
                    figures.setdefault((what, name), []).append(run(what, files, "off"))
        run("first", ROOT, kept)
        again = [run("first", ROOT, kept) for _ in range(options.repeat)]
        for name, files in checkouts.items():
            first = statistics.median(figures["first", name])
            pairs = figures["steady", name]
            eager, compiled = (statistics.median(p[i] for p in pairs) for i in (0, 1))
            print(f"{name}: first {first:.2f} s; step {1000 * eager:.0f} ms eager,", end=" ")
            print(f"{1000 * compiled:.0f} ms compiled, ratio {eager / compiled:.2f};", end=" ")
            loop, generate = (run(what, files, "off") for what in ("loop", "generate"))
            print(f"programs: loop {loop[0]}, with gradients {loop[1]}; generate {generate}")
        print(f"here, programs kept by an earlier process: first {statistics.median(again):.2f} s")


if __name__ == "__main__":
    main()
