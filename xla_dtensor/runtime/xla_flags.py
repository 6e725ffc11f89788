"""Flags of XLA by JAX version: XLA ends the process at a flag that it doesn't know."""

from __future__ import annotations

import importlib.metadata
import os

QUICK_COMPILES = (
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
"""For programs that are compiled once and run once: a fifth of the compile time."""

OWN_BFLOAT16_PRODUCTS = "--xla_cpu_experimental_ynn_fusion_type="
"""Keeps XLA's CPU backend from leaving some products of bfloat16 to a library that then doesn't
take them ("Unsupported element type for DotThunk: BF16 x BF16 = F32")."""

EXCESS_PRECISION = "xla_allow_excess_precision"
ROUNDED = f"--{EXCESS_PRECISION}=false"
"""Lets XLA's GPU compiler round where torch does. By default it leaves out a rounding to 16 or 8
bits that is followed by a conversion back: ``x.bfloat16().float()`` would be ``x``. On an H200 a
training step takes no longer with it (`benchmarks/README.md`)."""

PIPELINED = (
    "xla_gpu_enable_pipelined_all_gather",
    "xla_gpu_enable_pipelined_reduce_scatter",
    "xla_gpu_enable_pipelined_all_reduce",
)
"""Let XLA's GPU compiler run collectives of one round of a loop beside the next or the last one's
computation: of a loop over layers it gathers the next layer's weights beside this one's products.
MaxText and NVIDIA publish them (`docs/pods.md` has what they hide)."""

LLVM_ON_CPUS = "--xla_backend_extra_options=-disable-lsr,-unroll-full-max-count=1"
"""Leaves out the pass of LLVM that rewrites addresses in loops (loop strength reduction): it makes
some large fused loops of XLA's CPU backend read the wrong elements
(`base/xla_faults.py:WRONG_ADDRESSES`). And loops stay loops: XLA writes one for each dim, and LLVM
would write those of 8 or 10 rounds out, one in the other. That took it seconds, and no step is
faster for it (`docs/design.md`)."""

# The first JAX without the flag. The others were tried on 0.9.0, 0.10.2, 0.11.2 and 0.12.0.1.
_GONE = {
    "--xla_cpu_use_fusion_emitters": (0, 11),
    # They are in jaxlib 0.9.0, 0.10.2 and 0.11.2; of 0.12 nobody has looked.
    **{f"--{name}": (0, 12) for name in PIPELINED},
}


def options(*names: str) -> dict[str, bool]:
    """Switches as options of a compiler, turned on, but those that this JAX doesn't know."""
    version = _version()
    return {name: True for name in names if version < _GONE.get(f"--{name}", (version[0] + 1,))}


def _version() -> tuple[int, ...]:
    return tuple(map(int, importlib.metadata.version("jax").split(".")[:2]))


def add(*flags: str) -> None:
    """Add flags to ``XLA_FLAGS``, but those that are there with any value, and those that this JAX
    doesn't know. To be called before JAX's backend starts.

    Example::

        from xla_dtensor.runtime import xla_flags

        xla_flags.add(*xla_flags.QUICK_COMPILES)
    """
    version = _version()
    there = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.split("=")[0] for flag in there}
    for flag in flags:
        name = flag.split("=")[0]
        if name not in names and version < _GONE.get(name, (version[0] + 1,)):
            there.append(flag)
    os.environ["XLA_FLAGS"] = " ".join(there)
