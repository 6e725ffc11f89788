"""What a compiled XLA program moves between devices: its home is `xla_dtensor.plan.collectives`."""

from xla_dtensor.plan.collectives import KINDS, Traffic, collective_traffic

__all__ = ["KINDS", "Traffic", "collective_traffic"]
