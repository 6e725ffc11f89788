"""Devices by the name of what they are part of: ``"v5p:4x4x4"``, ``"v5e:16x16*4"``, ``"h100:8x8"``.

A TPU's are described by its compiler, libtpu, which needs no TPU, and those of named GPUs to XLA's
GPU compiler, which needs no GPU. Those of CPUs (simulated ones, of any number) and the GPUs of this
machine are JAX's own.
"""

from __future__ import annotations

import functools
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from xla_dtensor.base import jax_private
from xla_dtensor.errors import TopologyError
from xla_dtensor.runtime import gpus
from xla_dtensor.runtime.chips import CHIPS, GPUS, Chip, chip_of

HERE = ("cpu", "gpu")
KINDS = (*CHIPS, *GPUS, *HERE)

_NAME = re.compile(r"(?P<kind>[a-z0-9_]+):(?P<shape>\d+(x\d+)*)(\*(?P<slices>\d+))?")


@dataclass(frozen=True, eq=False)
class Topology:
    """Devices that programs are compiled for. There is one object per name.

    Attributes:
        name: ``"v5e:4x4"``.
        kind: ``"v5e"``.
        chips: how many chips these are; a chip may be two devices.
        devices: JAX's, which may be of a kind that can't compute; each slice's together.
        slices: in how many slices they are, between which the network is a slow one.
    """

    name: str
    kind: str
    chips: int
    devices: tuple[Any, ...] = field(repr=False)
    slices: int = 1

    @property
    def is_here(self) -> bool:
        """Whether the devices exist."""
        return self.kind not in CHIPS and self.kind not in GPUS

    @property
    def is_of_gpus(self) -> bool:
        """Whether the devices are GPUs that aren't here."""
        return self.kind in GPUS

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options that XLA wants for these devices."""
        return {**gpus.COMPILER_OPTIONS} if self.is_of_gpus else {}

    @functools.cached_property
    def chip(self) -> Chip | None:
        """What the devices are; None where no table has them."""
        return chip_of(self.kind, self.devices[0])

    def of(self, numbers: list[int]) -> list[Any]:
        """The devices at these positions.

        Raises:
            TopologyError: there are fewer.
        """
        wanted = max(numbers) + 1
        if wanted > len(self.devices):
            raise TopologyError(
                f"a mesh of {wanted} devices for {self.name}, which has {len(self.devices)}: make "
                f"the mesh smaller, or take a larger topology"
            )
        return [self.devices[i] for i in numbers]


@functools.cache
def topology(name: str) -> Topology:
    """The topology of that name.

    Args:
        name: a kind and a shape in chips: ``"v5e:16x16"``, ``"v5p:4x4x4"``, ``"v6e:8x8"``,
            ``"tpu7x:2x2x1"``, and ``"v5e:16x16*4"`` for four such slices; ``"h100:8x8"``, hosts
            and the GPUs of each; ``"cpu:64"`` are so many simulated devices (``"cpu:8*2"`` twice
            8, taken for two slices), ``"gpu:8"`` the first GPUs of this machine; likewise of what
            JAX computes on, whatever it is.

    Raises:
        TopologyError: there is no such kind, it has no such shape, or its compiler isn't installed.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["kind"] not in (*KINDS, _platform()):
        raise TopologyError(
            f"topology {name!r}: name a kind and a shape, as in 'v5e:16x16', 'v5p:4x4x4', "
            f"'h100:8x8', 'cpu:64'; kinds are {', '.join(KINDS)}"
        )
    shape = tuple(map(int, match["shape"].split("x")))
    if 0 in shape:
        raise TopologyError(f"topology {name!r}: each of its axes has one chip or more")
    kind, slices = match["kind"], int(match["slices"] or 1)
    if slices < 1 or (slices > 1 and kind not in CHIPS and kind != "cpu"):
        raise TopologyError(
            f"topology {name!r}: one or more slices of a TPU ('v5e:16x16*4') or of simulated "
            "devices ('cpu:8*2'); of GPUs give all hosts ('h100:8x8'), each of which is a fast "
            "network by itself (gb200 and gb300: 18 of them)"
        )
    if kind not in CHIPS and kind not in GPUS:
        devices = _here(name, kind, math.prod(shape) * slices)
    elif kind in CHIPS:
        devices = _of_tpu(name.partition("*")[0], slices)
    elif len(shape) == 2:
        devices = gpus.devices(name, kind, *shape)
    else:
        raise TopologyError(
            f"topology {name!r}: give hosts and the GPUs of each, as in '{kind}:8x8'"
        )
    return Topology(name, kind, math.prod(shape) * slices, tuple(devices), slices)


def _platform() -> str:
    """JAX's name of what it computes on, if it has been started."""
    import jax

    return jax.devices()[0].platform if jax_private.backends_are_initialized() else ""


def _here(name: str, kind: str, count: int) -> list[Any]:
    import jax

    from_jax: list[Any] = []
    if kind == "cpu":
        _simulate(count)
    try:
        from_jax = jax.devices(kind)
    except RuntimeError as error:
        raise TopologyError(
            f"topology {name!r}: JAX has no {kind} here ({error}); plan for a TPU "
            "('v5e:4x4'), for GPUs that aren't here ('h100:1x8') or for CPUs ('cpu:8')"
        ) from error
    if len(from_jax) < count:
        why = (
            f"set JAX_NUM_CPU_DEVICES={count} before the program starts, or enter xd.abstract "
            "before anything else uses JAX"
            if kind == "cpu"
            else f"this machine has {len(from_jax)}"
        )
        raise TopologyError(f"topology {name!r} wants {count} {kind} devices: {why}")
    return from_jax[:count]


def _simulate(count: int) -> None:
    import jax

    if not jax_private.backends_are_initialized() and jax.config.jax_num_cpu_devices < count:
        jax.config.update("jax_num_cpu_devices", count)


def _of_tpu(name: str, slices: int) -> list[Any]:
    # libtpu asks the cloud's metadata server who it is, unless it is told not to.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    import jax
    from jax.experimental import topologies

    chips, _ = jax_private.tpu_chips()
    if jax_private.get_tpu_library_path() is None:
        raise TopologyError(
            f"topology {name!r} needs the TPU's compiler, which needs no TPU: pip install libtpu "
            "(500 MB), or set TPU_LIBRARY_PATH to its libtpu.so"
        )
    if not chips:
        # libtpu locks the machine's TPU. Where there is none, compilers may run side by side.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if not chips and jax.config.jax_platforms is None:
        # With libtpu there, JAX would look for a TPU to run on.
        jax.config.update("jax_platforms", "cpu")
    try:
        # libtpu takes a slice for one of several if it is told a number.
        several = {"num_slices": slices} if slices > 1 else {}
        return list(topologies.get_topology_desc(name, "tpu", **several).devices)
    except Exception as error:
        raise TopologyError(
            f"topology {name!r}: libtpu doesn't know it ({str(error).splitlines()[0]}); kinds are "
            f"{', '.join(CHIPS)}, v5e and v6e have two axes, up to 16x16, the others three"
        ) from error
