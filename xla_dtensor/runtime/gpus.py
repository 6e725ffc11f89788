"""Describes NVIDIA GPUs that aren't here to XLA's GPU compiler.

It is part of JAX's CUDA plugin, and needs neither a GPU nor a driver.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
from dataclasses import dataclass
from typing import Any

from xla_dtensor.base import jax_private
from xla_dtensor.errors import TopologyError
from xla_dtensor.runtime.chips import GPUS


@dataclass(frozen=True)
class _Processor:
    """What kernels are made for. Figures of CUDA's: its programming guide's table by compute
    capability, and NVIDIA's pages for each GPU (cores, clock, cache). XLA has the same in
    xla/backends/gpu/target_config/specs.

    Attributes:
        description: as CUDA calls it.
        capability: the compute capability.
        cores: multiprocessors.
        clock: GHz.
        cache: bytes of the second level.
        units: float32 units of a core.
        shared: bytes of memory that a core's threads share.
        threads: that a core has at a time.
    """

    description: str
    capability: tuple[int, int]
    cores: int
    clock: float
    cache: int
    units: int = 128
    shared: int = 228 * 1024
    threads: int = 2048

    def described(self, memory: float, bandwidth: float) -> str:
        """The text.

        Args:
            memory: bytes.
            bandwidth: bytes per second.
        """
        major, minor = self.capability
        # Hopper's and later ones' own instructions (sm_90a), which their products are made of.
        own = "feature_extension: ACCELERATED_FEATURES" if self.capability in _OWN else ""
        return (
            "gpu_device_info { threads_per_warp: 32 threads_per_block_limit: 1024 "
            f"threads_per_core_limit: {self.threads} shared_memory_per_block: {48 * 1024} "
            f"shared_memory_per_core: {self.shared} "
            # One of the kibibytes is the system's.
            f"shared_memory_per_block_optin: {self.shared - 1024} "
            f"core_count: {self.cores} fpus_per_core: {self.units} "
            "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
            "registers_per_core_limit: 65536 registers_per_block_limit: 65536 "
            f"memory_bandwidth: {round(bandwidth)} l2_cache_size: {self.cache} "
            f"clock_rate_ghz: {self.clock} device_memory_size: {round(memory)} "
            f"cuda_compute_capability {{ major: {major} minor: {minor} {own} }} }} "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
            f'device_description_str: "{self.description}"'
        )


_OWN = ((9, 0), (10, 0), (10, 3))
_AMPERE: Any = {"units": 64, "shared": 164 * 1024}
_MIB = 2**20

_PROCESSORS = {
    "a100_40": _Processor("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41, 40 * _MIB, **_AMPERE),
    "a100": _Processor("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 40 * _MIB, **_AMPERE),
    "a100_pcie": _Processor("NVIDIA A100 80GB PCIe", (8, 0), 108, 1.41, 40 * _MIB, **_AMPERE),
    "h100": _Processor("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 50 * _MIB),
    "h100_pcie": _Processor("NVIDIA H100 PCIe", (9, 0), 114, 1.755, 50 * _MIB),
    "h200": _Processor("NVIDIA H200", (9, 0), 132, 1.98, 50 * _MIB),
    "b200": _Processor("NVIDIA B200", (10, 0), 148, 1.965, 132_644_864),
    # XLA's own description of a b300 has 158 cores; by NVIDIA's rates of products it is 148.
    "b300": _Processor("NVIDIA B300", (10, 3), 148, 1.965, 135_528_448),
    "gb200": _Processor("NVIDIA GB200", (10, 0), 152, 2.062, 135_528_448),
    "gb300": _Processor("NVIDIA GB300", (10, 3), 152, 2.07, 135_528_448),
    "rtx6000pro": _Processor(
        *("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 2.6, 128 * _MIB),
        shared=128 * 1024,
        threads=1536,
    ),
}


def devices(name: str, kind: str, hosts: int, each: int) -> list[Any]:
    """Devices that programs can be compiled for, each host's together.

    Args:
        name: of the topology, for messages.
        kind: of the GPUs.
        hosts: how many.
        each: how many GPUs a host has.

    Raises:
        TopologyError: XLA's GPU compiler isn't installed, or its version isn't JAX's.
    """
    from jax.experimental import topologies

    _start_compiler(name)
    found = topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind,
        target_config=described(kind),
        topology=f"1x{hosts}x{each}",
    )
    return list(found.devices)


COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0}
"""XLA's options for GPUs that aren't here: not to run variants of kernels to see which is
fastest."""

_NO_KERNEL = ("No supported config found", "Couldn't find output tile sizes")
_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}


def compiled(lowered: Any, options: dict[str, Any] | None) -> Any:
    """A program compiled; without products by Triton where XLA finds no kernel for one, as it does
    by running them, which it can't on GPUs that aren't here.

    Args:
        lowered: a ``jax.stages.Lowered``.
        options: of the compiler.
    """
    import jax

    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if not any(words in str(error) for words in _NO_KERNEL):
            raise
    return lowered.compile({**_WITHOUT_TRITON, **(options or {})})


def described(kind: str) -> str:
    """What XLA's GPU compiler is told of a kind of GPUs: a GpuTargetConfigProto, as text
    (xla/stream_executor/device_description.proto)."""
    chip = GPUS[kind]
    return _PROCESSORS[kind].described(chip.memory, chip.memory_bandwidth)


def _start_compiler(name: str) -> None:
    """Have JAX load its CUDA plugin, which refuses to be loaded where there is no CUDA unless JAX
    is told to compute on something else."""
    import jax

    there = installed()
    wants = f"topology {name!r} needs XLA's GPU compiler, which needs no GPU"
    if not there:
        raise TopologyError(
            f"{wants}: pip install 'xla_dtensor[gpu-plan]' (JAX's own wheels jax-cuda13-plugin and "
            "jax-cuda13-pjrt of JAX's version, 140 MB; with CUDA 12 jax-cuda12-plugin)"
        )
    if not jax_private.has_visible_nvidia_gpu():
        if jax.config.jax_platforms is None:
            jax.config.update("jax_platforms", "cpu")
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # JAX 0.9 asks this alone
    jax_private.discover_plugins()
    if "cuda" not in jax_private.topology_factories:
        # JAX has looked for plugins already, and this one has refused.
        importlib.import_module(f"jax_plugins.{there[0]}").initialize()
    if "cuda" not in jax_private.topology_factories:
        raise TopologyError(
            f"{wants}: jax_plugins.{there[0]} is there, and JAX {jax.__version__} doesn't take "
            "it; its version has to be JAX's: pip install 'xla_dtensor[gpu-plan]'"
        )


def compute_elsewhere() -> None:
    """Where the compiler is installed and there is no GPU, let JAX compute on CPUs without a try at
    CUDA, of which it logs that it has failed, in thirty lines; unless somebody has said what to
    compute on, or there is something else."""
    import jax

    if jax.config.jax_platforms is None and installed() and not may_accelerate():
        jax.config.update("jax_platforms", "cpu")


def may_accelerate() -> bool:
    """Whether JAX may find something else than CPUs: a chip, or a plugin that isn't CUDA's, if
    nobody has said what to compute on. It isn't started."""
    import jax

    if jax.config.jax_platforms:
        return jax.config.jax_platforms.split(",")[0] != "cpu"
    others = {entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")}
    if importlib.util.find_spec("jax_plugins") is not None:
        import jax_plugins

        others |= {module.name for module in pkgutil.iter_modules(jax_plugins.__path__)}
    if others - {*_PLUGINS}:
        return True
    chips, _ = jax_private.tpu_chips()
    return bool(chips) or bool(installed() and jax_private.has_visible_nvidia_gpu())


_PLUGINS = ("xla_cuda13", "xla_cuda12")


def installed() -> list[str]:
    """The names of JAX's CUDA plugins that are there."""
    if importlib.util.find_spec("jax_plugins") is None:
        return []
    return [p for p in _PLUGINS if importlib.util.find_spec(f"jax_plugins.{p}") is not None]
