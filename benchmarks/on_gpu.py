"""Training steps on a GPU that is here: ours next to torch's own (eager and `torch.compile`), and
to JAX written by hand.

    python benchmarks/on_gpu.py                              # all programs, all sides
    python benchmarks/on_gpu.py --programs 1b --sides ours jax --json found.jsonl
    python benchmarks/on_gpu.py --device cpu --tiny          # the script itself, without a GPU

Each side of a program runs in a process of its own, from the same weights and batches:

- `1b`: a Llama of 0.9 billion parameters (`pods/`), S = 4096, float32 parameters and AdamW,
  bfloat16 computation, causal attention by cuDNN in ours and JAX's, by torch's choice in torch's;
  nothing is computed twice. `1b-scan` has its layers in a loop (ours and JAX's).
- `gpt2` (transformers), `vit` (timm's ViT-B/16), `resnet50` (torchvision's), as their authors wrote
  them, under `torch.autocast` to bfloat16, on torch's side in channels-last where there are images.

Said of each: the first call and the second, the median step over `--rounds`, each read; a step
where nothing is read until the end; the device's peak memory. Losses are compared with eager
torch's on the same GPU. Of ours also what `xd.plan` says: memory, and the bound that no step can
go below.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("NPROC", "64")
os.environ["XLA_DTENSOR_CACHE"] = "off"  # the first call is to compile

import torch
import torch.nn.functional as F
from torch import nn

SIDES = ("torch", "torch.compile", "ours", "jax")
LLAMA = ("1b", "1b-scan")
PROGRAMS = (*LLAMA, "gpt2", "vit", "resnet50")
COMPARED = 4  # losses
Batch = tuple[torch.Tensor, ...]


@dataclasses.dataclass
class Program:
    """What is trained: a model on the CPU, batches, and a loss."""

    model: nn.Module
    batches: list[Batch]
    loss: Callable[..., torch.Tensor]
    autocast: bool = True
    images: bool = False
    lr: float = 1e-4


def gpt2(tiny: bool) -> Program:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 64, "n_layer": 12, "n_head": 4, "vocab_size": 256} if tiny else {}
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **small)
    rows, length = (2, 32) if tiny else (8, 1024)
    batches = [
        (torch.randint(0, config.vocab_size, (rows, length), generator=torch.manual_seed(i)),)
        for i in range(COMPARED)
    ]
    return Program(GPT2LMHeadModel(config), batches, lambda m, x: m(input_ids=x, labels=x).loss)


def images(name: str, tiny: bool) -> Program:
    if name == "vit":
        import timm

        model = timm.create_model("vit_tiny_patch16_224" if tiny else "vit_base_patch16_224")
    else:
        import torchvision

        model = getattr(torchvision.models, "resnet18" if tiny else "resnet50")()
    rows = 2 if tiny else 128
    batches = []
    for i in range(COMPARED):
        made = torch.manual_seed(i)
        x = torch.randn(rows, 3, 224, 224, generator=made)
        batches.append((x, torch.randint(0, 1000, (rows,), generator=made)))
    return Program(model, batches, lambda m, x, y: F.cross_entropy(m(x), y), images=True)


def llama_sizes(name: str, tiny: bool) -> Any:
    from pods.sizes import MODELS, Sizes

    sizes = Sizes(**MODELS["tiny" if tiny else "1b"], batch=2, keep=True, loop=name == "1b")
    return dataclasses.replace(sizes, seq=128) if tiny else sizes


def llama(name: str, tiny: bool) -> tuple[nn.ModuleDict, list[Batch], Any]:
    from pods.model import model_of

    sizes = llama_sizes(name, tiny)
    model = model_of(sizes)
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=made) * 0.02)
    text = [
        torch.randint(0, sizes.vocab, (sizes.batch, sizes.seq + 1), generator=made)
        for _ in range(COMPARED)
    ]
    return model, [(t[:, :-1].int(), t[:, 1:].long()) for t in text], sizes


def torch_step(
    name: str, side: str, tiny: bool, device: str, options: dict[str, Any]
) -> tuple[Any, list[Batch], Any]:
    """The step of a side that is torch, with its batches on the device; of ours the plain one, too.

    With xla_dtensor imported, torch's autograd refuses CUDA tensors: the other sides don't.
    """
    if side == "ours":
        import xla_dtensor as xd

        device = "xla"
    if name in LLAMA:
        from pods.model import in_turn, step_of
        from pods.sizes import rope_angles

        model, batches, sizes = llama(name, tiny)
        model.to(device)
        cos, sin = (t.to(device) for t in rope_angles(sizes))
        layers = in_turn(model["layers"], keep=True)
        if name == "1b-scan":
            layers = xd.scan_layers(model["layers"], recompute=False)
        step = step_of(model, cos, sin, layers, first=lambda x: x)
    else:
        torch.manual_seed(0)
        program = gpt2(tiny) if name == "gpt2" else images(name, tiny)
        model, batches = program.model.to(device).train(), program.batches
        if program.images and side != "ours":
            model = model.to(memory_format=torch.channels_last)
            batches = [(x.to(memory_format=torch.channels_last), y) for x, y in batches]
        optimizer = torch.optim.AdamW(model.parameters(), lr=program.lr)

        def step(*batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = program.loss(model, *batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    batches = [tuple(t.to(device) for t in batch) for batch in batches]
    if side == "ours":
        return xd.compile(step, compiler_options=options), batches, step
    if side == "torch.compile":
        # As its guides have it: forward and backward by the compiler, the optimizer by its own.
        if name in LLAMA:
            for layer in model["layers"]:
                layer.compile()
        else:
            model.compile()
    return step, batches, None


def jax_step(name: str, tiny: bool) -> tuple[Any, list[Any]]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from pods import in_jax

    model, batches, sizes = llama(name, tiny)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("dp", "tp"))
    jitted, (params, state, *_) = in_jax.step_of(sizes, mesh, sizes.batch)
    values = {
        "embedding": model["embedding"].weight,
        "output": model["output"].weight.t(),
        "norm": model["norm"].weight,
    }
    for key in params.keys() - values.keys():
        owners = [
            getattr(layer.feed_forward if key in ("w1", "w2", "w3") else layer, key).weight
            for layer in model["layers"]
        ]
        values[key] = torch.stack([w.t() if w.ndim == 2 else w for w in owners])
    put = lambda value, like: jax.device_put(value, like.sharding)
    arrays = {key: put(values[key].detach().numpy(), params[key]) for key in params}
    zeros = jax.tree.map(lambda like: put(np.zeros(like.shape, like.dtype), like), state)
    del model, values
    kept: list[Any] = [arrays, zeros]

    def step(tokens: Any, targets: Any) -> Any:
        loss, *kept[:] = jitted(*kept, tokens, targets)
        return loss

    return step, [tuple(jnp.asarray(t.numpy(), jnp.int32) for t in batch) for batch in batches]


def measured(
    name: str, side: str, tiny: bool, device: str, rounds: int, options: dict[str, Any]
) -> dict[str, Any]:
    plain: Any = None
    if side == "jax":
        step, batches = jax_step(name, tiny)
    else:
        step, batches, plain = torch_step(name, side, tiny, device, options)

    def timed(i: int) -> tuple[float, float]:
        start = time.perf_counter()
        loss = float(step(*batches[i % COMPARED]))
        return time.perf_counter() - start, loss

    first = [timed(i) for i in range(COMPARED)]
    found: dict[str, Any] = {"program": name, "side": side, "losses": [loss for _, loss in first]}
    found["first_s"], found["second_s"] = first[0][0], first[1][0]
    found["step_ms"] = 1000 * statistics.median(timed(i)[0] for i in range(rounds))
    start = time.perf_counter()
    for i in range(rounds):
        loss = step(*batches[i % COMPARED])
    float(loss)
    found["unread_step_ms"] = 1000 * (time.perf_counter() - start) / rounds
    found["peak_gib"] = peak(side, device) / 2**30
    if plain is not None:
        found |= plan_of(plain, batches[0], options)
    return found


def peak(side: str, device: str) -> int:
    """Bytes of the device's memory that the process had at the most."""
    if side in ("ours", "jax"):
        import jax

        stats = jax.devices()[0].memory_stats() or {}
        return stats.get("peak_bytes_in_use", 0)
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def plan_of(step: Any, batch: Batch, options: dict[str, Any]) -> dict[str, Any]:
    import xla_dtensor as xd

    report = xd.plan(step, *batch, compiler_options=options)
    print(report, file=sys.stderr)
    return {
        "planned_gib": report.memory.needed / 2**30,
        "bound_ms": 1000 * report.bound if report.bound else None,
        "bounds_ms": {k: round(1000 * v, 2) for k, v in report.seconds.items()},
        "scheduled_ms": 1000 * report.scheduled if report.scheduled else None,
        "tflop": report.flops / 1e12,
    }


def in_a_process(name: str, side: str, given: argparse.Namespace) -> dict[str, Any]:
    """What a side says, or why it says nothing."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", name, side]
    command += ["--rounds", str(given.rounds), "--device", given.device]
    command += ["--tiny"] if given.tiny else []
    command += [f"--option={one}" for one in given.option]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=given.limit)
    except subprocess.TimeoutExpired:
        return {"program": name, "side": side, "failed": f"took over {given.limit} s"}
    if given.json:
        with Path(f"{given.json}.err").open("a") as file:
            file.write(f"--- {name} {side}\n{done.stderr[-6000:]}\n")
    with contextlib.suppress(IndexError, json.JSONDecodeError):
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
    return {"program": name, "side": side, "failed": f"{done.returncode}: {last[:300]}"}


def row(found: dict[str, Any], losses: list[float] | None) -> str:
    start = f"| {found['program']} | {found['side']} | "
    if "failed" in found:
        return f"{start}{found['failed']} |"
    off = max(map(lambda a, b: abs(a - b) / abs(b), found["losses"], losses)) if losses else None
    cells = [f"{found[key]:.1f}" for key in ("step_ms", "unread_step_ms", "first_s", "second_s")]
    cells += [f"{found['peak_gib']:.2f}", "" if off is None else f"{off:.0e}"]
    cells += [
        f"{found[key]:.2f}" if found.get(key) else ""
        for key in ("planned_gib", "bound_ms", "scheduled_ms")
    ]
    return start + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=180, help="seconds for a side")
    parser.add_argument("--device", default="cuda", help="torch's name of it: cuda, cpu")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--json", help="keep what was found, a line each")
    parser.add_argument("--option", action="append", default=[], help="of XLA's, NAME=VALUE, ours")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        options = {name: json.loads(v) for name, _, v in (o.partition("=") for o in given.option)}
        name, side = given.one
        found = measured(name, side, given.tiny, given.device, given.rounds, options)
        print(json.dumps(found))
        return
    heads = "program, side, step ms, unread ms, first call s, second s, peak GiB, losses off"
    heads += ", planned GiB, bound ms, scheduled ms"
    print(f"| {heads.replace(', ', ' | ')} |")
    print(f"|---|---|{'---:|' * heads.count(',')}"[:-5])
    for name in given.programs:
        losses = None
        for side in given.sides:
            if (side == "jax" and name not in LLAMA) or (side[:5] == "torch" and name == "1b-scan"):
                continue
            found = in_a_process(name, side, given)
            if side == "torch":
                losses = found.get("losses")
            if given.json:
                with Path(given.json).open("a") as file:
                    file.write(json.dumps(found) + "\n")
            print(row(found, losses), flush=True)


if __name__ == "__main__":
    main()
