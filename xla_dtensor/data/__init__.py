"""Batches on their way to the devices."""

from xla_dtensor.data.device_loader import DeviceLoader, device_loader

__all__ = ["DeviceLoader", "device_loader"]
