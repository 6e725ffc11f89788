"""What a training step will need on a pod: memory, time and collectives; see README.md."""

from xla_dtensor.planning.abstract import abstract
from xla_dtensor.planning.planner import plan
from xla_dtensor.planning.report import Report

__all__ = ["Report", "abstract", "plan"]
