"""Training that goes on when hosts are lost and when they come back: `run`."""

from xla_dtensor.elastic.hosts import run

__all__ = ["run"]
