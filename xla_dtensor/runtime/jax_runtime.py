"""Starts the JAX runtime, and lists its devices.

The only module that knows how XLA's devices come into being. Nothing here runs at import time:
JAX's backend starts with the first mesh or tensor.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from xla_dtensor.base import forked, jax_private
from xla_dtensor.base.config import fix
from xla_dtensor.base.tables import cache
from xla_dtensor.errors import DeviceCountError
from xla_dtensor.runtime import (
    abstract,
    agreement,
    distributed,
    gpus,
    processes,
    program_cache,
    xla_flags,
)

logger = logging.getLogger("xla_dtensor")
_start_lock = threading.Lock()

# XLA's CPU collectives wait for each other in a thread pool sized by NPROC: with more simulated
# devices than threads, unsynchronised programs deadlock in the rendezvous.
_CPU_THREADS = "64"


def keep_quiet() -> None:
    """Let XLA report errors alone, unless the user has said otherwise.

    Its partitioner warns in ordinary layouts, 600 characters at a time, of an "involuntary full
    rematerialization": that it makes a tensor whole on its way from one sharding to another. The
    level is read once, when JAX is imported.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def is_started() -> bool:
    """Whether a JAX backend runs already (then the number of devices is fixed)."""

    return jax_private.backends_are_initialized()


def start(min_cpu_devices: int = 1) -> None:
    """Start JAX's backend unless it runs; if it is the CPU's, with so many devices or more. Of
    several processes, each has its part of them.

    Raises:
        DistributedError: this is one of several processes, and they don't come together.
    """
    if forked.is_child():
        forked.refuse()
    with _start_lock:
        # Before JAX's backend starts: afterwards this process can't join others.
        distributed.initialize()
        fix("cache")
        _bound_programs()
        if is_started():
            _warn_of_roundings()
            forked.watch(jax_private.backends().values())
            return
        import jax

        os.environ.setdefault("NPROC", _CPU_THREADS)
        # LLVM also compiles for GPUs, whose kernels are another matter.
        gpu = jax_private.has_visible_nvidia_gpu()
        of_gpus = xla_flags.ROUNDED, *(f"--{name}=true" for name in xla_flags.PIPELINED)
        xla_flags.add(*(of_gpus if gpu else [xla_flags.LLVM_ON_CPUS]))
        program_cache.use()
        configured = getattr(jax.config, "jax_num_cpu_devices", -1)
        min_cpu_devices = -(-min_cpu_devices // processes.count())
        forced_by_flag = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
        if configured < min_cpu_devices and min_cpu_devices > 1 and not forced_by_flag:
            jax.config.update("jax_num_cpu_devices", min_cpu_devices)
        gpus.compute_elsewhere()
        devices = jax.devices()
        forked.watch(jax_private.backends().values())
        if processes.several():
            agreement.share_seeds()
            # One line for all of them, unless somebody wants to know.
            logger.log(
                logging.INFO if processes.index() else logging.WARNING,
                "xla_dtensor: %s, with %d of %d %s devices",
                distributed.described(),
                len(jax.local_devices()),
                len(devices),
                devices[0].platform,
            )
        elif devices[0].platform == "cpu" and len(devices) > 1:
            logger.warning("xla_dtensor: using %d simulated CPU devices", len(devices))


@functools.cache
def _warn_of_roundings() -> None:
    """XLA reads its flags once, so they are what they were when somebody else has started JAX."""
    flags = os.environ.get("XLA_FLAGS", "")
    if jax_private.has_visible_nvidia_gpu() and xla_flags.EXCESS_PRECISION not in flags:
        logger.warning(
            "xla_dtensor: JAX was started before, without XLA_FLAGS=%s: on GPUs "
            "x.bfloat16().float() is x then, where torch rounds. Set it, or use xla_dtensor first",
            xla_flags.ROUNDED,
        )


def all_devices() -> list[Any]:
    """JAX's devices, those of all processes, each process's together."""
    import jax

    return sorted(jax.devices(), key=lambda device: device.process_index)


def topology_here() -> str:
    """The name of the topology that JAX's devices are (`topologies.topology`)."""
    start()
    found = all_devices()
    return f"{found[0].platform}:{len(found)}"


def devices(ids: Sequence[int]) -> list[Any]:
    """The JAX devices numbered ``ids`` (their position in ``jax.devices()``).

    Raises:
        DeviceCountError: there are fewer devices.
    """

    topology = abstract.current()
    if topology is not None:
        return topology.of(list(ids))
    wanted = max(ids) + 1
    was_started = is_started()
    start(wanted)
    available = all_devices()
    if wanted > len(available):
        platform = available[0].platform
        if platform == "cpu" and was_started:
            way_out = (
                "JAX was started before this mesh was made, so simulated devices can't be added "
                f"any more. Make the largest mesh first, or set JAX_NUM_CPU_DEVICES={wanted} "
                "before the program starts"
            )
        elif platform == "cpu":
            way_out = (
                f"set JAX_NUM_CPU_DEVICES={wanted} (and remove "
                "--xla_force_host_platform_device_count from XLA_FLAGS)"
            )
        else:
            way_out = (
                f"use a mesh of at most {len(available)} devices, or simulate them on the CPU with "
                f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={wanted}"
            )
        raise DeviceCountError(
            f"DeviceMesh('xla', ...) wants device {wanted - 1}, so {wanted} devices, but JAX has "
            f"{len(available)} {platform} device(s): {way_out}"
        )
    return [available[i] for i in ids]


def own_device() -> Any:
    """The JAX device of tensors that are on no mesh: the process's first."""
    topology = abstract.current()
    if topology is not None:
        return topology.of([0])[0]
    start()
    import jax

    return jax.local_devices()[0]


def host_device() -> Any:
    """A CPU of this process, as JAX has it beside its accelerators; where it was started without
    one, `own_device`."""
    import jax

    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return own_device()


def device_count() -> int:
    """How many devices JAX has; 1 (without starting JAX) if no backend runs yet."""
    topology = abstract.current()
    if topology is not None:
        return len(topology.devices)
    if not is_started():
        return 1
    return len(all_devices())


def has_accelerators() -> bool:
    """Whether JAX computes on something else than CPUs. It is started to see that, but where it
    can't be otherwise: the number of simulated devices stays open."""
    if not is_started():
        if not gpus.may_accelerate():
            return False
        start()
    return all_devices()[0].platform != "cpu"


def live_programs() -> tuple[int, int | None]:
    """How many compiled programs the process has, and the bytes of their code (None where the
    backend doesn't say, as the CPU's)."""
    if not is_started():
        return 0, None
    import jax

    programs = jax.devices()[0].client.live_executables()
    return len(programs), sum(p.size_of_generated_code_in_bytes() for p in programs) or None


_PROGRAM_BYTES = 2**21  # of the host's memory that a small program takes; XLA doesn't say
_PART = 8  # of the host's memory that programs may take


class ProgramBound:
    """Lets caches forget programs when the process has many.

    Each cache has a limit; but a program of three operations takes 2 MiB of the host's memory on
    CPUs, and code that always meets new shapes fills all of the caches.

    Args:
        most: how many programs there may be before.
    """

    def __init__(self, most: int) -> None:
        self._most = most

    def look(self) -> None:
        """Count them, and forget what hasn't been used for longest if there are too many."""
        if live_programs()[0] <= self._most:
            return
        cache.forget_older()
        gc.collect()  # JAX's functions refer to themselves
        # Compiled steps have programs that no cache can let go.
        self._most = max(self._most, live_programs()[0] * 5 // 4)


@functools.cache
def _bound_programs() -> None:
    """From now on, as long as the process lives."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cache.watch_growth(ProgramBound(max(host // _PART // _PROGRAM_BYTES, 512)).look)


def code_bytes(compiled: Any) -> int | None:
    """The bytes of code of a ``jax.stages.Compiled``; None where the backend doesn't say."""
    # (``memory_analysis()`` has it, too, and takes a hundredth of the time of compiling it)
    return compiled.runtime_executable().size_of_generated_code_in_bytes() or None


@contextmanager
def default_dtypes() -> Iterator[None]:
    """JAX's own default dtypes for a block (``jnp.ones(3)`` is float32), inside of code that runs
    with 64-bit types; arrays that have such types keep them. Checked on JAX 0.9 and 0.10."""
    import jax

    with jax.enable_x64(False), jax_private.explicit_x64_dtypes("allow"):
        yield
