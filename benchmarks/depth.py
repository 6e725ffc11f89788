"""How tracing and lowering a training step grow with its depth: a Python loop over layers and
`xd.scan_layers`, next to hand-written JAX that unrolls and JAX that scans.

    python benchmarks/depth.py                   # a table; --layers 4 32, --no-optimizer, --json

A pre-norm MLP block of width 64, AdamW, on a 2x4 mesh of simulated devices. Nothing is compiled or
run. Times are the process's CPU seconds: other programs of the machine weigh less on them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
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


def ours(depth: int, scan: bool, optimize: bool) -> Callable[[], Any]:
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


def in_jax(depth: int, scan: bool, optimize: bool) -> Callable[[], Any]:
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

    if scan:
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
        first = jax.tree.map(lambda m, g: m + 0.1 * (g - m), first, grads)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)

        def updated(p: Any, m: Any, v: Any) -> Any:
            return p * (1 - 1e-5) - 1e-3 * (m / one) / (jnp.sqrt(v / two) + 1e-8)

        return loss, jax.tree.map(updated, params, first, second), (first, second, count)

    return lambda: jax.jit(step, donate_argnums=(0, 1) if optimize else ()).lower(params, state, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--optimizer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    xd.init_device_mesh("xla", (2, 4))  # starts JAX with eight devices
    found = []
    for depth in given.layers:
        for name, make in (("xla_dtensor", ours), ("JAX", in_jax)):
            for scan in (False, True):
                if depth == given.layers[0]:
                    make(2, scan, given.optimizer)()  # what a process does once
                run = make(depth, scan, given.optimizer)
                gc.collect()
                start = time.process_time()
                lowered = run()
                seconds = time.process_time() - start
                lines = lowered.as_text().count(" = ")
                found.append(
                    {
                        "layers": depth,
                        "what": f"{name}, {'scan' if scan else 'loop'}",
                        "seconds": round(seconds, 3),
                        "instructions": lines,
                    }
                )
                if not given.json:
                    row = found[-1]
                    print(f"{depth:>4} layers  {row['what']:<18} {seconds:>7.2f} s  {lines:>7}")
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
