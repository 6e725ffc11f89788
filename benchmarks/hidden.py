"""How much of a training step's communication is hidden, by default and with the options of XLA's
that MaxText has published, next to a hand-written JAX step of the same. Nothing is run.

    python benchmarks/hidden.py --topology h100:8x8 --mesh dp=8,tp=8                 # 8 minutes
    python benchmarks/hidden.py --topology v5e:4x4 --mesh dp=4,tp=4 --model 1b       # libtpu
    python benchmarks/hidden.py --loop --layers 4 --only none pipelined

By `xd.plan`'s estimate of XLA's own order of instructions: how long the step takes, and how long of
that a device waits for collectives. What is planned is `pod_llama.py`'s step; what it needs is in
docs/pods.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "64")

import jax
from pods import in_jax, in_torch
from pods.sizes import MODELS, Sizes

# https://github.com/AI-Hypercomputer/maxtext: benchmarks/xla_flags_library.py for TPUs, the scripts
# in src/MaxText/configs/gpu for GPUs.
TPU: dict[str, dict[str, Any]] = {
    "none": {},
    "collective fusion": {
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_enable_async_all_gather": True,
    },
    "and of all-reduces": {
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_enable_async_all_gather": True,
        "xla_enable_async_all_reduce": True,
    },
    # Products in a ring: of what a device has while it gets the next piece. By itself libtpu
    # chooses these for large products.
    "no collective matmul": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000},
    "collective matmul": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 0},
    "of sums, too": {
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": 0,
        "xla_tpu_enable_windowed_einsum_for_all_gather": True,
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": True,
    },
}
_PIPELINED = {
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
}
_NOT_PIPELINED = dict.fromkeys(_PIPELINED, False)
_ORDERED = {"xla_gpu_enable_latency_hiding_scheduler": True}
GPU: dict[str, dict[str, Any]] = {
    "none": _NOT_PIPELINED,
    "pipelined": _PIPELINED,  # ours by default
    "MaxText": {
        **_ORDERED,
        **_PIPELINED,
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_all_gather_combine_threshold_bytes": 2**30,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**30 // 32,
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**33,
    },
    "uncombined": {
        **_ORDERED,
        **_NOT_PIPELINED,
        "xla_gpu_all_gather_combine_threshold_bytes": 1,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    },
    "both": {
        **_ORDERED,
        **_PIPELINED,
        "xla_gpu_all_gather_combine_threshold_bytes": 1,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    },
    # Products in a ring: of what a device has while it gets the next piece.
    "collective matmul": {**_PIPELINED, "xla_gpu_threshold_for_windowed_einsum_mib": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="h100:8x8")
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--loop", action="store_true", help="no scan")
    parser.add_argument("--sequence-parallel", action="store_true", help="the stream over tp, too")
    parser.add_argument("--only", nargs="+", choices=(*TPU, *GPU))
    parser.add_argument("--side", choices=("ours", "jax"), action="append")
    given = parser.parse_args()
    mesh = {name: int(n) for name, _, n in (d.partition("=") for d in given.mesh.split(","))}
    own: dict[str, Any] = {
        "batch": given.batch,
        "loop": given.loop,
        "sequence_parallel": given.sequence_parallel,
    }
    sizes = Sizes(**MODELS[given.model], **own)
    if given.layers is not None:
        sizes = dataclasses.replace(sizes, layers=given.layers)
    table = GPU if given.topology.startswith(("h", "a", "b", "g", "r")) else TPU
    waits = " | ".join(f"waits for {dim}" for dim in mesh)
    lines = [f"| options | side | in XLA's order | {waits} | memory |"]
    lines.append("|---|---|---:|" + "---:|" * (len(mesh) + 1))
    for name, options in table.items():
        if given.only and name not in given.only:
            continue
        of_one = dataclasses.replace(sizes, options=tuple(options.items()))
        for side in given.side or ("ours", "jax"):
            try:
                found = (
                    in_torch.planned(of_one, given.topology, mesh, None)
                    if side == "ours"
                    else in_jax.planned(of_one, given.topology, mesh)
                )
            except jax.errors.JaxRuntimeError as error:
                lines.append(f"| {name} | {side} | refused: {str(error).splitlines()[0]} |")
            else:
                exposed = [f"{1e3 * found['exposed'].get(dim, 0.0):.1f} ms" for dim in mesh]
                lines.append(
                    f"| {name} | {side} | {1e3 * found['scheduled']:.0f} ms | "
                    f"{' | '.join(exposed)} | {found['memory'] / 2**30:.2f} GiB |"
                )
            print(lines[-1], flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
