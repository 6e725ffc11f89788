"""Which XLA runtime is in use. Only this package talks to it about devices."""

from xla_dtensor.runtime.jax_runtime import device_count, devices, is_started, start

__all__ = ["device_count", "devices", "is_started", "start"]
