"""What a training step of Llama 3 moves between slices of TPUs, or between hosts of GPUs, that
aren't here: HSDP next to a hand-written JAX step of the same, by the compiler of both.

    python benchmarks/slices.py --topology h100:2x8 h100:4x8        # XLA's GPU compiler, 2 minutes
    python benchmarks/slices.py --topology "v5e:4x4*2" --model 1b --layers 4  # libtpu, minutes
    python benchmarks/slices.py --topology "v5e:16x16*4"                      # 8 minutes

The mesh is (slices or hosts, devices of each): weights are sharded over the second dim and whole
along the first, as `fully_shard` lays them out on such a mesh, and the batch lies over both. What
comes in at a device over the slow network in a step is compared with JAX's, and with the least: of
``n`` slices ``2 (n - 1) / n`` times the device's shard of the gradients, in bfloat16, as the
layers compute; ``--side "jax, wide"`` is JAX's step with the embedding's gradient added up in
float32, as ours does on GPUs. Nothing is run. What it needs: docs/pods.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")

from pods import in_jax, in_torch
from pods.sizes import MODELS, Sizes

MIB, GIB = 2**20, 2**30


def domains_of(topology: str) -> tuple[int, int]:
    """The slices or hosts of a topology, and the devices of each."""
    _, shape = topology.split(":")
    if "*" in shape:
        inside, _, slices = shape.partition("*")
        each = 1
        for size in inside.split("x"):
            each *= int(size)
        return int(slices), each
    hosts, each = map(int, re.findall(r"\d+", shape))
    return hosts, each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", nargs="+", default=["h100:2x8"])
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a device")
    parser.add_argument("--side", choices=("ours", "jax", "jax, wide"), action="append")
    given = parser.parse_args()
    sizes = Sizes(**MODELS[given.model], hsdp="shards", batch=given.batch)
    if given.layers is not None:
        sizes = dataclasses.replace(sizes, layers=given.layers)
    lines = [
        "| | over the slow network | least | at least | waits for it | in XLA's order | memory |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for topology in given.topology:
        count, each = domains_of(topology)
        least = "?"  # it is our side that says
        for side in given.side or ("ours", "jax"):
            mesh = {"replicate": count, "shard": each}
            found: dict[str, Any]
            if side == "ours":
                found = in_torch.planned(sizes, topology, mesh, None)
                least = f"{found['gradient_shard'] * (count - 1) / count / MIB:,.1f} MiB"
            else:
                own = dataclasses.replace(sizes, wide_embedding=side == "jax, wide")
                found = in_jax.planned(own, topology, mesh)
            bounds, exposed = found["bounds"], found["exposed"]
            across = bounds.get("network between slices") or bounds.get("between slices")
            across = across or bounds.get("network replicate") or bounds["replicate"]
            waits = exposed.get("between slices", exposed.get("replicate", 0.0))
            lines.append(
                f"| {given.model}, {topology}, {side} | {found['slow'] / MIB:,.1f} MiB | "
                f"{least} | {1e3 * across:.1f} ms | {1e3 * waits:.1f} ms | "
                f"{1e3 * found['scheduled']:.0f} ms | {found['memory'] / GIB:.2f} GiB |"
            )
            print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
