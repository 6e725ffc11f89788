"""What a compiled XLA program moves between devices: see `xla_dtensor.planning.collectives`."""

from xla_dtensor.planning.collectives import KINDS, Traffic, collective_traffic

__all__ = ["KINDS", "Traffic", "collective_traffic"]
