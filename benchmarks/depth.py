"""How tracing and lowering a training step grow with its depth: a Python loop over layers and
`xd.scan_layers`, next to hand-written JAX that unrolls and JAX that scans.

    python benchmarks/depth.py     # a table; --layers 4 32, --no-optimizer, --runs 5, --json

A pre-norm MLP block of width 64, AdamW, on a 2x4 mesh of simulated devices. Nothing is compiled or
run. JAX scans over parameters that are stacked outside, too, or over each layer's own ("apart"),
which it stacks inside of the step, as `xd.scan_layers` does. The optimizer's state is there before,
as JAX's is; with "and state" the step makes it, as the first one of a training does.

Times are the process's CPU seconds: other programs of the machine weigh less on them. Each run is
at a depth of its own (32, 33, 34, ...), as JAX finds again what it has traced for another; what is
shown is the median.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import xla_dtensor as xd

WIDTH, BATCH = 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def ours(depth: int, scan: bool, optimize: bool, make_state: bool = False) -> Callable[[], Any]:
    mesh = xd.init_device_mesh("xla", (2, 4), mesh_dim_names=("dp", "tp"))
    layers = nn.ModuleList(Block() for _ in range(depth))
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        for key, p in list(module.named_parameters(recurse=False)):
            dim = dims.get(f"{name.rpartition('.')[2]}.{key}")
            placements = [xd.Replicate(), xd.Replicate() if dim is None else xd.Shard(dim)]
            laid_out = xd.distribute_tensor(p.data, mesh, placements)
            module.register_parameter(key, nn.Parameter(laid_out))

    xd.distribute_module(layers, mesh, shard)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    if optimize and not make_state:
        for p in layers.parameters():  # as a checkpoint has it
            zeros = [xd.distribute_tensor(torch.zeros(p.shape), mesh, p.placements) for _ in "12"]
            named = dict(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True))
            optimizer.state[p] = {"step": torch.ones(()), **named}
    x = torch.randn(BATCH, WIDTH)
    x = xd.distribute_tensor(x, mesh, [xd.Shard(0), xd.Replicate()])

    def step(x: Any) -> Any:
        y = x
        if scan:
            y = xd.scan_layers(layers)(y)
        else:
            for layer in layers:
                y = layer(y)
        loss = y.square().mean()
        loss.backward()
        if optimize:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return lambda: xd.compile(step).lower(x)


def in_jax(
    depth: int, scan: bool, optimize: bool, stacked_outside: bool = True
) -> Callable[[], Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "tp"))
    specs = {
        "gain": (),
        "shift": (),
        "up": (None, "tp"),
        "up_bias": ("tp",),
        "down": ("tp", None),
        "down_bias": (),
    }
    shapes = {
        "gain": (WIDTH,),
        "shift": (WIDTH,),
        "up": (WIDTH, 4 * WIDTH),
        "up_bias": (4 * WIDTH,),
        "down": (4 * WIDTH, WIDTH),
        "down_bias": (WIDTH,),
    }

    def abstract(name: str, lead: tuple[int, ...] = ()) -> Any:
        spec = jax.sharding.PartitionSpec(*(None for _ in lead), *specs[name])
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((*lead, *shapes[name]), jnp.float32, sharding=sharding)

    if scan and stacked_outside:
        params: Any = {name: abstract(name, (depth,)) for name in shapes}
    else:
        params = [{name: abstract(name) for name in shapes} for _ in range(depth)]
    state = params, params, jax.ShapeDtypeStruct((), jnp.float32)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp"))
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32, sharding=rows)

    def block(x: Any, p: Any) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centered).mean(-1, keepdims=True)
        h = centered * jax.lax.rsqrt(variance + 1e-5) * p["gain"] + p["shift"]
        h = jax.nn.relu(h @ p["up"] + p["up_bias"])
        return x + h @ p["down"] + p["down_bias"]

    def loss_of(params: Any, x: Any) -> Any:
        if scan:
            if not stacked_outside:
                params = jax.tree.map(lambda *values: jnp.stack(values), *params)
            body = jax.checkpoint(lambda x, p: (block(x, p), None))
            x = jax.lax.scan(body, x, params)[0]
        else:
            for p in params:
                x = block(x, p)
        return jnp.square(x).mean()

    def step(params: Any, state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        if not optimize:
            return loss, grads
        first, second, count = state
        count = count + 1
        one, two = 1 - 0.9**count, 1 - 0.999**count

        def updated(p: Any, m: Any, v: Any, g: Any, one: Any, two: Any) -> Any:
            m = m + 0.1 * (g - m)
            v = 0.999 * v + 0.001 * g * g
            return p * (1 - 1e-5) - 1e-3 * (m / one) / (jnp.sqrt(v / two) + 1e-8), m, v

        if not stacked_outside:  # or each is traced and lowered by itself, in twice the time
            updated = jax.jit(updated)
        new = jax.tree.map(
            lambda p, m, v, g: updated(p, m, v, g, one, two), params, first, second, grads
        )
        inner = jax.tree.structure((0, 0, 0))
        params, first, second = jax.tree.transpose(jax.tree.structure(params), inner, new)
        return loss, params, (first, second, count)

    return lambda: jax.jit(step, donate_argnums=(0, 1) if optimize else ()).lower(params, state, x)


def kinds(optimize: bool) -> dict[str, tuple[Callable[..., Any], dict[str, bool]]]:
    """What is measured: how to make it, and with which arguments."""
    found: dict[str, tuple[Callable[..., Any], dict[str, bool]]] = {
        "xla_dtensor, loop": (ours, {"scan": False}),
        "xla_dtensor, scan": (ours, {"scan": True}),
        "JAX, loop": (in_jax, {"scan": False}),
        "JAX, scan": (in_jax, {"scan": True}),
        "JAX, scan, apart": (in_jax, {"scan": True, "stacked_outside": False}),
    }
    if optimize:
        found["xla_dtensor, scan and state"] = (ours, {"scan": True, "make_state": True})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--optimizer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    xd.init_device_mesh("xla", (2, 4))  # starts JAX with eight devices
    measured = kinds(given.optimizer)
    for make, how in measured.values():
        make(2, optimize=given.optimizer, **how)()  # what a process does once
    found = []
    for depth in given.layers:
        seconds: dict[str, list[float]] = {what: [] for what in measured}
        lines = {}
        for number in range(given.runs):
            for what, (make, how) in measured.items():  # in turns
                shifted = max(2, depth + number - given.runs // 2)
                run = make(shifted, optimize=given.optimizer, **how)
                gc.collect()
                start = time.process_time()
                lowered = run()
                seconds[what].append(time.process_time() - start)
                if shifted == depth:
                    lines[what] = lowered.as_text().count(" = ")
        for what, times in seconds.items():
            median = statistics.median(times)
            found.append(
                {
                    "layers": depth,
                    "what": what,
                    "seconds": round(median, 4),
                    "instructions": lines[what],
                }
            )
            if not given.json:
                print(f"{depth:>4} layers  {what:<28} {1000 * median:>6.1f} ms  {lines[what]:>7}")
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
