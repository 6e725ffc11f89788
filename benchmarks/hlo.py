"""What a compiled XLA program moves between devices: its home is `xla_dtensor.plan.collectives`."""

from xla_dtensor.plan.collectives import Traffic, collective_traffic

__all__ = ["Traffic", "collective_traffic"]
