"""Train a Llama on an "xla" mesh: `python examples/train_llama/train.py --help`.

The training step is ordinary torch. Two lines make it a sharded XLA program: `shard_model`, which
distributes the parameters, and `xd.compile`.
"""

import argparse
import json
import math
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import torch
from model import Llama, next_token_loss
from options import model_config, parse_options
from sample import generate
from sharding import mesh_dim_names, replicate, shard_batch, shard_model
from torch import Tensor, nn
from tqdm import tqdm


def warmup_cosine(warmup: int, steps: int) -> Callable[[int], float]:
    """The learning rate's factor by step: linear up to 1, then half a cosine down to 0.1."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return factor


def make_train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip: float
) -> Callable[[Tensor, Tensor], Tensor]:
    def train_step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = next_token_loss(model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step


def memory_line(step: Callable[[Tensor, Tensor], Tensor]) -> str:
    """What each device holds after a step, and what a step needs beside it."""
    held = torch.xla.memory_allocated() / 2**20
    text = f"each device holds {held:.1f} MB of parameters and optimizer state"
    if hasattr(step, "compiled_programs"):
        needed = step.compiled_programs()[-1].memory_analysis().temp_size_in_bytes / 2**20
        text += f"; a step needs {needed:.1f} MB beside it"
    return text


def plot(losses: list[float], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def open_checkpoints(options: argparse.Namespace, objects: dict[str, Any]) -> Any:
    """The checkpoints of this run; those of another one go, unless this is to go on from them.

    The first Ctrl-C, or SIGTERM, ends the run after the step, with a checkpoint.
    """
    import xla_dtensor as xd

    is_first = xd.distributed.process_index() == 0
    if not options.resume and options.checkpoints.exists() and is_first:
        print(f"removing the checkpoints of an earlier run in {options.checkpoints}")
        shutil.rmtree(options.checkpoints)
    return xd.checkpoint.CheckpointManager(
        options.checkpoints,
        objects,
        every=options.save_every,
        signals=(signal.SIGINT, signal.SIGTERM),
    )


def main(argv: list[str] | None = None) -> list[float]:
    """Train as the command line says; returns the loss of every step."""
    start = time.perf_counter()
    options = parse_options(argv)
    processes = 1
    is_first = True  # of several processes, the one that prints, plots and writes
    torch.manual_seed(options.seed)
    model: nn.Module = Llama(model_config(options))
    parameters = sum(param.numel() for param in model.parameters())

    if options.reference:
        where = "CPU torch"
        place_batch = place_sample = lambda tokens: tokens
        compiled = lambda function: function
    else:
        import xla_dtensor as xd

        is_first = xd.distributed.process_index() == 0
        processes = xd.distributed.process_count()
        where = f"mesh {'x'.join(map(str, options.mesh))}"
        where += f" in {processes} processes" if processes > 1 else ""
        names = mesh_dim_names(len(options.mesh))
        mesh = xd.init_device_mesh("xla", options.mesh, mesh_dim_names=names)
        model = shard_model(model, mesh)
        place_batch = lambda tokens: shard_batch(tokens, mesh)
        place_sample = lambda tokens: replicate(tokens, mesh)
        compiled = (lambda function: function) if options.eager else xd.compile

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    factor = warmup_cosine(options.warmup, options.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    step = compiled(make_train_step(model, optimizer, options.clip))

    train_text, val_text = data.load(options.text)
    batches = data.Batches(train_text, options.batch, options.seq, options.seed)
    if is_first:
        print(f"{parameters:,} parameters on {where}, {len(train_text):,} bytes of text")

    losses: list[float] = []
    log = {"losses": losses}
    manager, begun = None, 0
    if not options.reference:
        objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
        manager = open_checkpoints(options, objects | {"batches": batches, "log": log})
        if options.resume:
            begun = manager.restore()
            losses = log["losses"]
            if is_first:
                print(f"going on after step {begun}")

    seconds: list[float] = []
    progress = tqdm(
        range(begun, options.steps),
        initial=begun,
        total=options.steps,
        unit="step",
        dynamic_ncols=True,
        disable=not is_first,
    )
    for done in progress:
        tokens, targets = next(batches)
        begin = time.perf_counter()
        losses.append(step(place_batch(tokens), place_batch(targets)).item())
        seconds.append(time.perf_counter() - begin)
        schedule.step()
        if len(losses) == 2 and is_first and not options.reference:  # the optimizer has its state
            progress.write(memory_line(step))
        typical = statistics.median(seconds[-20:])
        speed = f"{options.batch * options.seq / typical:,.0f} tokens/s"
        progress.set_postfix_str(f"loss {losses[-1]:.3f}, {speed}, {1000 * typical:.1f} ms/step")
        if manager is not None and manager.after_step(done + 1):
            progress.close()
            manager.close()
            if is_first:
                print(f"stopped by {manager.stopped_by} after step {done + 1}; --resume goes on")
            return losses

    if manager is not None:
        if begun < options.steps and options.steps % options.save_every:
            manager.save(options.steps)
        manager.close()
        if options.export:
            files = xd.checkpoint.save_safetensors(model, options.export)
            if is_first:
                print(f"weights in {', '.join(map(str, files))}")

    with torch.no_grad():
        validate = compiled(lambda tokens, targets: next_token_loss(model(tokens), targets))
        val_batches = data.Batches(val_text, options.batch, options.seq, seed=0)
        val_losses = []
        for _, (tokens, targets) in zip(range(10), val_batches, strict=False):
            val_losses.append(validate(place_batch(tokens), place_batch(targets)).item())

        if options.sample:
            forward = compiled(lambda tokens: model(tokens))
            predict = lambda tokens: forward(place_sample(tokens)).cpu()
            sample = generate(predict, "def ", options.sample, options.seq, options.temperature)
            if is_first:
                print(f"\n--- a sample of {options.sample} bytes ---\n{sample}\n---\n")

    if not is_first:
        return losses
    options.out.mkdir(parents=True, exist_ok=True)
    plot(losses, options.out / "loss.png", f"{parameters:,} parameters on {where}")
    if options.losses:
        options.losses.write_text(json.dumps(losses))
    print(
        f"loss {losses[0]:.3f} -> {statistics.fmean(losses[-20:]):.3f}"
        f" (validation {statistics.fmean(val_losses):.3f}) in {options.steps} steps,"
        f" {1000 * statistics.median(seconds or [0]):.1f} ms each, the first"
        f" {sum(seconds[:1]):.1f} s;"
        f" {time.perf_counter() - start:.0f} s in all. Plot: {options.out / 'loss.png'}"
    )
    return losses


if __name__ == "__main__":
    main()
