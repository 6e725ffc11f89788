"""The XLA runtime: devices, processes, memory. Only this package talks to it about devices."""

from xla_dtensor.runtime.jax_runtime import (
    all_devices,
    code_bytes,
    device_count,
    devices,
    has_accelerators,
    is_started,
    live_programs,
    start,
)

__all__ = [
    "all_devices",
    "code_bytes",
    "device_count",
    "devices",
    "has_accelerators",
    "is_started",
    "live_programs",
    "start",
]
