"""How soon after Enter: ordinary programs of ordinary libraries, eagerly, on one simulated device.

    python benchmarks/first_result.py                       # all, each in fresh processes
    python benchmarks/first_result.py --only vit generate --base 4752008

For each program, in seconds / CPU seconds of all threads, without imports and without the model's
construction:

- first, second: its first two calls (training steps; generations of 64 tokens), nothing kept
- programs: how many XLA compiled in these two calls
- later: a call when everything has been compiled, the faster of two
- kept: the first call in a process that finds the programs that an earlier one has kept
- CPU torch: its first call there

``--base`` takes the figures of another commit, too, in turns. What it needs beside the libraries'
environment (`make env-libraries`): timm and botorch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkouts import ROOT, checkout

CALLS = 4


def _training(forward: Callable[[], Any], optimizer: Any) -> Callable[[], float]:
    """Steps of the optimizer by a loss."""

    def step() -> float:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _timm(name: str) -> Callable[[str], Callable[[], float]]:
    def program(device: str) -> Callable[[], float]:
        import timm
        import torch

        model = timm.create_model(name, num_classes=10).to(device)
        x, target = torch.randn(2, 3, 224, 224).to(device), torch.tensor([1, 2]).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return _training(lambda: torch.nn.functional.cross_entropy(model(x), target), optimizer)

    return program


def _generation(**how: Any) -> Callable[[str], Callable[[], float]]:
    """64 tokens of a GPT-2 of four layers."""

    def program(device: str) -> Callable[[], float]:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": 1000, "n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 256}
        config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)
        model = GPT2LMHeadModel(config).eval().to(device)
        prompt = torch.randint(0, 1000, (1, 10)).to(device)
        mask = torch.ones_like(prompt)

        def generate() -> float:
            tokens = model.generate(
                prompt, attention_mask=mask, max_new_tokens=64, pad_token_id=0, **how
            )
            return tokens.cpu().sum().item()

        return generate

    return program


def _transformer(device: str) -> Callable[[], float]:
    """torch's own, with its dropout."""
    import torch

    model = torch.nn.Transformer(64, 4, 2, 2, 128, batch_first=True).to(device)
    source, target = torch.randn(4, 10, 64).to(device), torch.randn(4, 8, 64).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    return _training(lambda: model(source, target).square().mean(), optimizer)


def _acquisition(device: str) -> Callable[[], float]:
    """A Gaussian process, and the gradient of where to look next."""
    import torch
    from botorch.acquisition import LogExpectedImprovement
    from botorch.models import SingleTaskGP

    x = torch.rand(10, 2, dtype=torch.float64).to(device)
    y = (x**2).sum(-1, keepdim=True)
    start = torch.rand(5, 1, 2, dtype=torch.float64).to(device)

    def evaluate() -> float:
        process = SingleTaskGP(x, y).to(device).eval()
        candidates = start.clone().requires_grad_()
        value = LogExpectedImprovement(process, best_f=y.max())(candidates).sum()
        value.backward()
        return value.item() + candidates.grad.sum().item()

    return evaluate


PROGRAMS: dict[str, Callable[[str], Callable[[], float]]] = {
    "vit": _timm("vit_tiny_patch16_224"),
    "efficientnet": _timm("efficientnet_b0"),
    "convnext": _timm("convnext_atto"),
    "generate": _generation(do_sample=False),
    "generate, growing cache": _generation(do_sample=False, cache_implementation="dynamic"),
    "generate, sampling": _generation(do_sample=True, top_k=50),
    "nn.Transformer": _transformer,
    "acquisition": _acquisition,
}


def child(name: str, device: str) -> dict[str, Any]:
    """Take the figures of a program, in this process."""
    os.environ["NPROC"] = "64"
    import jax
    import torch

    import xla_dtensor  # noqa: F401

    compilations: list[str] = []
    # A function of this file would be found running in traces, as code of the step's own, and each
    # trace be made again for it.
    text = "lambda event, *_, **__: 'backend_compile' in event and seen.append(event)"
    jax.monitoring.register_event_duration_secs_listener(eval(text, {"seen": compilations}))
    torch.manual_seed(0)
    call = PROGRAMS[name](device)
    times, compiled, values = [], [], []
    for _ in range(CALLS):
        compilations.clear()
        begin = time.perf_counter(), time.process_time()
        values.append(call())
        times.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        compiled.append(len(compilations))
    return {"times": times, "compiled": compiled, "values": values}


def run(root: Path, name: str, device: str, cache: str) -> dict[str, Any]:
    """The same in a fresh process, with the package of ``root``."""
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "XLA_DTENSOR_CACHE": cache}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, __file__, "--child", name, "--device", device]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def figures(root: Path, name: str) -> list[str]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        cold, kept = (run(root, name, "xla", folder) for _ in range(2))
    cpu = run(root, name, "cpu", "off")
    if "sampling" not in name and "Transformer" not in name:  # those draw other numbers
        for ours, want in zip(cold["values"], cpu["values"], strict=True):
            if not abs(ours - want) <= 1e-2 * max(1, abs(want)):
                raise SystemExit(f"{name}: {cold['values']}, on the CPU {cpu['values']}")
    first, second, *later = cold["times"]
    programs = f"{cold['compiled'][0]} + {cold['compiled'][1]}"
    numbers = [first, second, min(later), kept["times"][0], cpu["times"][0]]
    texts = [" / ".join(f"{number:.2f}" for number in both) for both in numbers]
    return [*texts[:2], programs, *texts[2:]]


def main() -> None:
    """The table, as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--base", help="another commit")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="xla", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.device)))
        return
    print("| program | first | second | programs | later | kept | CPU torch |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    with contextlib.ExitStack() as stack:
        sides = {"": ROOT}
        if options.base:
            sides[f", {options.base}"] = stack.enter_context(checkout(options.base))
        for name in options.only:
            for side, root in sides.items():
                row = " | ".join(figures(root, name))
                print(f"| {name}{side} | {row} |", flush=True)


if __name__ == "__main__":
    main()
