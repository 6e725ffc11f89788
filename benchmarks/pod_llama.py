"""Llama 3 and Mixtral on pods that aren't here: `xd.plan` of a training step next to a hand-written
JAX step of the same, both compiled by the compiler of TPUs or GPUs. Nothing is run.

    python benchmarks/pod_llama.py --topology v5e:16x16 --mesh dp=32,tp=8     # --side, --layers
    python benchmarks/pod_llama.py --model 70b --topology v5p:8x8x8 --mesh dp=64,tp=8
    python benchmarks/pod_llama.py --model 70b --topology h100:32x8 --mesh dp=32,tp=8
    python benchmarks/pod_llama.py --model mixtral --topology h100:4x8 --mesh dp=4,ep=8

FSDP x tensor parallelism: batch over dp, heads and feed-forward over tp, each weight's other dim
over dp. Float32 parameters and AdamW state, bfloat16 computation, S = 8192, one sequence per dp
device; the layers are a scan, each computed again in backward. Mixtral's experts over ep, their
other dim over dp, all else and the batch over both. Needs libtpu, or XLA's GPU compiler and cuDNN
(docs/pods.md).

The JAX step is what is read here: `jax.checkpoint` as it is (``--no-barrier`` for
``prevent_cse=False``), the residual stream laid out once. ``--sequence-parallel`` shards the stream
over tp in both, after each of its sums; ``--loop`` has no scan in either, and lays the stream out
there, too; ``--fully-shard`` lays the layers' column-wise weights out as `fully_shard` over
``ColwiseParallel`` does, their outputs over tp and dp.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")
os.environ["XLA_DTENSOR_CACHE"] = "off"  # how long compiling takes is measured

from pods import in_jax, in_torch
from pods.sizes import MODELS, Sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e:16x16")
    parser.add_argument("--mesh", default="dp=32,tp=8")
    parser.add_argument("--side", choices=("ours", "jax"), action="append")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--batch", type=int, default=1, help="sequences per dp device")
    parser.add_argument("--sequence-parallel", action="store_true", help="the stream over tp, too")
    parser.add_argument("--fully-shard", action="store_true", help="columns over tp and dp")
    parser.add_argument("--loop", action="store_true", help="no scan")
    parser.add_argument("--hsdp", choices=("shards", "whole"), default="", help="see pods/sizes.py")
    parser.add_argument("--keep", action="store_true", help="keep what backward needs, in both")
    parser.add_argument("--option", action="append", default=[], help="of XLA's: NAME=VALUE")
    parser.add_argument("--no-barrier", action="store_true", help="JAX with prevent_cse=False")
    parser.add_argument("--report", help="where to save our report: .json, .txt or .png")
    given = parser.parse_args()
    sizes = Sizes(
        **MODELS[given.model],
        batch=given.batch,
        sequence_parallel=given.sequence_parallel,
        loop=given.loop,
        fully_shard=given.fully_shard,
        barrier=not given.no_barrier,
        keep=given.keep,
        hsdp=given.hsdp,
        options=tuple(
            (name, json.loads(value)) for name, value in (one.split("=", 1) for one in given.option)
        ),
    )
    own = {"layers": given.layers, "seq": given.seq}
    sizes = dataclasses.replace(sizes, **{k: v for k, v in own.items() if v is not None})
    mesh = {name: int(size) for name, _, size in (d.partition("=") for d in given.mesh.split(","))}
    found = {}
    for side in given.side or ("ours", "jax"):
        start = time.process_time(), time.perf_counter()
        if side == "ours":
            found[side] = in_torch.planned(sizes, given.topology, mesh, given.report)
        else:
            found[side] = in_jax.planned(sizes, given.topology, mesh)
        took = time.process_time() - start[0], time.perf_counter() - start[1]
        found[side]["cpu_seconds"], found[side]["seconds"] = (round(t, 1) for t in took)
        found[side]["total"] = sum(found[side]["bytes"].values())
        print(side, json.dumps(found[side]), flush=True)
    if len(found) > 1:
        for name in ("memory", "total", "flops"):
            if found["jax"][name]:  # nothing moves on one device
                print(f"{name}: {found['ours'][name] / found['jax'][name]:.3f} of JAX's")


if __name__ == "__main__":
    main()
