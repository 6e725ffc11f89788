"""``torch_xla.runtime``: how many devices and processes there are, and what they are called.

One process drives all devices, as torch_xla does in SPMD mode; several processes are those of a
launcher (`docs/several_processes.md`).
"""

from __future__ import annotations

import os
from typing import Any

import jax
import torch

from xla_dtensor import runtime
from xla_dtensor.errors import UnsupportedOpError
from xla_dtensor.runtime import processes

_PLATFORMS = {"gpu": "CUDA", "cuda": "CUDA", "rocm": "ROCM", "cpu": "CPU", "tpu": "TPU"}


def _start() -> None:
    runtime.start(int(os.environ.get("CPU_NUM_DEVICES", "1")))


def use_spmd(auto: bool = False) -> None:
    """SPMD is all there is, so this does nothing.

    Args:
        auto: torch_xla's auto-sharding.

    Raises:
        UnsupportedOpError: ``auto``.

    Example::

        import xla_dtensor.compat.torch_xla.runtime as xr

        xr.use_spmd()
        assert xr.is_spmd()
    """
    if auto:
        raise UnsupportedOpError(
            "use_spmd(auto=True): XLA's auto-sharding pass isn't in the XLA that JAX has; mark the "
            "parameters and the inputs, and XLA propagates the shardings from there"
        )


def is_spmd() -> bool:
    """Whether tensors are global: True."""
    return True


def disable_spmd() -> None:
    """torch_xla's way back to a process per device, which there isn't.

    Raises:
        UnsupportedOpError: always.
    """
    raise UnsupportedOpError(
        "disable_spmd(): tensors are global here; for values of each device's own use "
        "to_local() and xla_dtensor.collectives, or start a process per device"
    )


def global_runtime_device_count() -> int:
    """The number of devices, of all processes.

    Example::

        import xla_dtensor.compat.torch_xla.runtime as xr

        assert xr.global_runtime_device_count() >= 1
    """
    _start()
    return runtime.device_count()


def addressable_runtime_device_count() -> int:
    """The number of devices of this process."""
    _start()
    return len(jax.local_devices())


global_device_count = global_runtime_device_count
addressable_device_count = local_device_count = addressable_runtime_device_count


def global_runtime_device_attributes() -> list[dict[str, Any]]:
    """What the backend says of each device: its ``name``, and of a TPU its ``coords``,
    ``core_on_chip`` and ``slice_index``."""
    _start()
    found = []
    for number, device in enumerate(runtime.all_devices()):
        known: dict[str, Any] = {"name": f"{_platform(device)}:{number}"}
        for name in ("coords", "core_on_chip", "slice_index"):
            value = getattr(device, name, None)
            if value is not None:
                known[name] = list(value) if name == "coords" else value
        found.append(known)
    return found


def _platform(device: Any) -> str:
    return _PLATFORMS.get(device.platform, device.platform.upper())


def device_type() -> str | None:
    """``"CPU"``, ``"TPU"`` or ``"CUDA"``."""
    _start()
    return _platform(runtime.all_devices()[0])


def set_device_type(pjrt_device: str) -> None:
    """Choose the platform, before the first tensor: sets ``JAX_PLATFORMS``.

    Raises:
        UnsupportedOpError: JAX runs already.
    """
    if runtime.is_started():
        raise UnsupportedOpError(
            f"set_device_type({pjrt_device!r}): JAX runs already; call it before the first tensor, "
            f"or set JAX_PLATFORMS={pjrt_device.lower()}"
        )
    os.environ["PJRT_DEVICE"] = pjrt_device
    jax.config.update("jax_platforms", pjrt_device.lower())


def xla_device(n: int | None = None) -> torch.device:
    """The device that all tensors are on."""
    return torch.device("xla", 0)


def process_index() -> int:
    """The number of this process."""
    return processes.index()


def process_count() -> int:
    """The number of processes."""
    return processes.count()


# In SPMD mode torch_xla's ordinals are those of processes.
world_size = host_count = process_count
global_ordinal = host_index = process_index


def local_ordinal() -> int:
    """The number of this process among those of its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_process_count() -> int:
    """The number of processes on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_master_ip() -> str:
    """The host of process 0."""
    if not processes.several():
        return "localhost"
    return processes.coordinator().rpartition(":")[0]


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep compiled programs in a folder, for later runs. Without it they are kept in
    ``~/.cache/xla_dtensor``.

    Args:
        path: the folder.
        readonly: torch_xla's; JAX's cache is written to, whatever it says.
    """
    jax.config.update("jax_compilation_cache_dir", path)
