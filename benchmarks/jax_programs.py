"""Torch modules in JAX programs: xd.jax beside torchax, the same modules in processes of their own.

    python -m benchmarks.jax_programs                          # xd.jax
    python -m benchmarks.jax_programs --runs 3 --torchax PATH/python    # and torchax, in its own

Per module: how far the loss and its gradients by the parameters are from CPU torch's in double
precision, the time to trace ``jax.jit(jax.value_and_grad(loss))``, the first call, and a step. The
gradients of torchax are JAX's, of what it has traced.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any


def modules() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """By name what makes a module and its input."""
    import torch
    from torch import nn

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    class Straight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x) * 4
            return self.second(Round.apply(y) + (y.abs().floor() - y).detach())

    class LSTM(nn.LSTM):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(x)[0]
            return out

    def encoder(layers: int) -> nn.Module:
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def convolutions() -> nn.Module:
        layers: list[nn.Module] = []
        for i in range(8):
            layers += [nn.Conv2d(32 if i else 3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()]
        return nn.Sequential(*layers)

    def mlp() -> nn.Module:
        return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(256, 256), nn.GELU())))

    return {
        "8 linear layers": lambda: (mlp(), torch.randn(64, 256)),
        "8 convolutions": lambda: (convolutions(), torch.randn(8, 3, 32, 32)),
        "encoder, 4 layers": lambda: (encoder(4), torch.randn(8, 32, 128)),
        "encoder, 12 layers": lambda: (encoder(12), torch.randn(8, 32, 128)),
        "LSTM, 2 layers": lambda: (LSTM(64, 64, 2, batch_first=True), torch.randn(8, 32, 64)),
        "autograd function, detach": lambda: (Straight(), torch.randn(64, 64)),
    }


def of_xd(module: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Parameters and a function, by xd.jax."""
    import xla_dtensor as xd

    return xd.jax.from_module(module)


def imported_torchax() -> Any:
    """The package, with the torch that is installed."""
    import torch

    # torchax 0.0.13 names overloads for named tensors, which torch 2.13 no longer has.
    packet: Any = type(torch.ops.aten.add)
    known = packet.__getattr__

    def lenient(self: Any, name: str) -> Any:
        try:
            return known(self, name)
        except AttributeError:
            if "name" in name.lower() and not name.startswith("__"):
                return object()
            raise

    packet.__getattr__ = lenient
    try:
        import torchax
        import torchax.interop

        torchax.default_env()  # which imports its operations
    finally:
        packet.__getattr__ = known
    return torchax


def of_torchax(module: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
    """The same by torchax."""
    params, apply = imported_torchax().extract_jax(module)
    return params, lambda p, x: apply(p, (x,))


def measure(which: str) -> None:
    """Print a line of JSON per module."""
    warnings.simplefilter("ignore")
    for name, make in modules().items():
        found: dict[str, Any] = {"which": which, "name": name}
        try:
            found |= measured(make, of_xd if which == "xd" else of_torchax)
        except Exception as error:  # that one of the two can't do it is a result
            found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(json.dumps(found), flush=True)


def measured(make: Callable[[], tuple[Any, Any]], of: Callable[[Any], Any]) -> dict[str, float]:
    """The times of a module that ``of`` makes a function of, and how far off its results are."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch

    torch.manual_seed(0)
    module, x = make()
    weights = torch.randn_like(module(x))
    params, apply = of(module)
    array, scale = jnp.asarray(x.numpy()), jnp.asarray(weights.numpy())
    loss = lambda p, x: (apply(p, x) * scale).mean()

    def trace() -> tuple[Any, float]:
        begin = time.perf_counter()
        traced = jax.jit(jax.value_and_grad(lambda p, x: loss(p, x))).trace(params, array)
        return traced, time.perf_counter() - begin

    traced, first = trace()  # which fills caches, too
    _, again = trace()
    begin = time.perf_counter()
    run = traced.lower().compile()
    value, got = jax.block_until_ready(run(params, array))
    called = first + time.perf_counter() - begin
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        jax.block_until_ready(run(params, array))
        times.append(time.perf_counter() - begin)
    module.double().zero_grad()
    wanted = (module(x.double()) * weights).mean()
    wanted.backward()
    exact = {n: p.grad.numpy() for n, p in module.named_parameters()}
    off = max(float(np.abs(np.asarray(got[n], np.float64) - g).max()) for n, g in exact.items())
    return {
        "trace": first,
        "again": again,
        "first": called,
        "step": statistics.median(times),
        "loss": abs(float(value) - wanted.item()),
        "gradient": off / max(float(np.abs(g).max()) for g in exact.values()),
    }


def medians(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of the runs of each module on each side one row, with the medians of its numbers."""
    of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        of.setdefault((row["which"], row["name"]), []).append(row)
    for same in of.values():
        numbers = same[0].keys() - {"which", "name", "error"}
        middle = {key: statistics.median(row[key] for row in same) for key in numbers}
        yield same[0] | middle


def table(rows: list[dict[str, Any]]) -> str:
    """A markdown table of what was measured."""
    lines = [
        "| module | | loss off | gradient off | trace (first, again) | first call | step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: list(modules()).index(r["name"])):
        begin = f"| {row['name']} | {row['which']} | "
        if "error" in row:
            lines.append(f"{begin}{row['error']} | | | | |")
            continue
        lines.append(
            f"{begin}{row['loss']:.0e} | {row['gradient']:.0e} | {row['trace'] * 1e3:.0f} ms, "
            f"{row['again'] * 1e3:.0f} ms | {row['first']:.2f} s | {row['step'] * 1e3:.2f} ms |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torchax", help="the python of an environment that has torchax")
    parser.add_argument("--runs", type=int, default=1, help="of each, in turns; medians of times")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    runs = [("xd", sys.executable)]
    if arguments.torchax:
        runs.append(("torchax", arguments.torchax))
    rows = []
    for which, python in runs * arguments.runs:
        own = {"JAX_ENABLE_COMPILATION_CACHE": "0"}
        if which == "torchax":
            own["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        command = [python, "-m", "benchmarks.jax_programs", "--measure", which]
        out = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
        if out.returncode:
            raise SystemExit(out.stderr[-3000:])
        rows += [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]
    print(table(list(medians(rows))))


if __name__ == "__main__":
    main()
